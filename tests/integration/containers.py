"""A compose project under test: bring it up, hurt its containers, read the workers' step logs.

Knows the engine's API, both generations of compose, and the lines that worker.py prints; knows
nothing of what the library keeps in etcd.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
from docker.models.containers import Container
from testcontainers.compose import DockerCompose

from tests.integration.images import PROJECT

T = TypeVar("T")

FOLDER = Path(__file__).parent
PROJECT_PREFIX = "rdzv-etcd-test-"
PATIENCE_S = 300.0
"""The limit of every wait. It only ends a failing test."""

WORKER = "/integration/worker.py"
ALLREDUCE = f"{WORKER} --allreduce"
"""The trainings of nodes; the first only reports its steps and their world."""

LEASE_TTL_S = 3
CONF = f"lease_ttl={LEASE_TTL_S},last_call_timeout=3,closed_ttl=3,ended_ttl=3"

_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_serial = itertools.count(1)


def wait_until(
    what: str, condition: Callable[[], T], *, explain: Callable[[], object] = lambda: ""
) -> T:
    """Return the condition's first true value, looking a few times a second.

    For what containers do, which sends no event. Raises ``AssertionError`` when patience ends.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}\n{explain()}")
        time.sleep(0.25)
    return value


@dataclass(frozen=True)
class Step:
    """One step that one worker reported."""

    attempt: str
    """Differs with every start of a worker."""
    rank: int
    world_size: int
    epoch: int
    restart_count: int
    master_addr: str
    master_port: int
    step: int
    time: float


