#!/bin/bash
# Runs torchrun on a preemptible node: turns the scheduler's SIGTERM into the SIGUSR1 that drains the
# node.
#
#     preemptible.sh torchrun --nnodes=2:4 ... train.py
#
# The other nodes are notified first, so that their workers do not fail; this node's workers get
# SIGTERM a second later, and have 30 s. Exits as torchrun does: with 0 after a drain. Ctrl-C and a
# closed terminal are passed on as SIGTERM.
set -u
: "${1:?is missing: write preemptible.sh torchrun and its arguments}"

agent='' signal=''
pass_on() {
    signal=$1
    [[ -z $agent ]] || kill -s "$signal" "$agent" 2>/dev/null
}
trap 'pass_on USR1' TERM
trap 'pass_on TERM' INT HUP

"$@" &
agent=$!
[[ -z $signal ]] || kill -s "$signal" "$agent" # it arrived before there was an agent

wait "$agent"
while kill -0 "$agent" 2>/dev/null; do # a signal has interrupted the wait
    wait "$agent"
done
wait "$agent" # once more, for its exit code
