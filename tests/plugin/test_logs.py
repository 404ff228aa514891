"""What a person sees: lines that say what a node waits for and why, and nothing of gRPC's."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import LIMIT_S, RemoteNode, node_options
from tests.plugin.handlers import leave, parameters
from tests.support.leaks import LeakCheck
from tests.support.processes import free_port
from tests.support.servers import EtcdServer

_AGENT = """
import sys, time
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
endpoint, job_id = sys.argv[1:]
handler = get_rendezvous_handler(
    RendezvousParameters("etcd3", endpoint, job_id, 1, 2, "127.0.0.1", last_call_timeout="0.2",
                         lease_ttl="3", settle="0.1", closed_ttl="1", connect_timeout="1"))
print("size", handler.next_rendezvous().world_size, flush=True)
for line in sys.stdin:
    while not handler.num_nodes_waiting():
        time.sleep(0.05)  # as torch's agent does
    print("size", handler.next_rendezvous().world_size, flush=True)
handler.shutdown()
"""


def test_an_agents_lines(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    """A round, a newcomer, a loss, the end: each is told, in one line, by our logger only."""
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT, etcd_server.endpoint, job_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOGLEVEL": "INFO"},
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "size 1\n"
        with RemoteNode(node_options(etcd_server, job_id, "1:2")) as newcomer:
            assert newcomer.node_id
            _send(newcomer, "join")
            # The agent is told; it re-joins when its newcomer is there.
            _rejoin(agent)
            assert agent.stdout.readline() == "size 2\n"
            assert newcomer._answer()["size"] == 2
            newcomer.process.send_signal(signal.SIGKILL)
            newcomer.process.wait(LIMIT_S)
            _rejoin(agent)
            assert agent.stdout.readline() == "size 1\n"
        _, errors = agent.communicate(timeout=LIMIT_S)
    lines = errors.splitlines()
    for words in (
        "arrived for round 1",
        "round 1: rank 0 of 1",
        "round 1 must be re-formed",
        "round 2: rank 0 of 2",
        "lost",
        "round 3: rank 0 of 1",
        "closed the job: the workers have finished",
    ):
        assert any(words in line and job_id in line for line in lines), (words, errors)
    assert "grpc" not in errors.lower()
    assert "Traceback" not in errors
    assert len(lines) < 40, errors


def _send(node: RemoteNode, command: str) -> None:
    assert node.process.stdin is not None
    node.process.stdin.write(f'["{command}"]\n')
    node.process.stdin.flush()


def _rejoin(agent: subprocess.Popen[str]) -> None:
    assert agent.stdin is not None
    agent.stdin.write("again\n")
    agent.stdin.flush()


def test_a_wrong_endpoint_is_one_error_and_no_noise(job_id: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AGENT, f"127.0.0.1:{free_port()}", job_id],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LOGLEVEL": "INFO"},
    )
    assert done.returncode == 1
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert "RendezvousConnectionError" in last
    assert "refused" in last
    noise = [line for line in done.stderr.splitlines() if line.startswith(("E0", "W0", "I0"))]
    assert [line for line in noise if "grpc" in line.lower() or ".cc:" in line] == []


def test_the_default_id_gets_a_warning(
    leak_check: LeakCheck, etcd_server: EtcdServer, caplog: pytest.LogCaptureFixture, job_id: str
) -> None:
    """torchrun's default is "none": two users would share a job."""
    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        leave(create_handler(parameters(etcd_server, "none", "1")))
        assert "--rdzv-id" in caplog.text
        caplog.clear()
        leave(create_handler(parameters(etcd_server, job_id, "1")))
        assert "--rdzv-id" not in caplog.text


def test_options_of_c10d_are_told_to_mean_nothing_here(
    leak_check: LeakCheck,
    etcd_server: EtcdServer,
    job_id: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"is_host": 1, "store_type": "file"}
    leave(create_handler(parameters(etcd_server, job_id, "1", **options)))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for option in options:
        assert sum(text.startswith(f"{option}= has no effect here") for text in told) == 1
