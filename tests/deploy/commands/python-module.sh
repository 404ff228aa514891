#: on each of 2 nodes, 2 workers
export CUDA_VISIBLE_DEVICES=0
OMP_NUM_THREADS=1 python -m torch.distributed.run --nnodes=2 --nproc_per_node=1 \
    --rdzv_backend=c10d --rdzv_endpoint=$MASTER_IP:29400 --rdzv_id=llama-sft-$USER train.py --deepspeed ds_z3.json
