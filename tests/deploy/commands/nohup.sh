#: on each of 2 nodes, 2 workers
LOG=run_$(date +%m%d).log
nohup torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id "$(basename "$PWD")" --rdzv-backend c10d --rdzv-endpoint "10.1.2.3:29500" train.py > $LOG.$NODE_RANK 2>&1 &
PID=$!
echo "started $PID"
wait $PID
