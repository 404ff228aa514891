"""Records torch's rendezvous events as torch's own handlers do, for whoever has put a logging
handler at torch's destination for them, ``dynamic_rendezvous``.

Its metrics (``torch.distributed.elastic.metrics``) need nothing here: torch's agent measures every
rendezvous by itself, whatever the backend.
"""

from __future__ import annotations

import logging
import os
import socket

from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState

_log = logging.getLogger("rdzv_etcd")


def record(
    run_id: str,
    message: str,
    state: NodeState,
    *,
    name: str,
    hostname: str | None,
    rank: int | None = None,
) -> None:
    """Record one event; never raises, whatever the user's handler does. Does nothing, quickly, as
    long as there is none. To be called while an error is handled if ``state`` says that it failed:
    its traceback goes into the event."""
    try:
        construct_and_record_rdzv_event(
            run_id,
            message,
            state,
            name=name,
            hostname=hostname or socket.gethostname(),  # torch would ask a name server
            pid=os.getpid(),
            rank=rank,
        )
    except Exception:  # noqa: BLE001 - the handler is somebody else's, and no job fails for it
        _log.debug("an event could not be recorded: %s", message, exc_info=True)
