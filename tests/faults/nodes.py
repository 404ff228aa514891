"""Node processes for the fault tests: start, stop, freeze and kill them, and read their logs."""

from __future__ import annotations

import json
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.settings import Timing
from tests.faults.history import Told, check_history
from tests.library.nodes import node_options, wait_until
from tests.support.gateway import GatewayError
from tests.support.leaks import Store, job_root, left_of_job
from tests.support.processes import spawn

TTL_S = 3
"""The nodes' lease. etcd's smallest is 2 s with the clusters' election settings."""
LIMIT_S = 60.0
"""The limit of every wait. It only ends a failing test."""

_STATES = ("join", "world", "change", "error")
_PROGRAM = Path(__file__).with_name("node.py")


@dataclass(frozen=True)
class Entry:
    """One line of a node's log; ``at_s`` is this machine's monotonic clock."""

    event: str
    at_s: float
    details: Mapping[str, Any]

    @property
    def world(self) -> Seat:
        known = {**self.details, "members": tuple(self.details["members"]), "job_lease": 0}
        return Seat(**known)


class NodeProcess:
    """One node, with its log and its output."""

    def __init__(self, name: str, folder: Path, told: Mapping[str, object]) -> None:
        self.name = name
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.out"
        argument = json.dumps({**told, "log": str(self.log)})
        self.process = spawn([sys.executable, _PROGRAM, argument], self.output)
        self.may_end = False
        self._asked = False

    def entries(self) -> list[Entry]:
        """Everything so far, a half-written last line aside."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [Entry(one.pop("event"), one.pop("at_s"), one) for one in found]

    def all(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries() if entry.event == event]

    def last(self, event: str) -> Entry | None:
        found = self.all(event)
        return found[-1] if found else None

    @property
    def started(self) -> bool:
        return self.last("started") is not None

    @property
    def node_id(self) -> str:
        entry = self.last("started")
        assert entry is not None, f"{self} has not started"
        return str(entry.details["node_id"])

    @property
    def working_in(self) -> Seat | None:
        """The world it works in now."""
        entries = [one for one in self.entries() if one.event in _STATES]
        return entries[-1].world if entries and entries[-1].event == "world" else None

    # -- what is done to it -----------------------------------------------------------------------

    def release(self) -> None:
        """Let a held node join."""
        self.process.send_signal(signal.SIGUSR1)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.may_end = True
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Ask it to end. Once only: Python lets a second signal kill it while it winds up."""
        if not self._asked:
            self._asked = self.may_end = True
            self.process.terminate()

    def wait(self) -> int:
        self.may_end = True
        return self.process.wait(LIMIT_S)

    def __str__(self) -> str:
        return f"node {self.name} (pid {self.process.pid}, exit status {self.process.poll()})"


