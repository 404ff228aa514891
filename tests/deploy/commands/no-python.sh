#: on each of 2 nodes, 4 workers
torchrun --nnodes=2 --nproc-per-node=2 --no-python --rdzv-id=wrapped --rdzv-backend=c10d --rdzv-endpoint=node0:29500 \
    ./train.sh --fp16
