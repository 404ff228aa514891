"""Start a supervisor, detached from the agent, and wait for its report. Blocks."""

from __future__ import annotations

import json
import logging
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from rdzv_etcd.embedded.binary import BINARY_VARIABLE, Binary
from rdzv_etcd.embedded.child import Plan
from rdzv_etcd.embedded.port import certificates_at, listen_urls
from rdzv_etcd.embedded.program import without_secrets
from rdzv_etcd.embedded.seat import ClusterOrder
from rdzv_etcd.embedded.supervisor import Order
from rdzv_etcd.errors import EmbeddedEtcdError
from rdzv_etcd.log import LineTimes, TookTooLongError, watched
from rdzv_etcd.settings import Connection, Endpoint, Settings
from rdzv_etcd.settings.hosts import is_loopback
from rdzv_etcd.trust import GIVE_ALL

log = logging.getLogger(__name__)

STALE_AFTER_S = 600.0
"""A lease that no node has renewed for so long keeps no etcd, unless nodes' last as long."""
_START_GRACE_S = 30.0
"""What the first node has at least between the start and its first lease."""
_LOOK_EVERY_MS = 500
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_HUNG_S = 1.0
"""How much later than its limit a wait is ended from outside, without a cause of its own."""
_FIRST_LOOK = "nothing is known yet: the search waits for a name server, a disk or a program"
T = TypeVar("T")
# -I and -S: no site packages, no PYTHON* variables; it needs this package and the standard library.
_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from rdzv_etcd.embedded.supervisor import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True)
class StartedEtcd:
    """The etcd that this call started; it runs on when this process ends."""

    supervisor_pid: int
    """SIGTERM to it ends etcd and removes its data."""


