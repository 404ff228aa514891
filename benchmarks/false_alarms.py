"""``false-alarms``: disturbances in which nobody is lost, during a real training: it must go on.

torchrun agents, each on a host of its own (a network namespace), one gloo worker each that steps
all the time; every setting is the default, except what ``--conf`` says. Needs root and iptables.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import disturbances, options, results
from benchmarks.disturbances import Heal, Site
from benchmarks.environment import describe
from benchmarks.etcd_server import choose_binary, running_etcd
from benchmarks.jobs import JobError, JobOptions, Place, TracedJob
from benchmarks.options import UnusableError
from benchmarks.recording import recording
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.netns import Network

NAME = "false-alarms"
START_LIMIT_S = 180.0
_ACCUSED = re.compile(r"its process exited|its host is silent")


@dataclass(frozen=True)
class Row:
    """One kind of disturbance, again and again."""

    text: str
    hurt: Callable[[Site], Heal] = disturbances.nothing
    lasts_s: float = 10.0
    pause_s: float = 10.0
    launcher: str = "benchmarks.traced_torchrun"


ROWS = {
    "nothing": Row("nothing at all"),
    "stopped": Row("SIGSTOP of each agent in turn, 5 s", disturbances.stop_an_agent, 5.0),
    "slow": Row(
        "300 ms and 5 % loss to etcd, 5 % between the hosts", disturbances.slow_network, 120.0
    ),
    "cut": Row("links cut, etcd reachable", disturbances.cut_links),
    "one-way": Row("links cut in one direction", disturbances.cut_links_one_way),
    "rejected": Row("a firewall resets a living node's links", disturbances.reject_links),
    "reset": Row("a middlebox resets idle links", disturbances.reset_open_links),
    "all-reset": Row("all links reset at once", disturbances.reset_all_links),
    "mute": Row("a proxy accepts for a living node", disturbances.mute_proxy),
    "taken": Row("another node answers at its port", disturbances.another_answers),
    "etcd-away": Row("etcd away, and all links reset", disturbances.etcd_away, 8.0),
    "forked": Row("forked children hold the sockets", launcher="benchmarks.forking_torchrun"),
    "busy": Row("8 busy loops per core", disturbances.busy_cores, 120.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=options.names(*ROWS), default=list(ROWS), help="which disturbances"
    )
    parser.add_argument("--agents", type=options.count, default=3, help="each on a host of its own")
    parser.add_argument("--seconds", type=options.count, default=600, help="of training per row")
    parser.add_argument("--conf", default="", help="for --rdzv-conf, such as peer_links=0")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    why_not = netns.why_not() or ("" if shutil.which("iptables") else "iptables is not installed")
    if why_not:
        raise UnusableError(why_not)
    environment = describe(
        etcd_version=choose_binary(args.etcd).version, data=args.data, fsync=args.fsync
    )
    if args.plot is not None:
        raise UnusableError("there is nothing to plot")
    with recording(args, NAME, environment, len(args.rows)) as record:
        for name in args.rows:
            sample: dict[str, Any] = {"row": name, "seconds": args.seconds, "agents": args.agents}
            try:
                sample.update(_measure(ROWS[name], args))
            except JobError as error:
                sample["failed"] = results.failure(error)
            record.add(name, sample)
    return record.document


def _measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    with _site(row, args) as site:
        job = site.job
        job.await_steps(site.agents, after_s=0.0, limit_s=START_LIMIT_S, steps=20)
        began_s = time.monotonic()
        times = _disturb(site, row, began_s + args.seconds)
        job.await_steps(site.agents, after_s=0.0, limit_s=START_LIMIT_S)
        ended_s = time.monotonic()
        notes = [note for agent in site.agents for note in agent.notes()]
        pauses = []
        for agent in site.agents:
            steps = [n.time_s for n in agent.notes() if n.event == "step" and n.time_s > began_s]
            pauses += [later - earlier for earlier, later in itertools.pairwise([*steps, ended_s])]
        return {
            "disturbances": times,
            "restarts": sum(n.event == "stop_begin" and n.time_s > began_s for n in notes),
            "accusations": sum(len(_ACCUSED.findall(agent.output)) for agent in site.agents),
            "longest_step_s": max(pauses),
        }


def _disturb(site: Site, row: Row, until_s: float) -> int:
    """Hurt and heal in turn; return how often."""
    times = 0
    while time.monotonic() < until_s:
        heal = row.hurt(site)
        times += 1
        try:
            _pass(site, min(row.lasts_s, until_s - time.monotonic()))
        finally:
            heal()
        _pass(site, row.pause_s)
    return times


def _pass(site: Site, seconds: float) -> None:
    """Let the training go on for a while. Raises :class:`JobError` if an agent ends."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        site.job.fail_if_one_ended()
        time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))


@contextlib.contextmanager
def _site(row: Row, args: argparse.Namespace) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-job-")))
        network = Network(folder)
        stack.callback(network.close)
        etcd = stack.enter_context(
            running_etcd(choose_binary(args.etcd), args.data, fsync=args.fsync)
        )
        host, _, port = etcd.target.rpartition(":")
        bridge = stack.enter_context(FaultBridge((host, int(port)), host=network.gateway))
        mute = stack.enter_context(socket.create_server((network.gateway, 0), backlog=1024))
        conf = dict(part.split("=", 1) for part in filter(None, args.conf.split(",")))
        nnodes = f"{args.agents - 1}:{args.agents}" if args.agents > 1 else "1"
        job = stack.enter_context(
            TracedJob(
                JobOptions("etcd3", bridge.target, nnodes, conf=conf, launcher=row.launcher), folder
            )
        )
        hosts = {}
        for number in range(args.agents):
            at = network.add_host()
            agent = job.start(
                f"node{number}",
                place=Place(at.address, at.enter),
                env={"GLOO_SOCKET_IFNAME": netns.DEVICE, "LOGLEVEL": "INFO"},
            )
            hosts[agent] = at
        yield Site(job, hosts, etcd, bridge, mute.getsockname()[:2])
