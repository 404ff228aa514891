"""``RendezvousHandler`` on a :class:`~rdzv_etcd.world.group.Group`: ``--rdzv_backend=etcd3``."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from rdzv_etcd.errors import (
    DrainedError,
    EtcdUnavailableError,
    JobClosedError,
    RdzvEtcdError,
    RendezvousFailedError,
)
from rdzv_etcd.names import display_name
from rdzv_etcd.process import WorkersNews
from rdzv_etcd.settings import AfterEnd, Settings
from rdzv_etcd.settings.fields import DEFAULT_JOB_ID
from rdzv_etcd.settings.options import WITHOUT_MEANING
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.text import shown
from rdzv_etcd.torch_plugin.environment import (
    WorkerEnvironment,
    full_environment,
)
from rdzv_etcd.torch_plugin.errors import (
    Outcome,
    is_missing_result,
    outcome_of,
    torch_errors,
    why_workers_failed,
)
from rdzv_etcd.torch_plugin.signals import AgentSignals
from rdzv_etcd.torch_plugin.store import AgentStore, serve_tcp_store
from rdzv_etcd.world.group import Group

BACKEND = "etcd3"
_OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, it asks for a store that the workers of rank 0 serve themselves; as in torch."""
_OTHERS_FIRST_S = 1.0
"""How long after its node the workers of a drained agent stop. Workers whose peers are gone fail,
and an agent counts that against ``--max-restarts``, but not a stop that was announced to it: the
other agents ask ten times a second whether nodes wait, so by then they have stopped theirs."""

_NO_MASTER = "rdzv_etcd.torch.connect_worker.invalid"
"""The workers' MASTER_ADDR with ``in_process=1``. It leads nowhere, and torch's warnings name it: a
script that makes its process group in torchrun's way would train on each host alone."""

_log = logging.getLogger("rdzv_etcd")


