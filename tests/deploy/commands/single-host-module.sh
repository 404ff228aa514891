#: on each of 1 nodes, 2 workers
torchrun --nnodes=1 \
    --max_restarts=0  \
    --rdzv_id=${RANDOM} \
    --rdzv_backend=c10d \
    --nproc_per_node=2  \
    --rdzv_endpoint=localhost:29403  -m \
    train
