#: on each of 2 nodes, 2 workers
export MASTER_ADDR=10.10.10.68
export MASTER_PORT=12356
export LOCAL_ADDR=`hostname -i | awk '{print $1}'`
time torchrun --nnodes=2 --nproc_per_node=1 --rdzv_id=100 --local-addr=$LOCAL_ADDR --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py
