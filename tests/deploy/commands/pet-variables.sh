#: on each of 2 nodes, 2 workers
export PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_RDZV_ID=exp_07.b PET_MAX_RESTARTS=3
export PET_RDZV_BACKEND=c10d
export PET_RDZV_ENDPOINT=trainer-0.trainers:29400
exec torchrun train.py
