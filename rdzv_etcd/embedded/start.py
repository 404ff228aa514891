"""Make sure an etcd answers at the endpoint: use it, start it, or wait for the node that starts it.

Knows who may start it and how long to wait. Blocks; called before a group connects.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rdzv_etcd.embedded.binary import BINARY_VARIABLE, Binary, find_binary
from rdzv_etcd.embedded.child import Login, Plan
from rdzv_etcd.embedded.port import (
    Found,
    PortAnswer,
    check_closed,
    check_owner,
    listen_urls,
    listeners,
    own_addresses,
    probe,
    reached_by,
)
from rdzv_etcd.embedded.program import is_locked
from rdzv_etcd.embedded.supervisor import Order
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.log import LineTimes
from rdzv_etcd.settings import Endpoint, Settings
from rdzv_etcd.settings.hosts import is_loopback, resolve

log = logging.getLogger(__name__)

STALE_AFTER_S = 600.0
"""A lease that no node has renewed for so long keeps no etcd, unless nodes' last as long."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_PROBE_TIMEOUT_S = 2.0
_RETRY_START_S = 5.0
_START_GRACE_S = 30.0
"""What the first node has at least between the start and its first lease."""
_NOT_FOR_ETCD = ("RDZV_ETCD_USER", "RDZV_ETCD_PASSWORD", "RDZV_ETCD_NODE_ID")
"""Secrets, and what a guard knows an agent's workers by: etcd is none of them."""
# -I and -S: no site packages, no PYTHON* variables; it needs this package and the standard library.
_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from rdzv_etcd.embedded.supervisor import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True)
class StartedEtcd:
    """The etcd that this call started; it runs on when this process ends."""

    binary: Path
    supervisor_pid: int
    """SIGTERM to it ends etcd and removes its data."""


