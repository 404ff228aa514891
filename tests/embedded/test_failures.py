"""An etcd that cannot start says why, in its own words; hosts and folders it has to do without."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.child import cause_in_log
from rdzv_etcd.embedded.port import own_addresses
from tests.embedded.agents import Agent, wait_for_end
from tests.embedded.conftest import Agents

_LO_UP = "ip link set lo up"


def in_mounts(*commands: str) -> tuple[str, ...]:
    """Run in a namespace of mounts of its own, after these commands."""
    return ("unshare", "--mount", *shell(*commands))


def in_network(*commands: str) -> tuple[str, ...]:
    return ("unshare", "--net", *shell(_LO_UP, *commands))


def shell(*commands: str) -> tuple[str, ...]:
    return ("sh", "-c", " && ".join((*commands, 'exec "$@"')), "sh")


def refusal(agents: Agents, within: tuple[str, ...], port: int = 0) -> str:
    agent: Agent = agents.start(within=within, port=port)
    agent.go()
    return agent.error()


def test_too_few_open_files_are_named_as_the_cause(agents: Agents) -> None:
    told = refusal(agents, shell("ulimit -n 64"))
    assert "file descriptor limit of etcd process is too low; please set higher: limit=64" in told
    assert "goroutine" not in told
    assert "stacktrace" not in told


def test_a_full_disk_is_named_as_the_cause(agents: Agents, scratch: Path) -> None:
    told = refusal(agents, in_mounts(f"mount -t tmpfs -o size=2m none {scratch}"))
    assert "failed to create WAL: no space left on device" in told
    assert "goroutine" not in told


def test_a_privileged_port_is_named_as_the_cause(agents: Agents) -> None:
    port = random.SystemRandom().randrange(600, 1000)
    within = (*in_network(), "setpriv", "--bounding-set", "-net_bind_service")
    told = refusal(agents, within, port)
    assert f"listen tcp 127.0.0.1:{port}: bind: permission denied" in told


def test_without_a_folder_for_temporary_files_nothing_is_written_elsewhere(
    agents: Agents, scratch: Path
) -> None:
    """Least of all to the root directory, where a supervisor works."""
    read_only = (
        f"if [ -d {place} ]; then mount --bind {place} {place}; "
        f"mount -o remount,bind,ro {place}; fi"
        for place in (scratch, "/tmp", "/var/tmp", "/usr/tmp")
    )
    told = refusal(agents, in_mounts(*read_only))
    assert f"none of TMPDIR={scratch}, /tmp, /var/tmp and /usr/tmp can be written" in told
    assert list(Path("/").glob("rdzv-etcd-*")) == []


def test_it_works_where_the_only_loopback_address_is_of_ipv6(agents: Agents) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    agent = agents.start("[::1]", within=in_network("ip -4 addr flush dev lo"))
    agent.go()
    supervisor = agent.supervisor()
    assert supervisor is not None
    process = psutil.Process(supervisor)
    process.terminate()
    wait_for_end(process)


def test_a_log_without_a_cause_is_quoted_cut_and_escaped() -> None:
    assert cause_in_log("") == "it logged nothing"
    assert cause_in_log("one\ntwo\n") == "two"
    assert (
        cause_in_log("panic: the disk\ngoroutine 1 [running]:\nmain.main()\n") == "panic: the disk"
    )
    shown = cause_in_log("error: \x1b[2Jgone\u202e" + "x" * 5000)
    assert shown.startswith("error: \\x1b[2Jgone\\u202ex")
    assert len(shown) < 500
    fatal = {"level": "fatal", "msg": "no", "error": "because", "stacktrace": "main.go:1"}
    warning = {"level": "warn", "msg": "slow"}
    assert cause_in_log(f"{json.dumps(fatal)}\n{json.dumps(warning)}\n") == "no: because"
