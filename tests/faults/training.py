"""A job under real torchrun that several faults hit, one after the other; its step logs judge.

Knows agents, their workers' step logs and which agents' presence etcd holds. What a fault is, and
how it ends, is each test's own business. torchrun takes long to start, so tests share a job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from tests.faults.nodes import TTL_S, assert_nothing_left
from tests.support.gateway import GatewayError
from tests.support.leaks import Store, job_root
from tests.torchrun.agents import Agent, Agents, Job, Step

_JOINED = re.compile(r"round \d+ formed in [0-9.]+ s: node rank \d+ of")
"""What an agent writes whenever a round is formed with it, whether its workers get to work or
not."""


@dataclass(frozen=True)
class Life:
    """One worker process in one world, as it says itself in every line of its step log."""

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
    """What one agent's logs told at some moment."""

    lives: tuple[Life, ...]
    joined: int

    @classmethod
    def of(cls, agent: Agent) -> Past:
        lives = dict.fromkeys(Life.of(step) for step in agent.steps())
        return cls(tuple(lives), len(_JOINED.findall(agent.output)))


class Training:
    """The job, its agents and its etcd (``store`` returns who can be asked just now)."""

    def __init__(self, job: Job, store: Callable[[], Store]) -> None:
        self.job = job
        self.agents = Agents()
        self.members: list[Agent] = []
        """The agents that are expected to train."""
        self._store = store
        self._reported: dict[str, int] = {}

    def start(
        self, *names: str, environment: Mapping[str, str] | None = None, **changes: object
    ) -> list[Agent]:
        """Start an agent per name; ``changes`` are to the fields of :class:`Job`."""
        job = replace(self.job, **changes)  # type: ignore[arg-type]
        started = self.agents.start(job, *names, **(environment or {}))
        self.members += started
        return started

    # -- what must be so --------------------------------------------------------------------------

    def wait_for_world(self, after: float = 0.0) -> list[Step]:
        """Wait until the members, and only they, train in one world."""
        return self.agents.wait_for_world(self.members, size=len(self.members), after=after)

    def train_for(self, seconds: float) -> None:
        """Wait that long, and for a step of every member after that."""
        until = time.time() + seconds
        self.agents.wait_until(
            f"steps of each member after {seconds:g} s",
            lambda: all(agent.steps_after(until) for agent in self.members),
        )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within the block, and for a TTL after it, the same worker processes work on in the same
        world: every line of the step logs says so, and no agent has joined another round."""
        self.wait_for_world()
        before = {agent.name: Past.of(agent) for agent in self.members}
        began = time.time()
        yield
        self.train_for(1.5 * TTL_S)
        assert {agent.name: Past.of(agent) for agent in self.members} == before
        pauses = [_longest_pause_s(agent.steps_after(began)) for agent in self.members]
        steps = min(len(agent.steps_after(began)) for agent in self.members)
        print(
            f"measured: {steps} steps in {time.time() - began:.1f} s, {max(pauses):.2f} s at most "
            "from one to the next"
        )

    @contextmanager
    def reformed_once(self) -> Iterator[None]:
        """What is done within the block makes the members (as they are at its end) form exactly one
        new world, whose epoch is higher, and in which they train on."""
        before = {agent.name: Past.of(agent) for agent in self.members}
        began = time.time()
        yield
        world = self.wait_for_world(after=began)
        print(f"measured: first step of the new world after {world[0].time - began:.1f} s")
        self.train_for(1.5 * TTL_S)
        for agent in self.members:
            old, new = before.get(agent.name, Past((), 0)), Past.of(agent)
            assert len(new.lives) == len(old.lives) + 1, f"{agent.name}: {old}, then {new}"
            assert new.joined == old.joined + 1, f"{agent.name}: {old}, then {new}"
            assert not old.lives or new.lives[-1].epoch > old.lives[-1].epoch
        self.assert_nobody_went_back()

    def assert_nobody_went_back(self) -> None:
        """No agent's workers have reported a step of a world older than one they had reported."""
        for agent in self.members:
            epochs = [step.epoch for step in agent.steps()]
            assert epochs == sorted(epochs), f"{agent.name} went back to an old world"

    @contextmanager
    def without(self, agent: Agent) -> Iterator[None]:
        """Within the block this agent counts as no member; it reports nothing there that is of a
        world of the others."""
        self.members.remove(agent)
        before = {step.epoch for step in agent.steps()}
        try:
            yield
        finally:
            self.members.append(agent)
        assert {step.epoch for step in agent.steps()} <= before

    def wait_present(self, agents: Sequence[Agent] | None = None) -> None:
        """Wait until etcd holds the presence of exactly these agents (of all members)."""
        wanted = {agent.process.pid for agent in (self.members if agents is None else agents)}
        self.agents.wait_until(
            f"etcd holds {len(wanted)} agents' presence", lambda: self._present() == wanted
        )

    def leader(self) -> Agent:
        """Return the agent that leads the job."""
        key = job_root(self.job.run_id) + b"ctl/leader"
        pid = _pid(self._store().keys(key)[key].value)
        return next(agent for agent in self.members if agent.process.pid == pid)

    # -- the end ----------------------------------------------------------------------------------

    def lose(self, agent: Agent) -> None:
        """Kill an agent and its workers: it is no member any more."""
        agent.kill()
        self.members.remove(agent)

    def finish(self) -> None:
        """Let the job finish: every member exits with 0, and nothing of the job is left in etcd."""
        for agent in self.members:
            agent.may_end = True
        self.job.stop_file.touch()
        codes = {agent.name: agent.wait() for agent in self.members}
        assert codes == dict.fromkeys(codes, 0)
        assert_nothing_left(self._store(), self.job.run_id)

    def report(self) -> None:
        """Print what the agents wrote since the last report."""
        for agent in self.members:
            written = agent.output
            print(f"\n===== {agent} =====\n{written[self._reported.get(agent.name, 0) :]}")
            self._reported[agent.name] = len(written)
            print("\n".join(map(str, dict.fromkeys(Life.of(step) for step in agent.steps()))))

    def close(self) -> None:
        self.agents.close()

    def _present(self) -> set[int] | None:
        try:
            found = self._store().keys(job_root(self.job.run_id) + b"nodes/")
        except (OSError, GatewayError, StopIteration):
            return None  # etcd is on its way back
        return {_pid(key) for key in found}


def _pid(text: bytes) -> int:
    """Return the process id in the middle of a node id."""
    return int(text.split(b"~")[1])


def _longest_pause_s(steps: Sequence[Step]) -> float:
    times = [step.time for step in steps]
    return max(later - earlier for earlier, later in pairwise(times))