def ensure_etcd(settings: Settings, environ: Mapping[str, str] | None = None) -> StartedEtcd | None:
    """Return when an etcd answers at the endpoint; blocks for at most ``join_timeout_s``.

    If none answers and the endpoint names this machine, one is started; nodes on other machines,
    and those here that came second, wait for it. With credentials it requires them of all clients.
    Returns what was started, ``None`` if nothing had to be. Without ``embed`` it returns at once.

    Raises :class:`EmbeddedEtcdError` if etcd is not installed, does not start, belongs to another
    user of this machine, requires no password although we have one, the port is taken by something
    else, or no node started one in time; :class:`SettingsError` if the connection is of a
    kind that cannot be embedded.
    """
    if not settings.embed:
        return None
    environ = os.environ if environ is None else environ
    endpoint, where = _single_endpoint(settings), str(settings.connection)
    limit_s = settings.timing.join_timeout_s
    began_s, lines = time.monotonic(), LineTimes()
    silent_since_s, next_start_s, pause_s = None, began_s, _FIRST_PAUSE_S
    while True:
        found, now_s = probe(endpoint, _PROBE_TIMEOUT_S), time.monotonic()
        if found.answer is PortAnswer.ETCD:
            check_owner(endpoint, own_addresses(endpoint.host))
            check_closed(settings.connection, _PROBE_TIMEOUT_S)
            return None
        _refuse_strangers(where, found.answer)
        if found.answer is not PortAnswer.SILENCE or is_locked(endpoint.port):
            silent_since_s = None
        elif silent_since_s is None:
            silent_since_s = now_s
        elif now_s - silent_since_s > settings.connection.connect_timeout_s:
            raise EmbeddedEtcdError(
                f"{where}: {found.answer.value} (waited "
                f"{settings.connection.connect_timeout_s:g} s for etcd to answer)"
            )
        if found.answer is PortAnswer.NOTHING and now_s >= next_start_s:
            addresses = () if is_locked(endpoint.port) else own_addresses(endpoint.host)
            if addresses:
                next_start_s = now_s + _RETRY_START_S
                started = _start(settings, addresses, environ, began_s + limit_s)
                if started is not None:
                    return started
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            raise EmbeddedEtcdError(
                f"no etcd answered at {where} within {limit_s:g} s: "
                f"{_why_none_answers(endpoint, found)}"
            )
        if pause_s == _FIRST_PAUSE_S:
            log.info(
                "waiting up to %g s for the etcd at %s, which a node on the machine %s starts",
                limit_s,
                where,
                endpoint.host,
            )
        if lines.is_due(waited_s):
            log.warning(
                "waiting %d s (of %g) for the etcd at %s: %s",
                waited_s,
                limit_s,
                where,
                _why_none_answers(endpoint, found),
            )
        time.sleep(pause_s)  # there is no process yet that could announce the start
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _start(
    settings: Settings,
    addresses: tuple[str, ...],
    environ: Mapping[str, str],
    deadline_s: float,
) -> StartedEtcd | None:
    """Start it at this machine's ``addresses``; return ``None`` if another process has meanwhile,
    or is about to."""
    endpoint, where = settings.connection.endpoints[0], str(settings.connection)
    binary = find_binary(environ)
    report = launch(settings, binary, addresses, environ, deadline_s)
    if report["outcome"] == "failed":
        answer = probe(endpoint, _PROBE_TIMEOUT_S).answer
        if answer is PortAnswer.ETCD:
            return None
        _refuse_strangers(where, answer)
        raise EmbeddedEtcdError(f"the embedded etcd did not start at {where}: {report['detail']}")
    if report["outcome"] == "taken":
        return None
    log.info(
        "started an embedded etcd %s (%s, supervisor pid %s) at %s; it stops by itself %g s "
        "after the last node has left",
        binary.version,
        binary.path,
        report["detail"],
        where,
        settings.embed_grace_s,
    )
    most = settings.job.max_nodes
    if most > 1 and is_loopback(endpoint.host):
        log.warning(
            "started an etcd at %s, which no other machine can reach by that endpoint: if the "
            "%d nodes of job %r are not all on this machine, each machine now has an etcd of "
            "its own; name one of the machines in --rdzv-endpoint",
            where,
            most,
            settings.job_id,
        )
    return StartedEtcd(binary.path, int(report["detail"]))


def _refuse_strangers(where: str, answer: PortAnswer) -> None:
    """Raise if what listens there is no etcd that can be used."""
    if answer is PortAnswer.TLS:
        raise EmbeddedEtcdError(f"{where}: {answer.value}; write https:// in the endpoint")
    if answer is PortAnswer.STRANGER:
        raise EmbeddedEtcdError(
            f"{where}: {answer.value}; free the port or choose another in --rdzv-endpoint"
        )


def _single_endpoint(settings: Settings) -> Endpoint:
    connection = settings.connection
    if connection.tls is not None:
        raise SettingsError("embed=1 works over http only: an embedded etcd has no certificates")
    if len(connection.endpoints) != 1:
        raise SettingsError(
            f"embed=1 needs exactly one endpoint, the machine to start etcd on; got {connection}"
        )
    endpoint = connection.endpoints[0]
    is_secret = connection.credentials is not None
    if is_secret and not (connection.allow_plain_password or is_loopback(endpoint.host)):
        raise SettingsError(
            f"the etcd password would be sent to {connection} in plain text, which any machine on "
            "the way can read; an embedded etcd has no TLS: set allow_plain_password=1 if that "
            "network is trusted"
        )
    return endpoint


def _why_none_answers(endpoint: Endpoint, found: Found) -> str:
    """Return the cause, as far as this machine can tell, and what to do. Blocks for a look-up."""
    own = own_addresses(endpoint.host)
    if own:
        return _why_none_answers_here(endpoint, found, own)
    addresses = resolve(endpoint.host)
    if not addresses:
        return (
            f"{found.answer.value}: {endpoint.host} cannot be resolved on this machine; is it "
            "spelt right in --rdzv-endpoint?"
        )
    detail = f" ({found.detail})" if found.detail else ""
    if endpoint.host not in addresses:
        detail = f" at {', '.join(addresses)}{detail}"
    return (
        f"{found.answer.value}{detail}. {endpoint.host} is not this machine "
        f"({socket.gethostname()}); is that right, and is a node running there with embed=1?"
    )


