"""torch's stores of one round: ``EtcdStore`` on etcd for agents, and the workers' ``TCPStore``.

Translates between torch's store interface and :mod:`rdzv_etcd.world.round_store`: values, timeouts
and errors. Knows nothing of keys in etcd or of requests.

What torch's C++ code calls on a store written in Python (seen with 2.13, through ``PrefixStore``
and ``Store.barrier``): ``set get add check wait append compare_set multi_get multi_set
has_extended_api clone`` by their Python names, but ``deleteKey`` and ``getNumKeys``. A timeout set
on a ``PrefixStore`` reaches only the base class, so ``self.timeout`` is read for every call.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rdzv_etcd.errors import (
    JobClosedError,
    MisuseError,
    NotANumberError,
    RdzvEtcdError,
    RendezvousFailedError,
    StoreLostError,
    StoreTimeoutError,
    WorldOverError,
)
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.world.round_store import TIMEOUT_S, RoundStore
from rdzv_etcd.world.world import World, note_finished, wait_until_closed, when_drained

T = TypeVar("T")

_log = logging.getLogger("rdzv_etcd")


class EtcdStore(Store):
    """Complete, thread-safe, usable under ``PrefixStore``; independent of any node's life.

    Every method blocks for at most the store's timeout (300 s unless ``set_timeout`` says
    otherwise; as in torch zero means no limit), also when etcd is away, and raises
    ``torch.distributed.DistStoreError``, which names the missing keys when it waited for some, and
    ``TypeError`` for the arguments that torch's own stores refuse with it.
    It must not be called on the loop's own thread.
    """

    timeout: timedelta  # the base class's property, which torch's type stubs do not mention

    def __init__(self, store: RoundStore, *, timeout: timedelta | None = None) -> None:
        """The caller keeps ``store`` usable as long as this one. Sends nothing."""
        super().__init__()
        self._store = store
        if timeout is not None:
            self.set_timeout(timeout)

    # -- reading ----------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Return the value; waits for a missing key."""
        name = _text(key)
        return self._do(lambda limit_s: self._store.get(name, limit_s, even_if_over=True))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        names = texts_of(keys)
        return self._do(lambda limit_s: self._store.multi_get(names, limit_s, even_if_over=True))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys exist; ``timeout`` instead of the store's."""
        names = texts_of(keys)
        self._do(lambda limit_s: self._store.wait(names, limit_s, even_if_over=True), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, without waiting for them."""
        names = texts_of(keys)
        return self._do(lambda limit_s: self._store.check(names, limit_s))

    def num_keys(self) -> int:
        return self._do(self._store.num_keys)

    def list_keys(self) -> list[str]:
        return self._do(self._store.list_keys)

    # -- writing ----------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        name, data = _text(key), _bytes(value)
        self._do(lambda limit_s: self._store.set(name, data, limit_s))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        names, data = texts_of(keys), [_bytes(value) for value in _listed(values)]
        if len(names) != len(data):
            raise dist.DistStoreError(
                f"multi_set got {len(names)} keys but {len(data)} values; it needs one per key"
            )
        items = dict(zip(names, data, strict=True))
        self._do(lambda limit_s: self._store.multi_set(items, limit_s))

    def add(self, key: str, amount: int) -> int:
        """Add to a number (a missing key is zero) and return the sum; never counts twice."""
        name = _text(key)
        return self._do(lambda limit_s: self._store.add(name, amount, limit_s))

    def append(self, key: str, value: str | bytes) -> None:
        name, data = _text(key), _bytes(value)
        self._do(lambda limit_s: self._store.append(name, data, limit_s))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set the value if it is the expected one; return the value afterwards."""
        name, expected, desired = _text(key), _bytes(expected_value), _bytes(desired_value)
        return self._do(lambda limit_s: self._store.compare_set(name, expected, desired, limit_s))

    def delete_key(self, key: str) -> bool:
        """Delete the key; return whether it was there."""
        name = _text(key)
        return self._do(lambda limit_s: self._store.delete(name, limit_s))

    # -- the rest ---------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """``append``, ``multi_get`` and ``multi_set`` exist."""
        return True

    def clone(self) -> EtcdStore:
        """Return another store on the same keys, with a timeout of its own."""
        other = EtcdStore(self._store, timeout=self.timeout)
        # C++ code that asks for a clone keeps only the C++ object, which does not work by itself.
        self._store.keep(other)
        return other

    def deleteKey(self, key: str) -> bool:
        """:meth:`delete_key`, by the name torch's C++ code calls."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """:meth:`num_keys`, by the name torch's C++ code calls."""
        return self.num_keys()

    def _do(self, operation: Callable[[float | None], T], timeout: timedelta | None = None) -> T:
        limit_s = _seconds(self.timeout if timeout is None else timeout)
        try:
            return operation(limit_s)
        except NotANumberError:
            raise  # a ValueError, which is not etcd's fault
        except MisuseError as error:
            raise TypeError(str(error)) from error
        except StoreTimeoutError as error:
            raise dist.DistStoreError(str(error)) from error
        except RdzvEtcdError as error:
            raise dist.DistStoreError(f"the store on etcd failed: {error}") from error


def texts_of(keys: object) -> list[str]:
    """Return several keys as texts. Raises TypeError for one alone."""
    return [_text(key) for key in _listed(keys)]


def _text(key: object) -> str:
    """Return a key as text; as in torch it may be bytes. What is neither is refused later."""
    if isinstance(key, bytes | bytearray):
        return key.decode(errors="surrogateescape")
    return cast("str", key)


def _listed(things: object) -> list[object]:
    if isinstance(things, str | bytes | bytearray) or not isinstance(things, Iterable):
        raise TypeError(f"a list is needed, not {type(things).__name__}")
    return list(things)


def _seconds(timeout: object) -> float | None:
    """Return a limit as torch means it: zero is none, below zero is over at once. A float is
    seconds, as torch has it. Raises TypeError."""
    if isinstance(timeout, timedelta):
        limit_s = timeout.total_seconds()
    elif isinstance(timeout, float) and not math.isnan(timeout):
        limit_s = timeout
    else:
        raise TypeError(f"a store's timeout must be a timedelta, not {timeout!r:.80}")
    return None if limit_s == 0 else max(0.0, limit_s)


def _bytes(value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"a store value must be text in UTF-8, or bytes: {error}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store value must be str or bytes, not {type(value).__name__}")


# --- the agents' own use of it --------------------------------------------------------------------

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_FINISHED = "torchelastic/agent/terminal_state/num_members"
_ALL_FINISHED = "torchelastic/agent/terminal_state/last_member"


class AgentStore(EtcdStore):
    """The store that torch's agents use beside their workers.

    **Before** workers start, the agents exchange through it how many each has
    (``SimpleElasticAgent._assign_worker_ranks``). A member can die after it arrived and before its
    lease runs out: then a round is formed with it, the others wait for what it would have written
    until the store's timeout, 300 s, and fail; they call ``num_nodes_waiting()`` only once their
    workers run. So when the round is known to be over, or the store has lost its data, this store
    answers in the missing member's place: the agent starts its workers, asks, and re-joins at once.
    The content of the answer does not matter then.

    **After** its workers have succeeded, an agent waits for all others in torch's exit barrier
    (``_exit_barrier``), for 300 s. It does not call ``num_nodes_waiting()`` any more and will not
    join again: the other nodes are notified, and do not wait for it. Its own wait ends when the job
    is closed, whatever world the others are in by then, and when this node is drained. If the store
    has lost who was counted (the job lease has run out, etcd was wiped), all meet at a barrier
    instead, which such a loss does not affect.

    Knows the names that torch's agent uses (torch 2.5 to 2.13); a wait under any other name ends as
    in any store.
    """

    def __init__(self, world: World, leave_if_drained: Callable[[], None]) -> None:
        """``leave_if_drained``, a method, lets the node leave if it is drained. It is called in any
        thread, and not kept alive."""
        super().__init__(world.store)
        self._world = world
        self._leave_if_drained = _weakly(leave_if_drained)
        self._is_leaving = False
        """Whether this agent was drained in torch's exit barrier."""
        self._own_info: dict[str, Any] = {}
        self.has_lost_ranks = False
        """Whether the store lost data while the agents assigned ranks: this node has to re-join."""

    def set(self, key: str, value: str | bytes) -> None:
        if key == f"{_ROLE_INFO}{self._world.rank}":
            self._own_info = json.loads(value)
        with self._assigning([key]):
            super().set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        with self._assigning(keys):
            super().multi_set(keys, values)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        wanted = texts_of(keys)
        if not (wanted and all(map(self._assigns_ranks, wanted))):
            return super().multi_get(wanted)
        with self._assigning(wanted):
            return self._do(lambda limit_s: self._get_or_stand_in(wanted, limit_s))
        return [self._stand_in(key) for key in wanted]  # the store has lost them

    def _get_or_stand_in(self, keys: Sequence[str], limit_s: float | None) -> list[bytes]:
        try:
            return self._world.store.multi_get(keys, limit_s)
        except WorldOverError:
            return [self._stand_in(key) for key in keys]

    @contextmanager
    def _assigning(self, keys: Sequence[str]) -> Iterator[None]:
        """If the store has lost its data while the agents assign ranks with these keys, note that
        this node has to re-join, and raise nothing."""
        try:
            yield
        except dist.DistStoreError as error:
            is_lost = isinstance(error.__cause__, StoreLostError)
            if not (is_lost and all(map(self._assigns_ranks, texts_of(keys)))):
                raise
            if not self.has_lost_ranks:
                self.has_lost_ranks = True
                _log.warning(
                    "round %d: etcd has lost what the agents wrote to assign their workers' ranks; "
                    "this node joins again",
                    self._world.round,
                )

    def _assigns_ranks(self, key: str) -> bool:
        return bool(self._own_info) and key.startswith((_ROLE_INFO, _ASSIGNED_RANKS))

    def _stand_in(self, key: str) -> bytes:
        """Return what a member like this one would have written."""
        if key.startswith(_ROLE_INFO):
            return json.dumps({**self._own_info, "rank": int(key[len(_ROLE_INFO) :])}).encode()
        workers = int(self._own_info["local_world_size"])
        first, total = self._world.rank * workers, self._world.size * workers
        return json.dumps([first, total, first, total]).encode()

    def add(self, key: str, amount: int) -> int:
        if key != _FINISHED:
            return super().add(key, amount)
        note_finished(self._world)
        return self._do(lambda limit_s: self._count(amount, limit_s))

    def _count(self, amount: int, limit_s: float | None) -> int:
        try:
            return self._world.store.add(_FINISHED, amount, limit_s)
        except StoreLostError:
            return 0  # no agent is the last one; the wait that follows makes up for it

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As :meth:`EtcdStore.wait`; torch's exit barrier also ends when the job is closed."""
        if texts_of(keys) == [_ALL_FINISHED]:
            when_drained(self._world, _weakly(self._leave))
            self._do(self._wait_for_the_others, timeout)
        else:
            super().wait(keys, timeout)

    def _leave(self) -> None:
        self._is_leaving = True
        self._leave_if_drained()

    def _wait_for_the_others(self, limit_s: float | None) -> None:
        try:
            try:
                self._world.store.wait([_ALL_FINISHED], limit_s, even_if_over=True)
            except StoreLostError:
                self._meet_the_others(TIMEOUT_S if limit_s is None else limit_s)
        except JobClosedError:
            pass  # no other agent will finish; how the job was closed is in the log
        except RendezvousFailedError:
            if not self._is_leaving:
                raise
        except StoreTimeoutError:
            if not self._world.over:
                raise
            _log.warning(
                "this node's workers finished %g s ago, and the other nodes are in another world, "
                "or wait for one: this agent waits no longer",
                limit_s,
            )

    def _meet_the_others(self, limit_s: float) -> None:
        """Meet all members of this world at a barrier; if they are in another one by now, wait for
        the end of the job."""
        try:
            self._world.barrier(_ALL_FINISHED, limit_s)
        except JobClosedError:
            raise
        except WorldOverError:
            wait_until_closed(self._world, limit_s)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls it as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


# --- the workers' store ---------------------------------------------------------------------------


def serve_tcp_store(listener: Listener, *, use_libuv: bool = True) -> TCPStore:
    """Serve a fresh, empty ``TCPStore`` on rank 0's listening socket; clients that connected before
    are served.

    The descriptor belongs to torch from now on: it closes it, and with it gives the port back, when
    the last reference to the store is gone. ``use_libuv`` asks for torch's newer server, which in
    torch 2.6 cannot be given a socket; there it is the older one, as without it. Raises
    ``torch.distributed.DistError``.
    """
    serve = functools.partial(
        TCPStore,
        host_name=listener.own_address,  # for the store's own client
        port=listener.port,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        return serve(use_libuv=use_libuv)
    except NotImplementedError:  # torch 2.6; it has not touched the socket yet
        return serve(use_libuv=False)