class _GracefulExitError(RendezvousGracefulExitError, SystemExit):
    """Ends the process with code 0, unless the program catches it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.code = 0


class EtcdRendezvousHandler(RendezvousHandler):
    """Torch's rendezvous contract (see ``torch.distributed.elastic.rendezvous.api``)."""

    def __init__(self, settings: Settings) -> None:
        """Connect to etcd and open the session.

        Blocks as :class:`~rdzv_etcd.world.group.Group` does. Raises torch's
        ``RendezvousConnectionError`` or ``RendezvousStateError``.
        """
        self._settings = settings
        self._agent_store: AgentStore | None = None
        self._worker_store: TCPStore | None = None
        self._graceful_exit: RendezvousGracefulExitError | None = None
        self._has_had_workers = False
        self._environment = WorkerEnvironment()
        self._left_s: float | None = None
        """When the node left, or began to, because it was drained."""
        self._confirmed: bool | None = None
        """What :meth:`shutdown` returned, once it did."""
        self._earlier_error = sys.exc_info()[1]
        """The exception that the caller was handling before: it is not how this job ended."""
        self._signals = AgentSignals()
        self._signals.install()
        try:
            with torch_errors():
                self._group = _open_group(settings)
        except BaseException:
            self._signals.restore()
            raise
        self._signals.be_of(self._group)
        # Also without shutdown(), which torch does not call after an interruption.
        self._group.when_left(self._environment.begin_to_give_back)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get(_OWN_STORE_VARIABLE, "0") != "1"

    def get_run_id(self) -> str:
        """Return the job's id. torch asks for it just before it starts each worker, see
        :mod:`rdzv_etcd.torch_plugin.environment`."""
        self._environment.put_again()
        return self._settings.job_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until a round with this node is formed; see torch's contract for the errors.

        Raises ``RendezvousGracefulExitError`` if the job was finished by others while this node
        waited as a spare, and if this node was drained.
        """
        self._signals.install()
        self._earlier_error = sys.exc_info()[1]
        try:
            with torch_errors():
                info = self._next_world()
        except RendezvousGracefulExitError as error:
            self._graceful_exit = error
            raise
        self._has_had_workers = True
        return info

    def _next_world(self) -> RendezvousInfo:
        self._worker_store = None  # a fresh store in every round: workers use it without a prefix
        if self._left_s is not None:
            raise DrainedError(f"this node has left job {self._settings.job_id!r}: drained")
        lost = self._agent_store is not None and self._agent_store.has_lost_ranks
        why = "etcd lost its workers' ranks" if lost else why_workers_failed()
        world = self._group.join(because=why)
        listener = world.take_listener()
        if listener is not None and self.use_agent_store:
            self._worker_store = serve_tcp_store(listener)
        elif listener is not None:
            listener.close()  # the worker of rank 0 will take the port
        self._environment.prepare(world.epoch, self._group.node_id)
        self._agent_store = AgentStore(world, self._leave_if_drained)
        return RendezvousInfo(
            self._agent_store,
            world.rank,
            world.size,
            RendezvousStoreInfo(world.master.address, world.master.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 if this round has to be re-formed, see :meth:`rdzv_etcd.Group.waiting_count`
        and :class:`~rdzv_etcd.torch_plugin.store.AgentStore`.

        From memory: never blocks, and never raises, whatever state etcd is in; in a forked child it
        is refused. A node that is being drained begins to leave here; its own workers stop a second
        later.
        """
        with torch_errors():
            self._leave_if_drained()
            if self._left_s is not None:
                return int(time.monotonic() >= self._left_s + _OTHERS_FIRST_S)
            if self._agent_store is not None and self._agent_store.has_lost_ranks:
                return 1
            return self._group.waiting_count()

    def _leave_if_drained(self) -> None:
        reason = self._group.drain_reason
        if self._left_s is None and reason is not None:
            self._left_s = time.monotonic()
            threading.Thread(
                target=self._group.leave, args=(reason,), name="rdzv-etcd drain"
            ).start()

    def is_closed(self) -> bool:
        """Whether this node's run is over; before it has one, whether the last one is. From memory;
        refused in a forked child."""
        with torch_errors():
            return self._group.closure() is not None

    def set_closed(self) -> None:
        """Close the job on all nodes, whether or not this node is a member.

        Does nothing after :meth:`shutdown`. If no round was formed there is nothing to close: then
        this logs a warning, and waiting nodes keep waiting.
        """
        if self._group.has_left:
            return
        with torch_errors():
            closed = self._group.fail("closed by the launcher", force=True)
        if not closed:
            _log.warning("[job %s] not closed: no round was formed yet", self._settings.job_id)

    def shutdown(self) -> bool:
        """Close the job if its work is done or has failed, then leave.

        Returns whether the job is closed as far as this node knows, or did not have to be; never
        raises because etcd is away. ``False`` also if this node had no part in the job's round:
        then it just leaves. Idempotent.

        After a graceful exit torch itself would fail. And the workers of a node that is being
        drained may have failed because of that: the signal ended them, or other nodes stopped
        theirs. In both cases this raises a ``RendezvousGracefulExitError`` that is also a
        ``SystemExit``: torchrun ends with code 0; a program that launches by ``elastic_launch`` and
        has more to do can catch it.
        """
        error = sys.exc_info()[1]
        if error is self._earlier_error:
            error = None  # shut down in an `except` block of the caller's, which began before
        with torch_errors():
            reason = self._group.drain_reason
        workers_failed = isinstance(error, ChildFailedError)
        outcome = outcome_of(error)
        if reason is not None and (workers_failed or self._left_s is not None):
            outcome = Outcome(False, False, reason)
        if self._confirmed is None:
            self._confirmed = self._end(outcome)
        if self._graceful_exit is not None and is_missing_result(error):
            if self._has_had_workers:
                _log.warning(
                    "[job %s] %s; this agent's workers were stopped before they had finished, and "
                    "it ends with exit code 0",
                    self.get_run_id(),
                    self._graceful_exit,
                )
            raise _GracefulExitError(str(self._graceful_exit)) from None
        if reason is not None and workers_failed:
            _log.warning("[job %s] %s; its workers failed meanwhile", self.get_run_id(), reason)
            raise _GracefulExitError(f"{reason}; its workers failed meanwhile") from None
        return self._confirmed

    def _end(self, outcome: Outcome) -> bool:
        confirmed = True
        try:
            if outcome.closes:
                confirmed = self._close(outcome)
        except RdzvEtcdError as failure:
            _log.warning("could not close job %r: %s", self._settings.job_id, failure)
            confirmed = False
        finally:
            try:
                self._group.leave(outcome.reason)
            finally:
                self._signals.restore()
            self._environment.give_back()
            self._agent_store = self._worker_store = self._earlier_error = None
        return confirmed

    def _close(self, outcome: Outcome) -> bool:
        end = self._group.finish if outcome.succeeded else self._group.fail
        return end(outcome.reason)


