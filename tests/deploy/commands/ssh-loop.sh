#!/bin/bash
#: once for 2 nodes, 2 workers
RANK=0
HOSTS=("austin" "baton-rouge")
NUM_NODES=${#HOSTS[@]}
RENDEZVOUS_HOST="${HOSTS[0]}:42424"
TRAIN_SCRIPT=`pwd`/train.py
pids=()
for host in ${HOSTS[@]}; do
    ssh $host torchrun \
        --nproc_per_node=1 \
        --nnodes=$NUM_NODES \
        --node_rank=$RANK \
        --rdzv_id=42424 \
        --rdzv_backend=c10d \
        --rdzv_endpoint=$RENDEZVOUS_HOST \
        $TRAIN_SCRIPT "$@" &
    pids+=($!)
    ((RANK=RANK+1))
done
for pid in ${pids[@]}; do wait $pid || exit 1; done
