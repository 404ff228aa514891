"""No etcd but that of the three nodes: each container runs one, and is killed in turn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tests.integration.containers import Host, Project, wait_until

NAMES = ("node-a", "node-b", "node-c")


def test_each_container_is_killed_in_turn_and_is_a_member_again(
    project: Callable[..., Project],
) -> None:
    """With all that runs in it. While it is away its name leads nowhere."""
    job = project(*NAMES, profiles=["embedded"], NNODES="2:3")
    hosts = [host for name in NAMES for host in job.hosts(name)]
    job.wait_for_world(hosts)
    for victim in hosts:
        wait_for_members(job, hosts)
        others = [host for host in hosts if host is not victim]
        began = time.time()
        with victim.killed():
            without = job.wait_for_world(others, after=began)
            wait_for_members(job, others)
            back = time.time()
        again = job.wait_for_world(hosts, after=back)
        assert again[0].epoch > without[0].epoch
        steps = [step for host in others for step in host.steps()]
        first = min(step.time for step in steps if step.epoch == without[0].epoch)
        print(f"measured: first step {first - began:.1f} s after {victim} was killed")
        assert victim.run("ls", "/tmp").count("rdzv-etcd-embedded") == 1, "its old member's data"
    wait_for_members(job, hosts)


def wait_for_members(job: Project, hosts: list[Host]) -> None:
    """Until ``rdzv-etcd status`` names just these, on one of them."""
    command = "rdzv-etcd status digits --endpoint=$PET_RDZV_ENDPOINT --conf=embed=1"
    names = ", ".join(f"{host.service}:2379" for host in hosts)

    def status() -> str:
        return hosts[0].attempt("sh", "-c", command).stdout

    def members() -> str:
        found = re.search("embedded cluster with members on ([^;\n]*)", status())
        return "" if found is None else re.sub(r" \(up [^)]*\)", "", found[1])

    wait_until(f"members on {names}", lambda: members() == names, explain=status)
