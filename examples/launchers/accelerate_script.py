"""Accelerate: under torchrun, and through ``accelerate launch``.

    torchrun --nnodes=1:4 --nproc-per-node=2 --rdzv-backend=etcd3 --rdzv-endpoint=etcd-host:2379 \\
        --rdzv-id=my-job examples/launchers/accelerate_script.py

    PET_RDZV_ID=my-job accelerate launch --multi_gpu --num_machines 2 --num_processes 16 \\
        --machine_rank 1 --rdzv_backend etcd3 \\
        --main_process_ip etcd-host --main_process_port 2379 examples/launchers/accelerate_script.py

``accelerate launch`` hands its rendezvous options on to torchrun, and takes the endpoint from
``--main_process_ip`` and ``--main_process_port``. The same command goes on all machines, also with
``--machine_rank 1``: ranks come from the rendezvous, and machine 0 would refuse to start if an etcd
listens on that port of its own. It has no option for the job's id, which torchrun takes from
``PET_RDZV_ID``, and none for the fewest nodes: the number of machines is fixed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed.nn.functional  # before there is a process group: see the end
from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    model = torch.nn.Linear(1, 1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((4, 1), float(accelerator.process_index), device=accelerator.device)
    loss = (prepared(x) - x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    weights = accelerator.gather(model.weight.detach().flatten())
    agree = bool((weights == weights[0]).all())
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes}: "
        f"all have the same weight: {agree}",
        flush=True,
    )
    # gloo's threads end with the last reference to their process group; one that has a tensor to
    # give back while Python ends would take the process with it. The model has such a reference,
    # and that module's default arguments would have one, had it been imported later.
    prepared, optimizer = accelerator.free_memory(prepared, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
