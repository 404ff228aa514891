#!/bin/bash
#: on each of 2 nodes, 2 workers
torchrun \
	--nnodes ${JOB_WORLD_SIZE:-2} \
	--nproc_per_node ${JOB_NPROC_PER_NODE:-1} \
	--rdzv_id ${JOB_NAME:-0} \
	--rdzv_backend c10d \
  --rdzv_endpoint=${JOB_MANAGER_HOST:-localhost}:${JOB_MANAGER_PORT:-23400} \
	train.py $@
