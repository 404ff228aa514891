"""A job under real torchrun: its agents, and the etcd that they use. Their step logs judge.

Knows agents, what their workers report, and which keys of the job etcd holds. A fault, and how it
ends, is the business of each test.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.support.gateway import GatewayError
from tests.support.leaks import Store, job_root
from tests.support.processes import kill_marked
from tests.torchrun.agents import MARK, PATIENCE_S, Agent, Job, Step, wait_until

T = TypeVar("T")

TTL_S = 3
"""The lease in :data:`tests.torchrun.agents.QUICK`."""
_JOINED = re.compile(r"round \d+ formed in [0-9.]+ s: node rank \d+ of")
"""An agent logs this for each round it is in, whether its workers get to work or not."""
_FORGOTTEN_S = 90.0
"""A lease whose grant was given up ends with its TTL, and a new leader of etcd restarts that."""


class Life(NamedTuple):
    """One worker process in one world, as every line of its step log describes it."""

    pid: int
    rank: int
    world_size: int
    restart_count: int
    epoch: int

    @classmethod
    def of(cls, step: Step) -> Life:
        return cls(step.pid, step.rank, step.world_size, step.restart_count, step.epoch)


@dataclass(frozen=True)
class Past:
    """The lives of an agent's workers so far, and how many rounds it has joined."""

    lives: tuple[Life, ...]
    joined: int

    @classmethod
    def of(cls, agent: Agent) -> Past:
        lives = dict.fromkeys(Life.of(step) for step in agent.steps())
        return cls(tuple(lives), len(_JOINED.findall(agent.output)))