def _why_none_answers_here(endpoint: Endpoint, found: Found, own: tuple[str, ...]) -> str:
    if not is_locked(endpoint.port):
        return f"{found.answer.value}. {endpoint.host} is this machine; it will be tried again"
    elsewhere = [
        listener.address
        for listener in listeners(endpoint.port)
        if not any(reached_by(listener, address) for address in own)
    ]
    if elsewhere and found.answer is PortAnswer.NOTHING:
        return (
            "another process keeps an embedded etcd on this port that listens only on "
            f"{', '.join(elsewhere)}; give every node the same --rdzv-endpoint"
        )
    return (
        f"{found.answer.value}; another process of this machine is starting it (the supervisor of "
        f"an embedded etcd, or `rdzv-etcd serve`, for port {endpoint.port})"
    )


# --- the supervisor -------------------------------------------------------------------------------


def launch(
    settings: Settings,
    binary: Binary,
    addresses: tuple[str, ...],
    environ: Mapping[str, str],
    deadline: float,
    *,
    stale_after_s: float = STALE_AFTER_S,
) -> dict[str, str]:
    """Start the supervisor, detached, and return its report: ``outcome`` (started, taken, failed)
    and ``detail``.

    Blocks until etcd serves, or to ``deadline`` (monotonic seconds). Raises
    :class:`EmbeddedEtcdError` if there is no report.
    """
    endpoint, grace_s = settings.connection.endpoints[0], settings.embed_grace_s
    read_fd, write_fd = os.pipe()
    credentials = settings.connection.credentials
    login = None if credentials is None else Login(credentials.user, credentials.password)
    listen, advertise = listen_urls(endpoint, addresses), f"http://{endpoint.target}"
    order = Order(
        Plan(str(binary.path), listen, advertise, login),
        port=endpoint.port,
        grace_s=grace_s,
        start_grace_s=max(grace_s, _START_GRACE_S),
        stale_after_s=max(stale_after_s, settings.timing.lease_ttl_s),
        status_fd=write_fd,
    )
    command = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(Path(__file__).parents[2])]
    command.append(str(endpoint.port))  # for people who look at a list of processes
    with os.fdopen(read_fd, "rb") as status:
        try:
            subprocess.run(
                command,
                input=json.dumps(asdict(order)).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env={k: v for k, v in environ.items() if k not in _NOT_FOR_ETCD},
                start_new_session=True,  # a Ctrl-C for the agent is not for etcd
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedEtcdError(
                f"the supervisor of an embedded etcd could not be started: {error}"
            ) from error
        finally:
            os.close(write_fd)
        report: dict[str, str] = json.loads(_line(status, binary, deadline))
    return report


def _line(status: IO[bytes], binary: Binary, deadline: float) -> bytes:
    """Wait for the report; log now and then that it takes long."""
    waiter = select.poll()
    waiter.register(status, select.POLLIN)
    began, lines = time.monotonic(), LineTimes()
    while not waiter.poll(1000 * max(0.0, min(began + lines.next_s, deadline) - time.monotonic())):
        now = time.monotonic()
        if now >= deadline:
            raise EmbeddedEtcdError(
                f"the embedded etcd that was started ({binary.path}) did not answer in time"
            )
        if lines.is_due(now - began):
            log.warning(
                "waiting %.0f s (of %.0f) for the embedded etcd that this node has started (%s); "
                "if it never comes up, name another in %s",
                now - began,
                deadline - began,
                binary.path,
                BINARY_VARIABLE,
            )
    line = status.readline()
    if not line:
        raise EmbeddedEtcdError(
            f"the supervisor of an embedded etcd ({binary.path}) ended without a report"
        )
    return line
