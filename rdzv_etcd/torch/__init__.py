"""Training that continues in the same processes when the world changes.

::

    import rdzv_etcd
    import rdzv_etcd.torch

    def train(world):
        step = rdzv_etcd.torch.broadcast_newest(world, my_step, model, optimizer)
        while not world.should_yield:
            ...

    with rdzv_etcd.connect("etcd-host:2379", job="my-job", nodes=(2, 4)) as group:
        rdzv_etcd.torch.run(group, train, backend="gloo")

In workers of ``torchrun --rdzv-conf=in_process=1``, :func:`connect_worker` takes the place of
``connect``.

Importing this package imports torch. It uses only the library's public names.
"""

from rdzv_etcd.torch.process_group import destroy_process_group, init_process_group
from rdzv_etcd.torch.recovery import run
from rdzv_etcd.torch.state_broadcast import Stateful, broadcast_newest, newest_member
from rdzv_etcd.torch.worker import connect_worker

__all__ = [
    "Stateful",
    "broadcast_newest",
    "connect_worker",
    "destroy_process_group",
    "init_process_group",
    "newest_member",
    "run",
]
