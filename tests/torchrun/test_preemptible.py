"""examples/elastic/preemptible.sh: what it passes on, with programs in torchrun's place."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.torchrun.scenes import EXAMPLES

SCRIPT = EXAMPLES / "elastic" / "preemptible.sh"
LIMIT_S = 60.0

# Prints when it is ready for a signal, and ends with 5 after the second one.
_COUNTS_SIGNALS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for _ in range(2):
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
raise SystemExit(5)
"""


def test_it_ends_as_the_program_does() -> None:
    for code in (0, 7):
        done = subprocess.run([SCRIPT, "bash", "-c", f"exit {code}"], check=False, timeout=LIMIT_S)
        assert done.returncode == code


def test_sigterm_becomes_sigusr1_and_the_program_is_waited_for() -> None:
    with subprocess.Popen(
        [SCRIPT, sys.executable, "-c", _COUNTS_SIGNALS], stdout=subprocess.PIPE
    ) as node:
        assert node.stdout is not None
        for _ in range(2):
            assert node.stdout.readline() == b"ready\n"
            node.send_signal(signal.SIGTERM)
        assert node.wait(LIMIT_S) == 5


@pytest.mark.parametrize(
    ("sent", "ended_by"),
    [
        (signal.SIGTERM, signal.SIGUSR1),  # as torchrun before its first rendezvous
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_program_that_handles_no_signal_is_ended_by_it(sent: int, ended_by: int) -> None:
    program = "echo ready; exec sleep 600"
    # A shell cannot trap what is ignored when it starts, and tests may be started with nohup.
    command = ["env", "--default-signal", str(SCRIPT), "bash", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"ready\n"
        node.send_signal(sent)
        assert node.wait(LIMIT_S) == 128 + ended_by


def test_without_a_program_it_says_what_to_write() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode != 0
    assert "write preemptible.sh torchrun" in done.stderr