class SupervisorHandler(EtcdRendezvousHandler):
    """Of an agent whose workers form the world themselves (``in_process=1``), each as a node of the
    job: see :func:`rdzv_etcd.torch.connect_worker`.

    To torch this agent is a world of its own, so that it restarts its own workers only, and counts
    only their failures. It is a node of the job that never arrives: it knows how the job ends,
    which ends the agent, and ends the job when no restart is left. A host that never was in a
    world, or whose workers cannot join any more, just leaves: the others do without it.
    """

    def __init__(self, settings: Settings, worker: Mapping[str, Any]) -> None:
        """``worker`` is what its workers connect with. Blocks and raises as the other handler."""
        super().__init__(replace(settings, metrics_port=None))
        self._news = WorkersNews()
        self._end_before = None if settings.after_end is AfterEnd.FINISH else self._group.closure()
        """That of an earlier run, while it is remembered: this agent's workers begin another."""
        self._end_seen: JobClosedError | None = None
        options = dict(worker["options"])
        if self._end_before is None:  # an end that they meet is that of their own run
            options["after_end"] = AfterEnd.FINISH.value
        self._worker = {
            **worker,
            "options": options,
            "agent": {
                "node": self._group.node_id,
                "pid": os.getpid() if self._signals.is_installed else None,
                "news": self._news.address,
            },
        }

    def _next_world(self) -> RendezvousInfo:
        reason, end = self._group.drain_reason, self._run_end()
        if reason is not None:
            raise DrainedError(f"this host has left job {self._settings.job_id!r}: {reason}")
        if end is not None:
            raise end
        self._news.read()
        if self._news.obstacle:
            raise RendezvousFailedError(f"this host's workers cannot join: {self._news.obstacle}")
        self._environment.prepare_for_nodes(self._group.node_id, json.dumps(self._worker))
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_NO_MASTER, 1))

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers have to stop because the job has failed, or this host is drained.
        From memory; refused in a forked child."""
        with torch_errors():
            end = self._run_end()
            self._news.read()
            has_failed = end is not None and not end.succeeded
            return int(has_failed or self._group.drain_reason is not None)

    def _run_end(self) -> JobClosedError | None:
        """The end of the run that the workers are in, if it has ended; remembered, as etcd forgets
        it after a while."""
        end = self._group.closure()
        if self._end_seen is None and end is not None and end != self._end_before:
            how = "finished" if end.succeeded else "failed"
            by, reason = display_name(end.by), shown(end.reason)
            self._end_seen = JobClosedError(
                f"job {self._settings.job_id!r} {how}: closed by {by}: {reason}",
                closed_by=end.by,
                reason=end.reason,
                succeeded=end.succeeded,
                was_member=False,
            )
        return self._end_seen

    def _close(self, outcome: Outcome) -> bool:
        end = self._run_end()
        if end is not None:
            if not outcome.succeeded and not end.succeeded:
                _log.error("%s", str(end))
        elif not outcome.succeeded:
            self._news.read()
            if self._news.took_part and not self._news.obstacle:
                return self._group.fail(outcome.reason, force=True)
            _log.warning(
                "[job %s] this host leaves, and the job continues without it: %s",
                self._settings.job_id,
                self._news.obstacle or f"{outcome.reason}, and none is known to have joined it",
            )
        elif self._group.drain_reason is None:
            _log.warning(
                "[job %s] this host's workers have ended with exit code 0, but the job is not "
                "finished: it continues without them. A worker takes part in it by "
                "rdzv_etcd.torch.connect_worker(), and finishes it by group.finish()",
                self._settings.job_id,
            )
        return True


def _open_group(settings: Settings) -> Group:
    try:
        return Group(settings)
    except EtcdUnavailableError as error:
        if settings.embed:
            raise
        raise EtcdUnavailableError(
            f"{error} (if you have no etcd of your own: --rdzv-conf=embed=1 on every node)"
        ) from None


def create_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    """Create the handler from torchrun's parameters.

    Raises :class:`~rdzv_etcd.errors.SettingsError` (a ``ValueError``) for bad parameters, torch's
    ``RendezvousConnectionError`` if etcd does not answer.
    """
    _follow_torch()
    with torch_errors():
        settings = settings_from_config(
            endpoint=params.endpoint,
            job_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            local_addr=params.local_addr,
            config=params.config,
            environ=full_environment(),
        )
    for name in WITHOUT_MEANING.keys() & params.config.keys():
        _log.warning("%s= has no effect here: %s", name, WITHOUT_MEANING[name])
    if params.run_id == DEFAULT_JOB_ID:
        _log.warning(
            "--rdzv-id is %r, torchrun's default: every job started without an id on this etcd "
            "would be the same job; give each job its own",
            params.run_id,
        )
    if settings.in_process:
        return SupervisorHandler(settings, _for_workers(params, settings))
    return EtcdRendezvousHandler(settings)


def _for_workers(params: RendezvousParameters, settings: Settings) -> dict[str, Any]:
    """Return what a worker connects with: JSON, without secrets, which are refused as options."""
    agents = ("in_process", "orphans", "rank_key")
    return {
        "endpoint": params.endpoint,
        "job": params.run_id,
        "hosts": (params.min_nodes, params.max_nodes),
        "local_addr": params.local_addr,
        "rank_key": settings.rank_key,
        "options": {
            name: value if isinstance(value, str | int | float) else str(value)
            for name, value in params.config.items()
            if name not in agents and value is not None
        },
    }


def _follow_torch() -> None:
    """Show this library's log lines where torchrun shows torch's own, at the same level
    (``LOGLEVEL``, by default WARNING).

    Leaves a program alone that has configured logging itself: one that has set the logger's level,
    or has a handler on it or on the root logger.
    """
    if _log.level == logging.NOTSET:
        wanted = os.environ.get("LOGLEVEL", "")
        level = logging.getLevelName(wanted.upper()) if wanted else logging.WARNING
        _log.setLevel(level if isinstance(level, int) else logging.WARNING)
    if not _log.hasHandlers():
        for handler in logging.getLogger("torch.distributed").handlers:
            _log.addHandler(handler)
