"""What a job keeps in etcd, as far as the torchrun tests look at it."""

from __future__ import annotations

import json

from rdzv_etcd.protocol.keys import JobKeys
from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agent, Agents, Job, wait_until


def leader(server: EtcdServer, job: Job, agents: list[Agent]) -> Agent:
    """Return the agent that leads the job; its node id has the agent's process id in the middle."""
    value = server.keys(_keys(job).leader)[_keys(job).leader]
    pid = int(json.loads(value)["node"].split("~")[1])
    return next(agent for agent in agents if agent.process.pid == pid)


def node_pids(server: EtcdServer, job: Job) -> set[int]:
    """Return the process ids of all agents whose presence etcd holds."""
    found = server.keys(_keys(job).nodes.start)
    return {int(_keys(job).node_id(key).split("~")[1]) for key in found}


def finish(agents: Agents, server: EtcdServer, job: Job, running: list[Agent]) -> None:
    """Let the job finish; every agent must exit with 0, and nothing of the job may be left."""
    for agent in running:
        agent.may_end = True
    job.stop_file.touch()
    codes = {agent.name: agent.wait() for agent in running}
    assert codes == dict.fromkeys(codes, 0)
    assert_nothing_left(server, job)


def assert_nothing_left(server: EtcdServer, job: Job) -> None:
    """Etcd holds no key and no lease of the job, once its marker ``closed_ttl`` is over."""

    def left() -> list[str]:
        keys = [f"{key!r}: {value!r}" for key, value in server.keys(_keys(job).root).items()]
        return keys + [f"lease {lease:x}" for lease in server.leases()]

    try:
        # A grant that was given up while etcd was away may have been made: it ends with its TTL.
        wait_until("the job's keys and leases are gone", lambda: not left(), timeout_s=90)
    except AssertionError as error:
        granted = [
            server.gateway.call("/v3/lease/timetolive", {"ID": str(lease), "keys": True})
            for lease in server.leases()
        ]
        raise AssertionError(f"{error}: {left()}, {granted}") from None


def _keys(job: Job) -> JobKeys:
    return JobKeys("/rdzv_etcd", job.run_id)
