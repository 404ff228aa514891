"""Hosts as network namespaces, each with a cable to a switch; the cable can be cut.

Knows Linux's ``ip`` and ``nsenter``; knows nothing of etcd. A namespace lives as long as a process
in it, and that dies with the test run; its link vanishes with it. So nothing can be left behind.

The test's own namespace is at the same switch. Its servers listen on :attr:`Network.gateway`.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.processes import claim, run, spawn

_START_LIMIT_S = 10.0
_BRIDGE = "switch"
DEVICE = "eth0"
"""The network device of every host."""


def why_not() -> str:
    """Return why this machine offers no namespaces, or nothing if it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (apt-get install iproute2 util-linux)"
    tried = run(["unshare", "--net", "true"])
    if tried.returncode:
        return f"this machine grants no network namespace: {tried.stderr.strip()}"
    name = f"rzp{os.getpid() % 1_000_000}"
    made = run(["ip", "link", "add", name, "type", "veth"])
    if made.returncode:
        return f"this machine grants no network device: {made.stderr.strip()}"
    _ip("link", "del", name)
    return ""


class _Namespace:
    """Lives as long as a process of its own."""

    def __init__(self, folder: Path) -> None:
        sleeper = ["unshare", "--net", "--", "sleep", "infinity"]
        self._holder = spawn([_tool(sleeper[0]), *sleeper[1:]], folder / "netns.log")
        self._wait()
        self.pid = str(self._holder.pid)

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs ``argv`` there, with the same process id."""
        return [_tool("nsenter"), f"--net=/proc/{self.pid}/ns/net", "--", *map(str, argv)]

    def run(self, tool: str, *arguments: str) -> None:
        """Run one of the system's tools there. Raises RuntimeError with what it says."""
        _run(self.enter([_tool(tool), *arguments]))

    def processes(self) -> list[psutil.Process]:
        """Return what runs there, but for what keeps the namespace."""
        here = _inode(self._holder.pid)
        processes = [it for it in psutil.process_iter() if _inode(it.pid) == here]
        return [it for it in processes if it.pid != self._holder.pid]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def _wait(self) -> None:
        ours = Path("/proc/self/ns/net").stat().st_ino
        theirs = Path(f"/proc/{self._holder.pid}/ns/net")
        deadline_s = time.monotonic() + _START_LIMIT_S
        while theirs.stat().st_ino == ours:
            if self._holder.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("no network namespace could be made")
            time.sleep(0.01)  # unshare does not announce that it has done it


class Host:
    """One namespace with one address, linked to its network's switch."""

    def __init__(self, network: Network, number: int) -> None:
        self.address = f"{network.prefix}.{number}"
        self._port = network.device(number)
        self._namespace = _Namespace(network.folder)
        self._switch = network.switch
        self.enter, self.run = self._namespace.enter, self._namespace.run
        self.processes = self._namespace.processes
        to_host = ("type", "veth", "peer", "name", DEVICE, "netns", self._namespace.pid)
        self._switch.run("ip", "link", "add", self._port, *to_host)
        self._switch.run("ip", "link", "set", self._port, "master", _BRIDGE)
        self.heal()
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", DEVICE)
        self.run("ip", "link", "set", DEVICE, "up")
        self.run("ip", "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable: packets vanish both ways, without an error."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def heal(self) -> None:
        self._switch.run("ip", "link", "set", self._port, "up")

    def close(self) -> None:
        self._namespace.close()


def lose(*hosts: Host) -> float:
    """Kill all that runs on these hosts, at once; return the moment on the monotonic clock."""
    stopped: set[psutil.Process] = set()
    while new := {it for host in hosts for it in host.processes()} - stopped:
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()  # so that none acts on the end of another, or starts one
        stopped |= new
    moment_s = time.monotonic()
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return moment_s


class Network:
    """Hosts at one switch. The test's own namespace is there at :attr:`gateway`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self._claim = _claim_number()
        # RFC 2544 keeps 198.18.0.0/15 for tests on isolated networks: no real host is there.
        self.prefix = f"198.18.{self.number}"
        self.gateway = f"{self.prefix}.1"
        self.gateway_device = self.device(1)
        self._hosts: list[Host] = []
        self.switch = _Namespace(folder)
        to_switch = ("type", "veth", "peer", "name", "up0", "netns", self.switch.pid)
        _ip("link", "add", self.gateway_device, *to_switch)
        _ip("addr", "add", f"{self.gateway}/24", "dev", self.gateway_device)
        _ip("link", "set", self.gateway_device, "up")
        for command in (
            ("add", _BRIDGE, "type", "bridge"),
            ("set", _BRIDGE, "up"),
            ("set", "up0", "master", _BRIDGE),
            ("set", "up0", "up"),
        ):
            self.switch.run("ip", "link", *command)

    def device(self, number: int) -> str:
        """The name of the network device that leads to the host of that number, 1 for this one."""
        return f"rz{os.getpid() % 1_000_000}x{self.number}x{number}"

    def add_host(self) -> Host:
        host = Host(self, len(self._hosts) + 2)
        self._hosts.append(host)
        return host

    def add_address(self, address: str) -> None:
        """Give the test's own namespace one more address there."""
        _ip("addr", "add", f"{address}/24", "dev", self.gateway_device)

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        self.switch.close()
        os.close(self._claim)


def _inode(pid: int) -> int:
    """Return which network namespace a process is in; 0 if it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _claim_number() -> tuple[int, int]:
    """Return a network number that no other test process uses, and the claim on it."""
    for number in random.SystemRandom().sample(range(1, 255), 254):
        held = claim(f"network-{number}")
        if held is not None:
            return number, held
    raise RuntimeError("all test networks are in use")


def _ip(*arguments: str) -> None:
    _run([_tool("ip"), *arguments])


def _run(command: Sequence[str]) -> None:
    done = run(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found
