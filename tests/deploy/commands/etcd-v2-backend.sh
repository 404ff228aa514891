#: on each of 2 nodes, 2 workers
# From a script for torch's own backend: its options have other names.
torchrun --nnodes=2:2 --nproc-per-node=1 --rdzv-id=imagenet --rdzv-backend=etcd-v2 \
    --rdzv-endpoint=etcd-server:2379 \
    --rdzv-conf=protocol=http,read_timeout=60,keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=30 \
    train.py /data/tiny-imagenet-200