class Nodes:
    """The nodes of one job. Its maker calls :meth:`check`, then :meth:`close`."""

    def __init__(self, folder: Path, endpoint: str, nodes: str, **config: object) -> None:
        self.job_id = f"job-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._range = nodes
        quick = {"lease_ttl": TTL_S, "settle": 0.1, "last_call_timeout": 0.5}
        self._options = node_options(endpoint, self.job_id, nodes, **{**quick, **config})
        self.all: list[NodeProcess] = []

    def start(
        self,
        *names: str,
        endpoint: str | None = None,
        hold: bool = False,
        **options: object,
    ) -> list[NodeProcess]:
        """Start one node per name; ``options`` replace those of ``settings_from_config``."""
        wanted = {**self._options, **options}
        if endpoint is not None:
            wanted["endpoint"] = endpoint
        told = {"options": wanted, "hold": hold}
        fresh = [NodeProcess(name, self._folder, told) for name in names]
        self.all += fresh
        return fresh

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(self, what: str, look: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
        """Wait; fail at once if a node ends unasked."""

        def checked() -> object:
            for node in self.all:
                ended = not node.may_end and node.process.poll() is not None
                assert not ended, f"{node} ended:\n{node.output.read_text()[-3000:]}"
            return look()

        wait_until(what, checked, timeout_s)

    def wait_started(self, nodes: Sequence[NodeProcess]) -> None:
        self.wait_until("the nodes have connected", lambda: all(node.started for node in nodes))

    def wait_for_world(self, nodes: Sequence[NodeProcess], *, timeout_s: float = LIMIT_S) -> Seat:
        """Wait until exactly these nodes work in one world, and return it as rank 0 sees it."""
        names = ", ".join(node.name for node in nodes)
        self.wait_until(f"a world of {names}", lambda: world_of(nodes), timeout_s)
        found = world_of(nodes)
        assert found is not None
        return found

    def stay_undisturbed(self, nodes: Sequence[NodeProcess], seconds: float) -> None:
        """Let time pass; then no node has seen the end of its world, or has joined again."""
        before = [len(node.entries()) for node in nodes]
        time.sleep(seconds)  # that nothing happens has no event
        self.assert_undisturbed(nodes, before)

    def assert_undisturbed(self, nodes: Sequence[NodeProcess], before: Sequence[int]) -> None:
        for node, count in zip(nodes, before, strict=True):
            assert node.process.poll() is None, f"{node} ended"
            news = node.entries()[count:]
            assert not news, f"{node} was disturbed: {news}"

    def wait_present(self, store: Store, nodes: Sequence[NodeProcess]) -> None:
        """Wait until etcd holds the presence of exactly these nodes."""
        root = job_root(self.job_id) + b"nodes/"
        wanted = {root + node.node_id.encode() for node in nodes}
        self.wait_until(
            "the nodes' presence is in etcd", lambda: _keys_under(store, root) == wanted
        )

    def leader(self, store: Store) -> str:
        """Return the node id of the node that leads the job."""
        key = job_root(self.job_id) + b"ctl/leader"
        return str(json.loads(store.keys(key)[key].value)["node"])

    # -- the end ----------------------------------------------------------------------------------

    def told(self) -> list[Told]:
        """Return every world that a node has entered, in order of time."""
        found = []
        for node in self.all:
            found += [(entry, node.node_id) for entry in node.all("world")]
        found.sort(key=lambda one: one[0].at_s)
        return [Told(node_id, entry.world) for entry, node_id in found]

    def check(self) -> None:
        """Raise if the worlds that the nodes have entered break an invariant."""
        lowest, _, highest = self._range.partition(":")
        check_history(self.told(), min_nodes=int(lowest), max_nodes=int(highest or lowest))

    def finish(self, store: Store) -> None:
        """Stop all; each ends with 0 at once, and nothing of the job is left in etcd."""
        living = [node for node in self.all if node.process.poll() is None]
        self.wait_started(living)  # before that, a signal just kills
        for node in living:
            node.terminate()
        codes = {node.name: node.wait() for node in living}
        assert codes == dict.fromkeys(codes, 0)
        assert_nothing_left(store, self.job_id)

    def close(self) -> None:
        """End every process, and print its output and its log."""
        for node in self.all:
            node.kill()
        for node in self.all:
            print(f"\n===== {node} =====\n{node.output.read_text()[-6000:]}")
            for entry in node.entries()[-12:]:
                print(f"{entry.at_s:12.3f} {entry.event} {dict(entry.details)}")


def world_of(nodes: Sequence[NodeProcess]) -> Seat | None:
    """Return the world in which these nodes, and no others, work; ``None`` if there is none."""
    worlds = [node.working_in for node in nodes]
    first = worlds[0]
    if first is None or {one.epoch for one in worlds if one is not None} != {first.epoch}:
        return None
    complete = None not in worlds and set(first.members) == {node.node_id for node in nodes}
    return first if complete else None


def _keys_under(store: Store, root: bytes) -> set[bytes]:
    try:
        return set(store.keys(root))
    except (OSError, GatewayError):
        return set()  # etcd is on its way back


def assert_nothing_left(store: Store, job_id: str) -> None:
    """Wait until etcd holds no key and no lease of the job.

    A marker needs its ``closed_ttl``, and a job lease its TTL if the outcome of the write that gave
    it to a round is unknown; a new leader of etcd restarts either.
    """

    def left_over() -> list[str]:
        try:
            return left_of_job(store, job_id, set())  # any lease: the etcd is the test's own
        except (OSError, GatewayError) as error:
            return [f"etcd does not answer: {error}"]

    deadline_s = time.monotonic() + LIMIT_S + Timing().job_ttl_s
    while left := left_over():
        assert time.monotonic() < deadline_s, f"etcd still holds {left}"
        time.sleep(0.05)  # the end of a lease without keys sends no event


def take_in_another(nodes: Nodes, members: list[NodeProcess]) -> None:
    """The job still works: a late node is taken in."""
    late = nodes.start("late")
    nodes.wait_for_world([*members, *late])
