#: on each of 2 nodes, 2 workers
torchrun \
    --nnodes=1:4 \
    --nproc-per-node=1 \
    --max-restarts=3 \
    --rdzv_id=123 \
    --rdzv_backend=c10d \
    --rdzv_conf=last_call_timeout=5,timeout=300 \
    --rdzv_endpoint=worker-0:1234 \
    train.py;
