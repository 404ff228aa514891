"""Nodes for tests: settings for a test's server, joins in threads, nodes in processes."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol.member import Phase
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World
from tests.support.leaks import LeakCheck, job_root, left_of_job
from tests.support.servers import EtcdServer

LIMIT_S = 60.0
"""For what must happen, on whatever machine."""
ALONE: dict[str, Any] = {"last_call_timeout": 0.2}
"""For a node that is to form a first round without others, although there is room for them."""


class Server(Protocol):
    @property
    def endpoint(self) -> str: ...


def node_options(server: Server | str, job_id: str, nodes: str, **config: object) -> dict[str, Any]:
    """What a node is told; ``nodes`` is ``min:max`` or one number, ``config`` is --rdzv-conf."""
    lowest, _, highest = nodes.partition(":")
    quick = {"lease_ttl": 3, "settle": 0.1, "last_call_timeout": 30, "join_timeout": LIMIT_S}
    return {
        "endpoint": server if isinstance(server, str) else server.endpoint,
        "job_id": job_id,
        "min_nodes": int(lowest),
        "max_nodes": int(highest or lowest),
        "local_addr": "127.0.0.1",
        "config": {**quick, "closed_ttl": 5, "ended_ttl": 5, **config},
    }


def node_settings(
    server: Server | str,
    job_id: str,
    nodes: str,
    *,
    environ: Mapping[str, str] | None = None,
    **config: Any,
) -> Settings:
    """The same as :class:`Settings`; ``environ`` may have user and password."""
    return settings_from_config(
        environ=environ or {}, **node_options(server, job_id, nodes, **config)
    )


@contextmanager
def groups(settings: Settings, count: int) -> Iterator[list[Group]]:
    """``count`` nodes in this process; they leave in the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(Group(settings)) for _ in range(count)]


def join_all(nodes: Sequence[Group]) -> list[World]:
    """Let all join at the same time."""
    return at_once([node.join for node in nodes])


def joined(nodes: Sequence[Group]) -> tuple[list[Group], list[World]]:
    """Let all join at the same time; return groups and worlds in the order of their ranks."""
    pairs = sorted(zip(join_all(nodes), nodes, strict=True), key=lambda pair: pair[0].rank)
    return [group for _, group in pairs], [world for world, _ in pairs]


@contextmanager
def when_entered(node: Node, call: Callable[[], object]) -> Iterator[None]:
    """Call it once on the library's thread, when that node has just become a member of a world and
    its join has not returned yet."""
    asked: list[object] = []

    def watch(record: logging.LogRecord) -> bool:
        has_entered = node.phase is Phase.MEMBER and ": node rank " in record.getMessage()
        if has_entered and not asked:
            asked.append(call())
        return True

    log = logging.getLogger("rdzv_etcd")
    level = log.level
    log.setLevel(logging.INFO)
    log.filters.insert(0, watch)  # before the line goes to the thread that writes it
    try:
        yield
    finally:
        log.removeFilter(watch)
        log.setLevel(level)


class Job:
    """A job that is one test's own, on an etcd that others use as well. What the test leaves of it,
    of its threads and sockets is a failure (the fixture ``job``)."""

    def __init__(self, server: EtcdServer, job_id: str, leaks: LeakCheck) -> None:
        self.server = server
        self.id = job_id
        self.leaks = leaks
        self.root = job_root(job_id)
        self.leases_before = server.leases()

    def options(self, nodes: str = "1", **config: object) -> dict[str, Any]:
        return node_options(self.server, self.id, nodes, **config)

    def settings(self, nodes: str = "1", **config: Any) -> Settings:
        return node_settings(self.server, self.id, nodes, **config)

    def group(self, nodes: str = "1", **config: Any) -> Group:
        return Group(self.settings(nodes, **config))

    @contextmanager
    def groups(self, count: int, nodes: str = "", **config: Any) -> Iterator[list[Group]]:
        """So many nodes in this process, as many as the job wants; they leave in the end."""
        with groups(self.settings(nodes or str(count), **config), count) as made:
            yield made

    @contextmanager
    def worlds(
        self, count: int, nodes: str = "", **config: Any
    ) -> Iterator[tuple[list[Group], list[World]]]:
        """The same, and they have joined: groups and worlds in the order of their ranks."""
        with self.groups(count, nodes, **config) as made:
            yield joined(made)

    def remote(self, nodes: str = "1", log: int | None = None, **config: object) -> RemoteNode:
        return RemoteNode(self.options(nodes, **config), log)

    def keys(self, part: bytes = b"") -> dict[bytes, bytes]:
        """The job's keys under that part of its own, with their values."""
        return self.server.keys(self.root + part)

    def end_leases(self) -> None:
        """End all leases that have come since the test began: its nodes have ended or left, and
        nobody waits until those that were killed are out of time."""
        for lease_id in self.server.leases() - self.leases_before:
            self.server.gateway.revoke(lease_id)

    def left(self, *, leases: bool = False) -> list[str]:
        """The job's keys; with ``leases`` also those that have come since the test began."""
        return left_of_job(self.server.gateway, self.id, self.leases_before if leases else None)


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do each in a thread of its own; return what they return, or raise the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [work.result() for work in [pool.submit(work) for work in works]]


@asynccontextmanager
async def notified_of_nothing(*_: object, **__: object) -> AsyncIterator[tuple[Any, bool]]:
    """Stands for ``puts_after`` where notifications are slower than all else."""

    async def nothing() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    yield nothing(), False


def run_program(program: str, *arguments: str) -> str:
    """Return what a Python program printed that ended well, without a word on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class RemoteError(Exception):
    """A remote node's command raised one of the library's errors; its name is ``args[0]``."""


class RemoteNode:
    """A node in a process of its own (see ``remote_node.py``); one command at a time."""

    def __init__(self, options: Mapping[str, Any], log: int | None = None) -> None:
        """``log``: a descriptor to which it writes its log lines of level INFO and above."""
        program = Path(__file__).with_name("remote_node.py")
        self.process = subprocess.Popen(
            [sys.executable, program, json.dumps(options), *([] if log is None else ["log"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._node_id = ""

    @property
    def node_id(self) -> str:
        """Waits until the node has connected."""
        self._node_id = self._node_id or self._answer()
        return self._node_id

    def call(self, command: str, *arguments: object) -> Any:
        """Return the command's result; raises :class:`RemoteError`."""
        assert self.node_id
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def finish(self) -> int:
        """Let the program come to its end; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the node ended with {self.process.wait(LIMIT_S)}")
        words = json.loads(line)
        if "error" in words:
            raise RemoteError(words["error"], words["message"])
        return words["result"]

    def __enter__(self) -> RemoteNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.process.kill()
        with self.process:  # closes the pipes and waits
            pass


def wait_until(what: str, look: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
    """For states outside this process, which nobody announces."""
    deadline_s = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
