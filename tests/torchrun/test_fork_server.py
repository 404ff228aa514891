"""A forked agent behaves like one that a fresh Python runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.torchrun.agents import PATIENCE_S
from tests.torchrun.fork_server import HERE, Forked

pytestmark = pytest.mark.torchrun

SCRIPT = """
import os, sys
print(os.environ["TOLD"], os.getcwd(), sys.argv, os.getppid() != 1, flush=True)
"""
ONE = ("--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=1")


def environment() -> dict[str, str]:
    return {**os.environ, "LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1", "TOLD": "this"}


def forked(folder: Path, arguments: Sequence[str]) -> tuple[Forked, Path]:
    output = folder / "output"
    output.touch()
    return HERE.start([], arguments, output, environ=environment(), cwd=folder), output


@pytest.mark.parametrize("arguments", [("--no-such-option",), (*ONE, "script.py", "a", "b")])
def test_a_forked_agent_says_and_returns_what_another_does(
    tmp_path: Path, arguments: Sequence[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    agent, output = forked(tmp_path, arguments)
    code = agent.wait(PATIENCE_S)
    cold = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert (code, _without_log(output.read_text())) == (cold.returncode, _without_log(cold.stdout))
    assert (code == 0) == (arguments != ("--no-such-option",))


def test_a_forked_agent_can_be_killed_and_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    agent, output = forked(tmp_path, [*ONE, "script.py"])
    assert agent.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(0.1)
    assert os.getsid(agent.pid) == agent.pid
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) != 0, output.read_text()
    agent.kill()  # it has ended: no other process is hit
    assert agent.poll() == agent.wait()


def _without_log(text: str) -> list[str]:
    """Without lines of torch's log, which have the time."""
    return [line for line in text.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
