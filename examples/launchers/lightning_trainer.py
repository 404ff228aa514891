"""Lightning: the same trainer under torchrun, and without it on a group of its own.

    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=etcd3 --rdzv-endpoint=etcd-host:2379 \\
        --rdzv-id=my-job examples/launchers/lightning_trainer.py

    python examples/launchers/lightning_trainer.py etcd-host:2379 my-job --nodes 2

Under torchrun nothing is special: Lightning recognises its environment by itself. Without torchrun
:class:`GroupEnvironment` tells Lightning the place of the process in the world.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workers import Place, launch, nodes

import rdzv_etcd


class GroupEnvironment(ClusterEnvironment):
    """One process per node: its place is that of the node in the world."""

    creates_processes_externally = True

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def main_address(self) -> str:
        return self._place.address

    @property
    def main_port(self) -> int:
        return self._place.port

    @staticmethod
    def detect() -> bool:
        return False  # it is always given

    def world_size(self) -> int:
        return self._place.size

    def set_world_size(self, size: int) -> None:
        pass  # the world says how large it is

    def global_rank(self) -> int:
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        return self._place.node_rank


class Line(LightningModule):
    """Learns that y is 3x - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(*plugins: ClusterEnvironment, num_nodes: int, epochs: int) -> None:
    torch.manual_seed(7)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    model = Line()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        strategy="ddp",
        plugins=list(plugins),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, 3 * x - 1), batch_size=16))
    weight, bias = model.layer.weight.item(), model.layer.bias.item()
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: y = {weight:.2f}x + {bias:.2f}",
        flush=True,
    )
    # Lightning does this for NCCL only. gloo threads may still hold tensors of the last batch; one
    # that gives them back while Python ends takes the process with it, after all has gone well.
    dist.destroy_process_group()


def work(place: Place, epochs: int) -> None:
    """What each process does without torchrun."""
    fit(GroupEnvironment(place), num_nodes=place.size, epochs=epochs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", nargs="?", help="of etcd; not under torchrun")
    parser.add_argument("job", nargs="?")
    parser.add_argument("--nodes", type=nodes, default=(2, 2), metavar="MIN:MAX")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    if args.endpoints is None:  # under torchrun
        fit(num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), epochs=args.epochs)
        return
    with rdzv_etcd.connect(args.endpoints, job=args.job, nodes=args.nodes) as group:
        launch(group, work, args.epochs)


if __name__ == "__main__":
    main()
