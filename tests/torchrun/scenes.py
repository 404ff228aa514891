"""The jobs of docs/guide.md: its commands, and the samples in their step logs.

Knows the options and the log of examples/elastic/imagenet_style.py.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.markdown import ROOT, Document
from tests.torchrun.agents import Agent, Job, Step

DOCUMENT = Document(ROOT / "docs" / "guide.md")
EXAMPLES = ROOT / "examples"
SAMPLES = 1440
CHECKPOINT_EVERY = 5
"""Steps; the example's default."""
_CHECKPOINT = "/var/tmp/digits"


@dataclass
class DocumentedJob(Job):
    """One command of the document, the same on all nodes; ``nnodes`` is the document's."""

    block: str = ""
    replaced: Sequence[tuple[str, str]] = ()
    """Texts of the command, each of which must occur, and their replacements."""
    script_args: Sequence[str] = field(
        default=("--epochs=1000000", "--min-step-seconds=0.05")  # until the stop file is there
    )

    def command(self, name: str) -> list[str]:
        added = [f"--step-log={self.directory}/{name}.steps", f"--stop-file={self.stop_file}"]
        here = [
            *self.replaced,
            (" examples/elastic/", f" {EXAMPLES}/elastic/"),
            (_CHECKPOINT, str(self.directory / name)),
            (".pt", f".pt {shlex.join([*added, *self.script_args])}"),
        ]
        script = DOCUMENT.commands(self.block)
        for shown, used in here:
            assert shown in script, shown
            script = script.replace(shown, used)
        return ["bash", "-c", script]

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the commands use."""
        return {
            "JOB_ID": self.run_id,
            "HOST_NODE_ADDR": self.endpoint,
            "NUM_TRAINERS": str(self.nproc),
            "PET_LOG_DIR": str(self.directory / "torchrun"),
        }


def checkpoint(job: Job, agent: Agent) -> Path:
    return job.directory / f"{agent.name}.pt"


def worlds_of(agents: Sequence[Agent]) -> dict[int, list[Step]]:
    """Return all steps, by their world's epoch, oldest world first."""
    worlds: dict[int, list[Step]] = defaultdict(list)
    for agent in agents:
        for step in agent.steps():
            worlds[step.epoch].append(step)
    return dict(sorted(worlds.items()))


def sizes_seen(agents: Sequence[Agent]) -> list[int]:
    """Return the sizes of the worlds that made a step, in their order."""
    return [steps[0].world_size for steps in worlds_of(agents).values()]


def restarts_used(agents: Sequence[Agent]) -> int:
    """Return how many restarts the agents have used up, the one with most of them."""
    return max(step.restart_count for agent in agents for step in agent.steps())


def assert_nothing_lost(agents: Sequence[Agent]) -> None:
    """Assert that no world has lost more than the steps since the last checkpoint and the one that
    was under way, and that each epoch of the training has used every sample once."""
    worlds = worlds_of(agents)
    reached, lost = 0, []
    for steps in worlds.values():
        (resumed_from,) = {step.resumed_from for step in steps}
        lost.append(reached - resumed_from)
        reached = max(step.step for step in steps)
    print(f"steps lost in each change: {lost[1:]}")
    assert all(0 <= count <= CHECKPOINT_EVERY + 1 for count in lost)

    used: dict[int, list[int]] = defaultdict(list)
    for step in _that_count(worlds):
        used[step.training_epoch] += step.samples
    assert list(used) == list(range(len(used)))
    for epoch, samples in used.items():
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}"


def _that_count(worlds: dict[int, list[Step]]) -> list[Step]:
    """Return the steps that the last world's state came from: its own, those of the world whose
    checkpoint it began with up to that, and so on, oldest first."""
    counted: list[Step] = []
    fence = max(worlds)
    until = max(step.step for step in worlds[fence])
    while until:
        steps = [step for step in worlds[fence] if step.step <= until]
        until, fence = steps[0].resumed_from, steps[0].resumed_fence
        counted += steps
    return sorted(counted, key=lambda step: step.step)
