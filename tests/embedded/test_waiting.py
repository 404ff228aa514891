"""What a node says while no etcd answers, and how long it may be kept waiting."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from rdzv_etcd.embedded.port import PortAnswer, probe
from rdzv_etcd.embedded.program import take_lock
from rdzv_etcd.settings import Endpoint
from tests.embedded.conftest import Agents, Start
from tests.support.processes import free_port


def test_each_cause_of_waiting_is_told_within_seconds(agents: Agents, start: Start) -> None:
    """None of them causes traffic: an empty label is no name, and lo has no such neighbour."""
    start(embed_grace=60)
    kept = free_port()
    with take_lock(kept):
        told = {
            "no..name": "no..name cannot be resolved on this machine; is it spelt right",
            "[fe80::1%lo]": "fe80::1%lo is not this machine",
            # Another of this machine's addresses than the one that etcd was started for.
            "127.0.0.2": "keeps an embedded etcd on this port that listens only on 127.0.0.1",
        }
        waiting = [(agents.start(host), text) for host, text in told.items()]
        starting = "another process of this machine is starting it"
        waiting.append((agents.start(port=kept), starting))
        for agent, _ in waiting:
            agent.go()
        for agent, text in waiting:
            agent.wait_for_log(text)
            assert "WARNING" in agent.log()


@pytest.mark.parametrize("host", ["127.1", "0.0.0.0"])
def test_an_etcd_that_other_machines_cannot_reach_is_told_to_who_expects_several(
    start: Start, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    start(host, max_nodes=3)
    (record,) = [it for it in caplog.records if "no other machine can reach" in it.getMessage()]
    assert record.levelname == "WARNING"
    assert "if the 3 nodes of job 'job' are not all on this machine" in record.getMessage()


@pytest.mark.parametrize("at_once", [0, 41], ids=["from the head on", "once its head is sent"])
def test_a_server_that_sends_a_byte_at_a_time_is_silent(port: int, at_once: int) -> None:
    """It once kept a node for as long as it liked."""
    sent = 0
    left = threading.Event()

    def drip(listener: socket.socket) -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            text = b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000
            try:
                connection.sendall(text[:at_once])
                sent = at_once
                while sent < len(text):
                    connection.sendall(text[sent : sent + 1])
                    sent += 1
                    time.sleep(0.05)  # it is what the server does, not a wait of the test
            except OSError:
                left.set()

    with socket.create_server(("127.0.0.1", port)) as listener:
        server = threading.Thread(target=drip, args=(listener,))
        server.start()
        assert probe(Endpoint("127.0.0.1", port), 0.5).answer is PortAnswer.SILENCE
        server.join()
    assert left.is_set()  # the prober went away before the end
