"""torch's default process group on a world: made, and ended without waiting for dead members.

Knows torch's constructors and how each backend is aborted; of a world's end it knows only whether
members are gone.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Torch's optimizers and DistributedDataParallel import this, and then its default arguments would
# keep the process group of that moment, with gloo's threads, forever. Now there is none.
import torch.distributed.nn.functional  # noqa: F401
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from rdzv_etcd import Expelled, Left, Lost, MovedOn, World, WorldChange
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.text import named
from rdzv_etcd.torch.gloo import (
    AbandonableCalls,
    Connections,
    Wait,
    collectives,
    end_made_late,
    end_process,
)
from rdzv_etcd.torch_plugin.store import serve_tcp_store
from rdzv_etcd.world.world import when_over

_log = logging.getLogger("rdzv_etcd")

_OURS = ("store", "init_method", "rank", "world_size")
"""Arguments of torch's ``init_process_group`` that the world answers."""

_CONNECT_S = 5.0
"""How long gloo may take to connect in a world that is over: to a member that died just then."""

_REACH_S = 10.0
"""How long the store's host may take to accept a connection."""

_SILENT_S = 10.0
"""After this a wait is logged at WARNING."""

_GRACE_S = 30.0
"""How long a collective may continue in a world that is over, but of which no member is gone."""

_HELD_LOOKS = 15
"""How often, once a second, a collective may be seen in the same wait after its connections were
ended; logged at WARNING after a third of it. Not a time: this process may be stopped meanwhile."""

_KEYS = "rdzv_etcd/"
"""Prefix of this module's keys in the store."""

_current: Connections | None = None
"""Of the default process group, if it was made here. torch has one per process as well."""

_ending = threading.Lock()
"""A process group is ended by one thread at a time."""

_LAST_TENSORS_S = 1.0
"""How long gloo's threads may take to release the tensors of the last collectives."""

_ended: list[dist.ProcessGroup] = []
"""The process group that was ended last, for that long, or until the next one is made. The thread
that releases the last reference to it waits for gloo's threads, and these may wait for the
interpreter, to release the last tensors. A reference in Python gives it to them. A
DistributedDataParallel, which may outlive its world by a little, does not, and if its reference
were the last, both would wait forever (torch 2.13)."""


def init_process_group(
    world: World, backend: str | None = None, timeout: timedelta | None = None, **options: Any
) -> None:
    """Make ``world``'s members torch's default process group; an earlier one is destroyed first.

    Its store is served on the port that rank 0 has held open for it, fresh for every world, so a
    world has one process group, and every member calls this once in it. ``backend``, ``timeout``
    and ``options`` are those of torch's ``init_process_group``, which gets rank, size and store
    from the world.

    Blocks until every member has called it, for ``timeout`` at most. When a member is lost, this
    and every collective that waits for it fail at once, even if its host is silent: at the world's
    end a thread ends the process group's connections (gloo) or aborts it (NCCL). It takes 5 s only
    if a member dies at the very moment in which others connect to it. If the world is over for
    another reason, a collective may continue for 30 s. A large send that was under way to a host
    that has fallen silent is never freed by gloo (torch 2.13): after 15 s the process ends, with
    ``os.EX_TEMPFAIL``, and an error in its log.

    Raises :class:`RuntimeError` (as a rule ``torch.distributed.DistError``, which is one) when a
    member is gone, and :class:`~rdzv_etcd.errors.MisuseError`.
    """
    global _current  # noqa: PLW0603 - torch's default process group is one per process as well
    if given := [name for name in _OURS if name in options]:
        raise MisuseError(f"{' and '.join(given)}: the world determines that; leave it out")
    check_process_group(backend, timeout)
    destroy_process_group()
    _let_go()
    connections = _current = Connections(world.master.port)
    calls = AbandonableCalls()
    name = repr(world)  # not the world itself: a program that drops it and its group leaves
    when_over(world, functools.partial(_begin_to_end, name, connections, calls))
    limit_s = (default_pg_timeout if timeout is None else timeout).total_seconds()
    until_s = time.monotonic() + limit_s
    try:
        store = _open_store(world, timedelta(seconds=limit_s), calls)
        calls.run(lambda: _await_all(store, world, until_s - time.monotonic()))
        connections.gloo_begins()
        make = functools.partial(
            dist.init_process_group,
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            **options,
        )
        if backend is None or "gloo" in backend.lower():
            calls.run(make, if_late=end_made_late)
        else:  # others have no such wait, and may care for the thread
            make()
        _exchange_addresses(connections, store, world)
    except BaseException:
        destroy_process_group()
        raise
    finally:
        connections.made.open()


def check_process_group(backend: object, timeout: object) -> None:
    """Raise MisuseError for what torch would misunderstand, or raise pages about."""
    if backend is not None and not isinstance(backend, str):
        raise MisuseError(f"backend is {named(backend)}; it must be text, such as 'gloo'")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise MisuseError(
            f"timeout is {named(timeout)}; it must be a datetime.timedelta, such as "
            "timedelta(seconds=30)"
        )


def destroy_process_group() -> None:
    """End torch's default process group, if there is one, and all its collectives.

    Unlike torch's, waits for no other member, dead or alive: what is under way on another rank
    fails there. Not to be called while another thread is in torch's ``init_process_group``.
    """
    global _current
    with _ending:
        connections, _current = _current, None
        if connections is not None:
            connections.close()
        _keep_for_a_moment(dist.group.WORLD)
        if not _abort() and dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers process groups, and looks for the other members under that number; it also
        # counts one that was not made after all.
        distributed_c10d._world.group_count = 0


