#: on each of 2 nodes, 4 workers
torchrun --nproc_per_node=2 --nnodes 2 --rdzv_id 1 --rdzv_backend=c10d --rdzv_endpoint='10.0.0.4:29500' train.py -c configs/detr.yml
