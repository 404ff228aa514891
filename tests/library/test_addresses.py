"""Where the nodes of one job say that they are to be found."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest

from rdzv_etcd.world.group import Group
from tests.library.nodes import Job, join_all


def own_address() -> str:
    """This host's address towards others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no IPv4 route off this host")
        return str(probe.getsockname()[0])


def test_a_loopback_master_of_nodes_on_several_hosts_is_warned_of(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sees both kinds of addresses says so."""
    here = own_address()
    settings = job.settings("2")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Group(replace(settings, local_addr=address)))
            for address in ("127.0.0.1", here)
        ]
        assert caplog.records == []
        master = join_all(nodes)[0].master.address
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert master in ("127.0.0.1", here)
    for words in (f"rank 0 is {master}", "127.0.0.1", here, "--local-addr"):
        assert words in record.getMessage()