def _keep_for_a_moment(group: dist.ProcessGroup | None) -> None:
    global _ended  # noqa: PLW0603 - as _current
    if group is None:
        return
    _ended = [group]
    timer = threading.Timer(_LAST_TENSORS_S, _ended.clear)
    timer.name, timer.daemon = "rdzv-etcd-last-tensors", True
    timer.start()


@atexit.register  # where gloo's threads can still have the interpreter
def _let_go() -> None:
    _ended.clear()


def _open_store(world: World, timeout: timedelta, calls: AbandonableCalls) -> TCPStore:
    """Serve the world's store if this is rank 0, connect to it otherwise.

    Blocks until rank 0 serves it, for ``timeout`` at most, or until ``calls`` are given up. Raises
    ``torch.distributed.DistError``, and MisuseError if it was served before.
    """
    if world.rank == 0:
        listener = world.take_listener()
        if listener is None:
            raise MisuseError(
                "the port of this world's store has been used: a world has one process group; join "
                "again for another one"
            )
        store = serve_tcp_store(listener)
    else:
        # The port has been listening since before the world was formed; torch's client, once
        # connected, waits for the first answer without a limit.
        store = calls.run(
            functools.partial(
                TCPStore,
                *(world.master.address, world.master.port),
                is_master=False,
                wait_for_workers=False,
                timeout=min(timeout, timedelta(seconds=_REACH_S)),
            ),
            limit_s=timeout.total_seconds(),
            when_silent=functools.partial(
                _log.warning,
                "%s: waiting for rank 0 to make the process group; up to %.0f s more",
                repr(world),
            ),
        )
    store.set_timeout(timeout)
    return store


def _await_all(store: TCPStore, world: World, limit_s: float) -> None:
    """Wait until every member is here: from here on no living member takes long."""
    limit = timedelta(seconds=max(0.001, limit_s))
    all_there = [f"{_KEYS}all"]
    if store.add(f"{_KEYS}there", 1) == world.size:
        store.set(all_there[0], "")
    silent = min(limit, timedelta(seconds=_SILENT_S))
    try:
        store.wait(all_there, silent)
    except dist.DistStoreError:  # it has taken too long; a broken connection is another error
        if limit <= silent:
            raise
        _log.warning(
            "%r: waiting for all members to make the process group: %d of %d are here; up to %g s "
            "more",
            world,
            store.add(f"{_KEYS}there", 0),
            world.size,
            (limit - silent).total_seconds(),
        )
        store.wait(all_there, limit - silent)


def _exchange_addresses(connections: Connections, store: TCPStore, world: World) -> None:
    """Publish where this member's process group listens, and read it of the others."""
    own = connections.listening()
    store.set(f"{_KEYS}places/{world.rank}", json.dumps(own))
    others = [f"{_KEYS}places/{rank}" for rank in range(world.size) if rank != world.rank]
    texts = store.multi_get(others) if others else []
    connections.gloo_is_done(
        own, [(address, port) for text in texts for address, port in json.loads(text)]
    )


def _is_anyone_gone(change: WorldChange | None) -> bool:
    return isinstance(change, Lost | Left | Expelled | MovedOn)


def _begin_to_end(
    name: str, connections: Connections, calls: AbandonableCalls, change: WorldChange | None
) -> None:
    """End the process group's collectives, on a thread, if it is still there when its world is
    over: at the latest when this node has joined another one."""
    if connections.closed.is_open:
        return
    grace_s = 0.0 if _is_anyone_gone(change) else _GRACE_S
    thread = threading.Thread(
        target=_end_with,
        args=(name, connections, calls, grace_s),
        name="rdzv-etcd-process-group",
        daemon=True,
    )
    try:
        thread.start()
    except RuntimeError:  # this process ends, and cannot start threads
        connections.end()


def _end_with(name: str, connections: Connections, calls: AbandonableCalls, grace_s: float) -> None:
    if connections.closed.wait(grace_s):
        return
    connections.end()
    calls.give_up(with_gloo=False)
    over_s = time.monotonic()
    while not connections.made.wait(0.1):  # a socket that is opened only now sends no event
        connections.end()
        if time.monotonic() - over_s > _CONNECT_S:
            calls.give_up(with_gloo=True)
    connections.end()
    with _ending:
        aborted = _current is connections and _abort()
    if not aborted:
        _see_out(name, connections)


def _see_out(name: str, connections: Connections) -> None:
    """Wait for the end of the process group, and end the process if gloo makes that impossible."""
    held: frozenset[Wait] = frozenset()
    looks = 0
    while not connections.closed.wait(1.0):  # a thread that goes into gloo sends no event
        now = collectives()
        held &= now
        looks += 1
        if not held:
            held, looks = now, 0
        elif looks > _HELD_LOOKS:
            end_process(
                f"{name} is over and its connections are ended, but gloo holds a collective, "
                f"seen {looks} times, a second apart, and nothing frees it; the other nodes "
                "continue without this one"
            )
        elif looks == _HELD_LOOKS // 3:
            _log.warning(
                "%s is over and its connections are ended, but a collective is still running: a "
                "send of gloo's whose peer is gone may never return. If it does not within %d s, "
                "this process ends, so that the other nodes do not wait for it",
                *(name, _HELD_LOOKS - looks),
            )


def _abort() -> bool:
    """Abort all process groups if they use NCCL, and return whether they do. For gloo this does
    nothing, as ending connections does for NCCL."""
    if not dist.is_initialized() or "nccl" not in str(dist.get_backend_config()).lower():
        return False
    distributed_c10d._abort_process_group()
    return True
