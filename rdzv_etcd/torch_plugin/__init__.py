"""The torch plugin. This module imports nothing: torch loads it in every process that touches
``torch.distributed.elastic.rendezvous``, training workers included, and turns an import error into
a warning and "backend not registered".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def etcd3_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point ``etcd3`` of group ``torchrun.handlers``: returns the handler's creator."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler; see :func:`rdzv_etcd.torch_plugin.handler.create_handler`."""
    from rdzv_etcd.torch_plugin import handler  # noqa: PLC0415 - see the module's docstring

    return handler.create_handler(params)
