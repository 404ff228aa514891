#!/bin/bash
#: once for 2 nodes, 4 workers
#PBS -l select=2:ngpus=2
cat > helper.sh <<'HELPER'
#!/bin/bash
MASTER_HOSTNAME=$1 PROJECT_DIR=$2 NNODES=$3 NGPUS_PER_NODE=$4
cd $PROJECT_DIR
module load anaconda3/2022.05
source activate workshop
torchrun \
    --nnodes=$NNODES \
    --nproc_per_node=$NGPUS_PER_NODE \
    --rdzv_id=12345 \
    --rdzv_backend=c10d \
    --rdzv_endpoint=$MASTER_HOSTNAME:3000 \
    train.py
status=$?
echo "$HOSTNAME finished"
exit $status
HELPER
pbsdsh -- bash `pwd`/helper.sh `hostname` `pwd` 2 $(nvidia-smi -L | wc -l)
