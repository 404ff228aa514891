#: on each of 2 nodes, 2 workers
# An old static line, to which the rendezvous options were added.
torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$NODE_RANK --master_addr=10.0.0.4 --master_port 9999 \
    --rdzv_id=1986 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.4:9999 \
    train.py --train_engine torch_ddp --ddp.dist_backend nccl --pin_memory
