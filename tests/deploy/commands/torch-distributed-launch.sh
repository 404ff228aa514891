#: on each of 2 nodes, 2 workers
python -m torch.distributed.launch --use_env --nnodes=2 --nproc_per_node=1 --rdzv_id=20240101 \
    --rdzv_backend=c10d --rdzv_endpoint=node0:29501 train.py
