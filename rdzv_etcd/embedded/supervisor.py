"""Keeps one etcd running while nodes use it, and ends it afterwards. A program of its own.

Started with nothing but the standard library, so that it stays small and needs nothing of the agent
that started it: it has its own session, no terminal and none of the agent's pipes. It asks one
question, "is any lease renewed?", and knows nothing of jobs. Every node holds a lease, and so does
the marker of a closed job while late nodes may ask for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass

from rdzv_etcd.embedded.child import EtcdProcess, Plan, StartError, StopRequestedError
from rdzv_etcd.embedded.program import (
    UNBLOCKED,
    asks_to_stop,
    take_lock,
    wait_for_signal,
)
from rdzv_etcd.embedded.seat import ClusterOrder, Place
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.trust import Certificates

MOST_RESTARTS = 5
HEALTHY_AFTER_S = 60.0
"""A crash after this long is a new incident: restarts are counted from zero again."""
BLIND_LIMIT_S = 600.0
"""An etcd that has not answered for this much longer than the grace time is given up."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the starter asks for. It comes as JSON on standard input: the key in it must be in no
    list of processes."""

    plan: Plan
    name: str
    """What its lock is for: see :func:`take_lock`."""
    grace_s: float
    """How long etcd is kept after its last use."""
    start_grace_s: float
    """At least so long the first node may take to use it."""
    stale_after_s: float
    """A lease that no node has renewed for so long keeps no etcd."""
    status_fd: int
    """Where the outcome is reported."""
    cluster: ClusterOrder | None = None
    """With it, the etcd is a member of an embedded cluster."""


def keep(etcd: EtcdProcess, order: Order) -> str:
    """Return, with the reason, when no node has used etcd for the grace time.

    At the start there is no node yet: the first one has at least ``start_grace_s``.
    """
    longest_s = max(0.1, order.grace_s / 4)
    interval_s = min(2.0, longest_s)
    quiet_s, patience_s = 0.0, max(order.grace_s, order.start_grace_s)
    used: bool | None = False
    started = looked = time.monotonic()
    restarts = 0
    while True:
        if asks_to_stop(wait_for_signal(interval_s)):
            return "a signal asked for it"
        etcd.tidy()
        now = time.monotonic()
        # While this host was stopped no node could renew its lease, so that time hardly counts. To
        # ask an etcd that does not answer takes long as well, and counts.
        quiet_s += now - looked if used is None else min(now - looked, longest_s)
        looked = now
        if not etcd.running:
            restarts = 1 if now - started > HEALTHY_AFTER_S else restarts + 1
            if restarts > MOST_RESTARTS:
                return "etcd keeps crashing"
            try:
                etcd.start()  # on the same data: leases and keys are still there
            except StopRequestedError:
                return "a signal asked for it"
            except StartError:
                return "etcd cannot be restarted"
            started = now
        used = etcd.is_used(order.stale_after_s)
        if used:
            quiet_s, patience_s = 0.0, order.grace_s
        elif quiet_s > patience_s + (BLIND_LIMIT_S if used is None else 0):
            return "no node uses it"


def main() -> int:
    """Detach, take the lock, run etcd, report to the starter through the status pipe, keep etcd."""
    order = _order(sys.stdin.read())
    if os.fork() > 0:  # the agent waits for this parent only: no zombie is left to it
        return 0
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, UNBLOCKED)
    try:
        held = take_lock(order.name)
    except OSError:
        _report(order.status_fd, "taken", "another node of this machine is starting it")
        return 0
    with held:
        return _serve(order) if order.cluster is None else _keep_seat(order, order.cluster)


def _serve(order: Order) -> int:
    try:
        etcd = EtcdProcess(order.plan)
    except OSError as error:
        _report(order.status_fd, "failed", f"there is no room for its data: {error}")
        return 1
    try:
        etcd.start()
    except StartError as error:
        etcd.remove()
        _report(order.status_fd, "failed", str(error))
        return 1
    try:
        _report(order.status_fd, "started", str(os.getpid()))
        keep(etcd, order)
    finally:
        etcd.remove()
    return 0


def _keep_seat(order: Order, cluster: ClusterOrder) -> int:
    from rdzv_etcd.embedded.cluster import SeatSupervisor  # noqa: PLC0415 - it loads asyncio

    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNBLOCKED)

    def report_start() -> None:
        _report(order.status_fd, "started", str(os.getpid()))

    try:
        seat = SeatSupervisor(cluster, order.plan, order.grace_s, order.stale_after_s)
        seat.keep(report_start, order.start_grace_s)
    except (OSError, SettingsError) as error:
        _report(order.status_fd, "failed", f"its supervisor cannot listen: {error}")
        return 1
    return 0


def _report(status_fd: int, outcome: str, detail: str) -> None:
    """Write one line for the starter and close the pipe."""
    # The starter may have been killed meanwhile; others will use this etcd.
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, json.dumps({"outcome": outcome, "detail": detail}).encode() + b"\n")
    os.close(status_fd)


def _order(text: str) -> Order:
    fields = json.loads(text)
    plan = fields["plan"]
    made = plan["certificates"]
    plan = Plan(**{**plan, "certificates": None if made is None else Certificates(**made)})
    cluster = fields["cluster"]
    if cluster is not None:
        places = tuple(Place(**place) for place in cluster["places"])
        cluster = ClusterOrder(**{**cluster, "places": places})
    return Order(**{**fields, "plan": plan, "cluster": cluster})
