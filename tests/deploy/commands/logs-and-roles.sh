#: on each of 2 nodes, 2 workers
torchrun --nnodes=2 --nproc-per-node=1 --log-dir ./logs --redirects 3 --tee 3 --role trainer \
    --monitor-interval=5 --start-method=spawn --local-ranks-filter=0 \
    --rdzv-id=job.2024-01-01T00:00:00 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 train.py