class Training:
    """The agents of one job. ``close`` leaves none of their processes behind.

    ``store`` returns an etcd that answers at the moment. Where a method takes agents, none given
    means the members: all that were started and are not expected to end.
    """

    def __init__(self, job: Job, store: Callable[[], Store]) -> None:
        self.job = job
        self.agents: list[Agent] = []
        self._store = store
        self._away: set[Agent] = set()
        self._mark = uuid.uuid4().hex
        self._reported: dict[Agent, int] = {}

    @property
    def members(self) -> list[Agent]:
        return [one for one in self.agents if not one.may_end and one not in self._away]

    def start(self, *names: str, **changes: Any) -> list[Agent]:
        """Start an agent per name. ``changes`` in capitals are to the environment, others to the
        fields of :class:`Job`."""
        environment = {name: value for name, value in changes.items() if name.isupper()}
        fields = {name: value for name, value in changes.items() if name not in environment}
        values = {"LOGLEVEL": "INFO", **os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        job = replace(self.job, **fields)
        started = [Agent(name, job, {**values, **environment}) for name in names]
        self.agents += started
        return started

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(self, what: str, condition: Callable[[], T]) -> T:
        """Return the condition's first true value; fail at once if an agent ends unexpectedly."""
        return wait_until(what, condition, check=self._fail_if_one_ended)

    def wait_for_output(self, agent: Agent, text: str) -> None:
        self.wait_until(f"{text!r} in the output of {agent}", lambda: text in agent.output)

    def wait_for_world(self, *agents: Agent, steps: int = 3, after: float = 0.0) -> list[Step]:
        """Wait until these agents, and only they, train in one world; return a step of each rank.

        A world counts when every rank has reported ``steps`` steps in it, the first of them later
        than ``after`` (wall clock of this machine).
        """
        expected = agents or tuple(self.members)
        names = ", ".join(sorted(agent.name for agent in expected))
        return self.wait_until(
            f"a world of {names}", lambda: _world(expected, self.job.nproc, steps, after)
        )

    def train_for(self, seconds: float, *agents: Agent) -> None:
        """Wait that long, and for a step of every agent after that."""
        until = time.time() + seconds
        self.wait_until(
            f"steps of each agent after {seconds:g} s",
            lambda: all(agent.steps_after(until) for agent in agents or self.members),
        )

    def wait_arrivals(self, count: int) -> None:
        """Wait until etcd holds the presences of so many agents."""
        self.wait_until(f"{count} arrivals", lambda: len(self.present()) == count)

    def wait_present(self, agents: Sequence[Agent] | None = None) -> None:
        """Wait until etcd holds the presences of exactly these agents (by default the members)."""
        wanted = {agent.process.pid for agent in (self.members if agents is None else agents)}
        self.wait_until(f"presences of {wanted}", lambda: self.present() == wanted)

    # -- expectations -----------------------------------------------------------------------------

    @contextmanager
    def undisturbed(self, *agents: Agent, for_s: float = 1.5 * TTL_S) -> Iterator[None]:
        """Within the block, and for ``for_s`` after it, the same worker processes continue in the
        same world: every line of the step logs says so, and no agent has joined another round."""
        watched = agents or tuple(self.members)
        before = {agent: Past.of(agent) for agent in watched}
        began = time.time()
        yield
        self.train_for(for_s, *watched)
        assert {agent: Past.of(agent) for agent in watched} == before
        made = [agent.steps_after(began) for agent in watched]
        pauses = [two.time - one.time for steps in made for one, two in pairwise(steps)]
        print(
            f"measured: {min(map(len, made))} steps in {time.time() - began:.1f} s, "
            f"{max(pauses):.2f} s at most from one to the next"
        )

    @contextmanager
    def reformed_once(self) -> Iterator[None]:
        """The block makes the members (as they are at its end) form exactly one new world, whose
        epoch is higher, and in which they train on."""
        before = {agent: Past.of(agent) for agent in self.members}
        began = time.time()
        yield
        world = self.wait_for_world(after=began)
        print(f"measured: first step of the new world after {world[0].time - began:.1f} s")
        self.train_for(1.5 * TTL_S)
        for agent in self.members:
            old, new = before.get(agent, Past((), 0)), Past.of(agent)
            assert len(new.lives) == len(old.lives) + 1, f"{agent.name}: {old}, then {new}"
            assert new.joined == old.joined + 1, f"{agent.name}: {old}, then {new}"
            assert not old.lives or new.lives[-1].epoch > old.lives[-1].epoch
            epochs = [step.epoch for step in agent.steps()]
            assert epochs == sorted(epochs), f"{agent.name} went back to an old world"

    @contextmanager
    def without(self, agent: Agent) -> Iterator[None]:
        """Within the block this agent is not a member, and reports no step of a new world."""
        self._away.add(agent)
        before = {step.epoch for step in agent.steps()}
        yield
        self._away.remove(agent)
        assert {step.epoch for step in agent.steps()} <= before

    # -- what etcd holds --------------------------------------------------------------------------

    @property
    def _root(self) -> bytes:
        return job_root(self.job.run_id)

    def present(self, *, finished: bool = False) -> set[int]:
        """Return the process ids of the agents whose presence etcd holds, or of those of them whose
        workers have finished; -1 if etcd is away."""
        try:
            presences = self._store().keys(self._root + b"nodes/").items()
        except (OSError, GatewayError, StopIteration):
            return {-1}
        return {
            _pid(key)
            for key, kept in presences
            if not finished or json.loads(kept.value).get("finished")
        }

    def leader(self) -> Agent:
        """Return the agent that leads the job."""
        key = self._root + b"ctl/leader"
        pid = _pid(json.loads(self._store().keys(key)[key].value)["node"].encode())
        return next(agent for agent in self.agents if agent.process.pid == pid)

    # -- the end ----------------------------------------------------------------------------------

    def own_stop_file(self, name: str) -> Path:
        """Where the workers of an agent look that were told to: ``--stop-file``."""
        return self.job.directory / f"{name}.stop"

    def finish_early(self, *agents: Agent) -> None:
        """Let workers with a stop file of their own succeed; wait until all agents know that."""
        for agent in agents:
            agent.may_end = True
            self.own_stop_file(agent.name).touch()
        pids = {agent.process.pid for agent in agents}
        names = ", ".join(agent.name for agent in agents)
        self.wait_until(
            f"{names} are known to have finished", lambda: self.present(finished=True) >= pids
        )

    def end_workers(self, *agents: Agent) -> None:
        """Let the job finish; these agents exit with 0."""
        ending = agents or tuple(self.members)
        for agent in ending:
            agent.may_end = True
        self.job.stop_file.touch()
        codes = {agent.name: agent.wait() for agent in ending}
        assert codes == dict.fromkeys(codes, 0)

    def finish(self, *agents: Agent) -> None:
        """Let the job finish; these agents exit with 0, and nothing of the job is left in etcd."""
        self.end_workers(*agents)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Wait until etcd holds no key of the job, once its marker's TTL is over, and no lease."""

        def left() -> list[str]:
            try:
                keys = [f"{key!r}: {kept}" for key, kept in self._store().keys(self._root).items()]
                return keys + [f"lease {lease:x}" for lease in self._store().leases()]
            except (OSError, GatewayError) as error:
                return [f"etcd does not answer: {error}"]

        try:
            wait_until("etcd has forgotten the job", lambda: not left(), timeout_s=_FORGOTTEN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {left()}") from None

    def report(self) -> None:
        """Print what the agents wrote since the last report."""
        for agent in self.agents:
            written = agent.output
            print(f"\n===== {agent} =====\n{written[self._reported.get(agent, 0) :]}")
            self._reported[agent] = len(written)
            print("\n".join(map(str, dict.fromkeys(Life.of(step) for step in agent.steps()))))

    def close(self) -> None:
        """End every process that the agents have started, and print what they wrote."""
        for agent in self.agents:  # a forked one does not carry the mark
            agent.process.kill()
        kill_marked(MARK, self._mark)
        for agent in self.agents:
            agent.process.wait(PATIENCE_S)
        self.report()

    def _fail_if_one_ended(self) -> None:
        for agent in self.agents:
            if not agent.may_end and agent.process.poll() is not None:
                raise AssertionError(f"{agent} ended although nothing asked it to")


def _world(agents: Sequence[Agent], nproc: int, steps: int, after: float) -> list[Step]:
    """Return the newest world's first step of each rank; nothing while it is incomplete."""
    size = len(agents) * nproc
    attempts: dict[tuple[str, int], list[Step]] = {}
    reported = [step for agent in agents for step in agent.steps()]
    for step in sorted(reported, key=attrgetter("time")):
        attempts.setdefault((step.agent, step.pid), []).append(step)
    newest_of_rank = {attempt[0].rank: attempt for attempt in attempts.values()}
    world = [newest_of_rank[rank] for rank in range(size) if rank in newest_of_rank]
    complete = (
        len(world) == size
        and all(len(attempt) >= steps and attempt[0].time > after for attempt in world)
        and {(one[0].world_size, one[0].epoch) for one in world} == {(size, world[0][0].epoch)}
        and {one[0].agent for one in world} == {agent.name for agent in agents}
    )
    return [attempt[0] for attempt in world] if complete else []


def _pid(node_id: bytes) -> int:
    """Return the process id in the middle of a node id."""
    return int(node_id.split(b"~")[1])
