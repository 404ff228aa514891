#!/bin/bash
# Submits to Run:ai, project team-a: one master and one worker make two nodes.
set -euo pipefail

runai training pytorch submit digits \
    --project team-a \
    --image registry.example.com/team-a/trainer:1.0 \
    --workers 1 \
    --gpu-devices-request 8 \
    --secret-volume path=/etc/rdzv-etcd,name=rdzv-etcd \
    --existing-pvc claimname=checkpoints,path=/checkpoints \
    --command -- \
    torchrun \
    --nnodes=2 \
    --nproc-per-node=auto \
    --max-restarts=100 \
    --rdzv-backend=etcd3 \
    --rdzv-endpoint=https://etcd.rdzv.svc:2379 \
    --rdzv-id=team-a.digits \
    --rdzv-conf=rank_key=PET_NODE_RANK,join_timeout=1800,after_end=finish,ca_cert=/etc/rdzv-etcd/ca.crt,cert=/etc/rdzv-etcd/tls.crt,key=/etc/rdzv-etcd/tls.key,user_file=/etc/rdzv-etcd/user,password_file=/etc/rdzv-etcd/password \
    examples/digits.py --checkpoint-dir=/checkpoints