class Host:
    """One container of a service, seen as a host."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.service: str = container.labels[_SERVICE_LABEL]

    def __repr__(self) -> str:
        return str(self.container.name)

    # -- what is seen of it -----------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        self.container.reload()
        state: dict[str, Any] = self.container.attrs["State"]
        return state

    @property
    def addresses(self) -> set[str]:
        """Its addresses on the project's network; none while it is cut off."""
        self.container.reload()
        networks = self.container.attrs["NetworkSettings"]["Networks"].values()
        found = {one[key] for one in networks for key in ("IPAddress", "GlobalIPv6Address")}
        return found - {""}

    def steps(self) -> list[Step]:
        """Return what its workers have reported so far."""
        lines = self.container.logs(stdout=True, stderr=False).decode().splitlines(keepends=True)
        return [Step(**json.loads(line)) for line in lines if line[0] == "{" and line[-1] == "\n"]

    def output(self) -> str:
        """What it wrote to stderr: the agent's and the workers' messages."""
        return str(self.container.logs(stdout=False, stderr=True).decode(errors="replace"))

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its output is both of its streams.

        By the engine's own client, as docker-py loses output
        (https://github.com/docker/docker-py/issues/3332).
        """
        return subprocess.run(
            ["docker", "exec", str(self.container.id), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=PATIENCE_S,
        )

    def run(self, *command: str) -> str:
        """Run a command inside and return its output; raises ``AssertionError`` if it fails."""
        ended = self.attempt(*command)
        status = ended.returncode
        assert status == 0, f"{self}: {command} gave {status}: {ended.stdout}"
        return ended.stdout

    def wait(self) -> int:
        """Return the exit code."""
        return int(self.container.wait(timeout=PATIENCE_S)["StatusCode"])

    # -- what is done to it -----------------------------------------------------------------------

    def killed(self) -> AbstractContextManager[None]:
        """Lost power, switched on again at the end."""
        return _between(self.container.kill, self.container.start)

    def paused(self) -> AbstractContextManager[None]:
        """Hanging, connections and all, until the end."""
        return _between(self.container.pause, self.container.unpause)

    def stopped(self) -> AbstractContextManager[None]:
        """Asked to end (SIGTERM), given time for it; started again at the end."""
        return _between(partial(self.container.stop, timeout=60), self.container.start)

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Without a network until the end; it may have another address afterwards."""
        self.container.reload()
        ((name, attached),) = self.container.attrs["NetworkSettings"]["Networks"].items()
        network = self.container.client.networks.get(name)
        network.disconnect(self.container)
        yield
        network.connect(self.container, aliases=attached["Aliases"])

    def heal(self) -> None:
        """Undo whatever a failed test left: run, and be connected."""
        state = self.state
        if state["Paused"]:
            self.container.unpause()
        if not state["Running"]:
            self.container.start()
        if not self.addresses:
            networks = self.container.client.networks
            name = f"{self.container.labels[_PROJECT_LABEL]}_default"
            networks.get(name).connect(self.container, aliases=[self.service])


@contextmanager
def _between(hurt: Callable[[], object], heal: Callable[[], object]) -> Iterator[None]:
    hurt()
    yield
    heal()


class Project(DockerCompose):
    """docker-compose.yml with the tests' changes, as a project of its own.

    A context manager: everything it made is gone afterwards. ``services`` and what they depend on
    are started, profiles included.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        folder: Path,
        *services: str,
        profiles: Sequence[str] = (),
        override: str | None = None,
        **variables: str,
    ) -> None:
        self.name = f"{PROJECT_PREFIX}{os.getpid()}-{next(_serial)}"
        self.client = client
        values = {
            "ETCD_PORT_1": "",  # any free ones
            "ETCD_PORT_2": "",
            "ETCD_PORT_3": "",
            "RDZV_CONF": CONF,
            "LOGLEVEL": "INFO",
            "TRAINING": WORKER,
            **variables,
        }
        env_file = folder / f"{self.name}.env"
        env_file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        files = [PROJECT / "docker-compose.yml", FOLDER / "docker-compose.test.yml"]
        if override is not None:
            files.append(FOLDER / override)
        super().__init__(
            PROJECT,
            compose_file_name=[str(file) for file in files],
            wait=False,  # docker-compose 1.29 cannot; depends_on does it
            env_file=str(env_file),
            services=list(services),
            profiles=list(profiles),
        )

    @cached_property
    def compose_command_property(self) -> list[str]:
        """As the base class has it, but also for docker-compose 1.29, which is no plugin."""
        command = [*compose_command(), "--project-name", self.name]
        assert isinstance(self.compose_file_name, list)
        assert isinstance(self.env_file, list)
        for flag, items in (
            ("-f", self.compose_file_name),
            ("--profile", self.profiles or []),
            ("--env-file", self.env_file),
        ):
            command += [word for item in items for word in (flag, item)]
        return command

    def start(self) -> None:
        self.compose("up", "--detach", "--no-build", *(self.services or ()))

    def stop(self, down: bool = True) -> None:
        """Remove everything of this project, however it was made."""
        remove_project(self.client, self.name)

    def compose(self, *arguments: str) -> str:
        """Run a compose command; its words are part of the error if it fails."""
        command = [*self.compose_command_property, *arguments]
        result = subprocess.run(
            command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=600
        )
        words = result.stdout + result.stderr
        assert result.returncode == 0, f"{' '.join(command)} gave {result.returncode}: {words}"
        return words

    def scale(self, service: str, count: int) -> list[Host]:
        """Have so many containers of a service, and leave the present ones as they are."""
        scale = f"{service}={count}"
        self.compose("up", "--detach", "--no-deps", "--no-recreate", "--scale", scale, service)
        return self.hosts(service)

    def hosts(self, service: str) -> list[Host]:
        """Return a service's containers that have not ended, in the order of their names."""
        labels = [f"{_PROJECT_LABEL}={self.name}", f"{_SERVICE_LABEL}={service}"]
        found = self.client.containers.list(filters={"label": labels})
        return sorted((Host(container) for container in found), key=repr)

    def all_hosts(self) -> list[Host]:
        labels = {"label": f"{_PROJECT_LABEL}={self.name}"}
        return sorted(map(Host, self.client.containers.list(all=True, filters=labels)), key=repr)

    def describe(self) -> str:
        """Say what every container is doing and what it wrote last, for a failed test."""
        parts = []
        for host in self.all_hosts():
            steps = host.steps()[-2:] if host.service.startswith("node") else []
            last = "\n".join(host.output().splitlines()[-25:])
            parts.append(f"--- {host}: {host.container.status}\n{last}\n{steps}")
        return "\n".join(parts)

    # -- worlds -----------------------------------------------------------------------------------

    def wait_for_world(self, hosts: Sequence[Host], *, after: float = 0.0) -> list[Step]:
        """Wait until exactly ``hosts`` train in one world; return one step of each, by rank.

        It counts when each has reported three steps in it, the first later than ``after``.
        """
        return wait_until(
            f"a world of {hosts}", lambda: _world(hosts, after), explain=self.describe
        )

    def expect_undisturbed(self, hosts: Sequence[Host], steps: int) -> None:
        """Wait for that many more steps of each host; fail if any worker was restarted."""
        before = {host: host.steps()[-1] for host in hosts}
        latest = wait_until(
            f"{steps} more steps on each of {hosts}",
            lambda: _further(before, steps),
            explain=self.describe,
        )
        attempts = {host: step.attempt for host, step in before.items()}
        same = {host: step.attempt for host, step in latest.items()} == attempts
        assert same, f"workers were restarted\n{self.describe()}"


def _world(hosts: Sequence[Host], after: float) -> list[Step]:
    found: list[Step] = []
    for host in hosts:
        steps = host.steps()
        current = [step for step in steps if step.attempt == steps[-1].attempt]
        if len(current) < 3 or current[0].time <= after:
            return []
        found.append(current[-1])
    found.sort(key=lambda step: step.rank)
    same = {(step.epoch, step.world_size, step.master_addr, step.master_port) for step in found}
    ranks = [step.rank for step in found]
    whole = ranks == list(range(len(hosts))) and found[0].world_size == len(hosts)
    return found if whole and len(same) == 1 else []


def _further(before: Mapping[Host, Step], count: int) -> dict[Host, Step]:
    latest = {host: host.steps()[-1] for host in before}
    moved = all(
        step.attempt != before[host].attempt or step.step >= before[host].step + count
        for host, step in latest.items()
    )
    return latest if moved else {}


# --- the engine -----------------------------------------------------------------------------------


def compose_command() -> list[str]:
    """Return how compose is called here: $RDZV_ETCD_COMPOSE, v2's plugin, or docker-compose."""
    named = os.environ.get("RDZV_ETCD_COMPOSE")
    if named:
        return named.split()
    plugin = ["docker", "compose"]
    if shutil.which("docker"):
        asked = subprocess.run([*plugin, "version"], capture_output=True, check=False)
        if asked.returncode == 0:
            return plugin
    return ["docker-compose"]


def remove_project(client: docker.DockerClient, name: str) -> None:
    """Remove everything that carries a project's label, as far as it (still) exists."""
    label = {"label": f"{_PROJECT_LABEL}={name}"}
    for container in client.containers.list(all=True, filters=label):
        container.remove(force=True, v=True)
    for network in client.networks.list(filters=label):
        network.remove()
    for volume in client.volumes.list(filters=label):
        volume.remove(force=True)