def launch(
    settings: Settings,
    binary: Binary,
    addresses: tuple[str, ...],
    environ: Mapping[str, str],
    wait: Wait,
    *,
    cluster: ClusterOrder | None = None,
    stale_after_s: float = STALE_AFTER_S,
) -> StartedEtcd | None:
    """Start the supervisor, detached, of an etcd that listens at ``addresses``; return ``None`` if
    another process has meanwhile, or is about to.

    Blocks until etcd serves, with ``cluster`` only until the supervisor of that seat can be
    reached, or to the end of the ``wait``. Raises :class:`EmbeddedEtcdError` if it fails.
    """
    connection, grace_s = settings.connection, settings.embed_grace_s
    endpoint = connection.endpoints[0]
    if cluster is not None:
        endpoint = Endpoint(cluster.places[cluster.seat].host, cluster.places[cluster.seat].port)
    name = str(endpoint.port) if cluster is None else endpoint.target
    read_fd, write_fd = os.pipe()
    order = Order(
        Plan(
            str(binary.path),
            listen_urls(addresses, endpoint.port, connection.scheme),
            f"{connection.scheme}://{endpoint.target}",
            certificates_at(connection, addresses),
        ),
        name,
        grace_s=grace_s,
        start_grace_s=max(grace_s, _START_GRACE_S),
        stale_after_s=max(stale_after_s, settings.timing.lease_ttl_s),
        status_fd=write_fd,
        cluster=cluster,
    )
    command = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(Path(__file__).parents[2])]
    command.append(name)  # for people who look at a list of processes
    note = partial(
        wait.note,
        f"{binary.path}, which this node has started, does not serve yet; if it never comes up, "
        f"name another in {BINARY_VARIABLE}",
    )
    with os.fdopen(read_fd, "rb") as status:
        try:
            note()
            subprocess.run(
                command,
                input=json.dumps(asdict(order)).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env=without_secrets(environ),
                start_new_session=True,  # a Ctrl-C for the agent is not for etcd
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedEtcdError(
                f"the supervisor of an embedded etcd could not be started: {error}"
            ) from error
        finally:
            os.close(write_fd)
        report: dict[str, str] = json.loads(_line(status, binary, note))
    if report["outcome"] == "failed":
        raise EmbeddedEtcdError(
            f"the embedded etcd did not start at {endpoint.target}: {report['detail']}"
        )
    is_ours = report["outcome"] == "started"
    return StartedEtcd(int(report["detail"])) if is_ours else None


def _line(status: IO[bytes], binary: Binary, note: Callable[[], None]) -> bytes:
    """Wait for the report; ``note`` that there is none now and then."""
    waiter = select.poll()
    waiter.register(status, select.POLLIN)
    while not waiter.poll(_LOOK_EVERY_MS):
        note()
    line = status.readline()
    if not line:
        raise EmbeddedEtcdError(
            f"the supervisor of an embedded etcd ({binary.path}) ended without a report"
        )
    return line


def warn_of_strangers(connection: Connection, ports: Iterable[int]) -> None:
    """Say once for each start that an etcd which others reach is open to them."""
    if connection.secret is None and not all(is_loopback(it.host) for it in connection.endpoints):
        log.warning(
            "the embedded etcd at %s has no secret: anyone who can reach port %s of its host "
            "controls the workers; %s, so that only these get in",
            connection,
            ", ".join(map(str, sorted(ports))),
            GIVE_ALL,
        )


class Wait:
    """A node's wait for an etcd: logs now and then what is missing, and ends it."""

    def __init__(self, what: str, where: str, limit_s: float) -> None:
        self._what, self._where, self._limit_s = what, where, limit_s
        self._began_s, self._lines = time.monotonic(), LineTimes()
        self._is_first, self._is_over = True, threading.Event()
        self._why = _FIRST_LOOK

    def through(self, search: Callable[[], T]) -> T:
        """Do ``search``, which notes what it finds, in a thread of its own: a resolver may take as
        long as it likes, and signal handlers run meanwhile.

        Raises what it raises, and :class:`EmbeddedEtcdError` if it does not end in time.
        """
        try:
            return watched(search, self._report, "rdzv-etcd start", self._limit_s + _HUNG_S)
        except TookTooLongError:
            raise self._failure() from None
        finally:
            self._is_over.set()

    def note(self, why: str | Callable[[], str]) -> None:
        """Take note that there is none yet, and why; what takes look-ups only if it is about to be
        shown. Raises :class:`EmbeddedEtcdError` after the limit, and when nobody waits any more."""
        waited_s = time.monotonic() - self._began_s
        is_due = waited_s + 2 * _LONGEST_PAUSE_S >= min(self._lines.next_s, self._limit_s)
        if isinstance(why, str):
            self._why = why
        elif is_due or self._why is _FIRST_LOOK:
            self._why = why()
        if waited_s > self._limit_s or self._is_over.is_set():
            raise self._failure()

    def pause(self, why: str | Callable[[], str]) -> None:
        """The same, and block until it is worth while to look again: there may be no process yet
        that could announce the start.

        That is about a tenth of the wait so far, and drawn: thousands of nodes may ask those for
        which they wait.
        """
        if self._is_first:
            self._is_first = False
            log.info("waiting up to %g s for the %s at %s", self._limit_s, self._what, self._where)
        self.note(why)
        tenth_s = (time.monotonic() - self._began_s) / 10
        longest_s = min(max(_FIRST_PAUSE_S, tenth_s), _LONGEST_PAUSE_S)
        self._is_over.wait(random.uniform(longest_s / 2, longest_s))

    def _report(self, waited_s: float) -> None:
        self._lines.note(waited_s)
        log.warning(
            "waiting %d s (of %g) for the %s at %s: %s",
            waited_s,
            self._limit_s,
            self._what,
            self._where,
            self._why,
        )

    def _failure(self) -> EmbeddedEtcdError:
        return EmbeddedEtcdError(
            f"no {self._what} answered at {self._where} within {self._limit_s:g} s: {self._why}"
        )
