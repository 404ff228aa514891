"""Hosts as network namespaces: each has a link of its own to the test's namespace, to be cut.

Knows Linux's ``ip`` and ``nsenter``; knows nothing of etcd. A namespace lives as long as a process
in it, and that dies with the test run; its link vanishes with it. So nothing can be left behind.

The servers listen on :attr:`Network.gateway`. Hosts are not routed to one another.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.claims import claim
from tests.support.processes import spawn

_START_LIMIT_S = 10.0


def why_not() -> str:
    """Return why namespaces cannot be had here, or nothing if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if tried.returncode:
        return f"this machine grants no network namespace: {tried.stderr.decode().strip()}"
    name = f"rzp{os.getpid() % 1_000_000}"
    made = subprocess.run(
        ["ip", "link", "add", name, "type", "veth"], capture_output=True, check=False
    )
    if made.returncode:
        return f"this machine grants no network device: {made.stderr.decode().strip()}"
    _ip("link", "del", name)
    return ""


class Host:
    """One namespace with one address."""

    def __init__(self, network: Network, number: int) -> None:
        self.address = f"{network.prefix}.{number}"
        self.link = f"rz{os.getpid() % 1_000_000}x{network.number}x{number}"
        """The network device in the test's namespace that leads to this host; its address is
        :attr:`Network.gateway`."""
        sleeper = ["unshare", "--net", "--", "sleep", "infinity"]
        self._holder = spawn([_tool(sleeper[0]), *sleeper[1:]], network.folder / "netns.log")
        self._wait_for_namespace()
        pid = str(self._holder.pid)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("addr", "add", network.gateway, "peer", self.address, "dev", self.link)
        _ip("link", "set", self.link, "up")
        for command in (
            ("addr", "add", self.address, "peer", network.gateway, "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            subprocess.run(self.enter([_tool("ip"), *command]), check=True, capture_output=True)

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs ``argv`` on this host, with the same process id."""
        return [_tool("nsenter"), f"--net=/proc/{self._holder.pid}/ns/net", "--", *map(str, argv)]

    def cut(self) -> None:
        """Pull the cable: packets vanish both ways, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def heal(self) -> None:
        _ip("link", "set", self.link, "up")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def _wait_for_namespace(self) -> None:
        ours = Path("/proc/self/ns/net").stat().st_ino
        theirs = Path(f"/proc/{self._holder.pid}/ns/net")
        deadline_s = time.monotonic() + _START_LIMIT_S
        while theirs.stat().st_ino == ours:
            if self._holder.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("no network namespace could be made")
            time.sleep(0.01)  # unshare tells nobody when it has done it


class Network:
    """A star of hosts; the test's own namespace is its middle, at :attr:`gateway`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self._claim = _claim_number()
        # RFC 2544 keeps 198.18.0.0/15 for tests on isolated networks: nobody's real address.
        self.prefix = f"198.18.{self.number}"
        self.gateway = f"{self.prefix}.1"
        self._hosts: list[Host] = []

    def add_host(self) -> Host:
        host = Host(self, len(self._hosts) + 2)
        self._hosts.append(host)
        return host

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        os.close(self._claim)


def _claim_number() -> tuple[int, int]:
    """Return a network number that no other test process uses, and the claim on it."""
    for number in random.SystemRandom().sample(range(1, 255), 254):
        held = claim(f"network-{number}")
        if held is not None:
            return number, held
    raise RuntimeError("all test networks are in use")


def _ip(*arguments: str) -> None:
    done = subprocess.run([_tool("ip"), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found
