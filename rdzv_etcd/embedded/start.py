"""Make sure an etcd answers at the endpoint: use it, start it, or wait for who starts it.

Knows who may start it and how long to wait. Blocks; called before anything else of a join.
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
from dataclasses import dataclass
from pathlib import Path

from rdzv_etcd.embedded import supervisor
from rdzv_etcd.embedded.addresses import listen_urls, own_addresses
from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.probe import Answer, probe
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Endpoint, Settings

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_START_GRACE_S = 30.0
"""What the first node has at least between the start and its first lease."""
_RETRY_START_S = 5.0
_SECRETS = ("RDZV_ETCD_USER", "RDZV_ETCD_PASSWORD")


@dataclass(frozen=True, slots=True)
class StartedEtcd:
    """The etcd that this call started; it runs on when this process ends."""

    binary: Path
    supervisor_pid: int
    """SIGTERM to it ends etcd and removes its data."""


def ensure_etcd(settings: Settings, environ: Mapping[str, str] | None = None) -> StartedEtcd | None:
    """Return when an etcd answers at the endpoint; blocks for at most ``join_timeout_s``.

    If none answers and the endpoint names this machine, one is started; nodes on other machines,
    and those here that came second, wait for it. Returns what was started, ``None`` if nothing
    had to be. Without ``embed`` it returns at once.

    Raises :class:`EmbeddedEtcdError` if etcd is not installed, does not start, the port is taken
    by something else, or nobody started one in time; :class:`SettingsError` if the connection is
    of a kind that cannot be embedded.
    """
    if not settings.embed:
        return None
    environ = os.environ if environ is None else environ
    return _Ensure(settings, environ).run()


class _Ensure:
    """One call: what it has seen and done so far."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._endpoint = _single_endpoint(settings)
        self._told = False
        self._silent_since: float | None = None
        self._next_start = 0.0

    def run(self) -> StartedEtcd | None:
        deadline = time.monotonic() + self._settings.timing.join_timeout_s
        pause_s = 0.05
        while True:
            answer = probe(self._endpoint, _PROBE_TIMEOUT_S)
            if answer is Answer.ETCD:
                return None
            self._refuse_strangers(answer)
            if answer is Answer.NOTHING:
                started = self._start_if_ours(deadline)
                if started is not None:
                    return started
            if time.monotonic() > deadline:
                raise self._nobody_came(answer)
            self._tell_once()
            time.sleep(pause_s)  # there is nobody yet who could announce the start
            pause_s = min(1.0, pause_s * 1.5)

    def _start_if_ours(self, deadline: float) -> StartedEtcd | None:
        """Start it if the endpoint is this machine's and nobody here does so already."""
        if time.monotonic() < self._next_start or _is_kept(self._endpoint.port):
            return None
        addresses = own_addresses(self._endpoint.host)
        if not addresses:
            return None
        if self._settings.connection.credentials is not None:
            raise EmbeddedEtcdError(
                f"no etcd answers at {self._settings.connection}, and an embedded one has no "
                "users: unset RDZV_ETCD_USER and RDZV_ETCD_PASSWORD, or start an etcd yourself"
            )
        self._next_start = time.monotonic() + _RETRY_START_S
        binary = find_binary(self._environ)
        status = self._run_supervisor(binary, addresses, deadline)
        if status["outcome"] == "failed":
            self._accept_other(status["detail"])
            return None
        if status["outcome"] == "taken":
            return None
        log.info(
            "started an embedded etcd (%s, supervisor pid %s) at %s; it stops by itself %g s after "
            "the last node has left",
            binary,
            status["detail"],
            self._settings.connection,
            self._settings.embed_grace_s,
        )
        return StartedEtcd(binary, int(status["detail"]))

    def _run_supervisor(
        self, binary: Path, addresses: tuple[str, ...], deadline: float
    ) -> dict[str, str]:
        """Start the supervisor, detached, and return what it reports about etcd's start."""
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as status:
            try:
                subprocess.run(
                    self._supervisor_command(binary, addresses, write_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(write_fd,),
                    env={k: v for k, v in self._environ.items() if k not in _SECRETS},
                    start_new_session=True,  # a Ctrl-C for the agent is not for etcd
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise EmbeddedEtcdError(
                    f"the supervisor of an embedded etcd could not be started: {error}"
                ) from error
            finally:
                os.close(write_fd)
            waiter = select.poll()
            waiter.register(status, select.POLLIN)
            ready = waiter.poll(max(0.0, deadline - time.monotonic()) * 1000)
            line = status.readline() if ready else b""
        if not line:
            why = "ended without a word" if ready else "did not report in time"
            raise EmbeddedEtcdError(f"the supervisor of an embedded etcd ({binary}) {why}")
        report: dict[str, str] = json.loads(line)
        return report

    def _supervisor_command(
        self, binary: Path, addresses: tuple[str, ...], status_fd: int
    ) -> list[str]:
        grace_s = self._settings.embed_grace_s
        # -I and -S: no site packages, no PYTHON* variables; it needs the standard library only.
        command = [sys.executable, "-I", "-S", supervisor.__file__, "--binary", str(binary)]
        command += ["--host", addresses[0], "--port", str(self._endpoint.port)]
        for url in listen_urls(self._endpoint, addresses):
            command += ["--listen", url]
        command += ["--advertise", f"http://{self._endpoint.target}", "--grace", str(grace_s)]
        command += ["--start-grace", str(max(grace_s, _START_GRACE_S))]
        return [*command, "--status-fd", str(status_fd)]

    def _accept_other(self, problem: str) -> None:
        """A failed start is none if somebody else's etcd took the port meanwhile."""
        answer = probe(self._endpoint, _PROBE_TIMEOUT_S)
        if answer is Answer.ETCD:
            return
        self._refuse_strangers(answer)
        raise EmbeddedEtcdError(
            f"the embedded etcd did not start at {self._settings.connection}: {problem}"
        )

    def _refuse_strangers(self, answer: Answer) -> None:
        """Raise if what listens there is not etcd, or has been silent for too long."""
        where = self._settings.connection
        if answer is Answer.TLS:
            raise EmbeddedEtcdError(f"{where}: {answer.value}; write https:// in the endpoint")
        if answer is Answer.STRANGER:
            raise EmbeddedEtcdError(
                f"{where}: {answer.value}; free the port or choose another in --rdzv-endpoint"
            )
        if answer is not Answer.SILENCE or _is_kept(self._endpoint.port):
            self._silent_since = None
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        limit_s = self._settings.connection.connect_timeout_s
        if now - self._silent_since > limit_s:
            raise EmbeddedEtcdError(f"{where}: {answer.value} as etcd for {limit_s:g} s")

    def _tell_once(self) -> None:
        if not self._told:
            self._told = True
            log.info(
                "waiting up to %g s for the etcd at %s, which a node on the machine %s starts",
                self._settings.timing.join_timeout_s,
                self._settings.connection,
                self._endpoint.host,
            )

    def _nobody_came(self, answer: Answer) -> EmbeddedEtcdError:
        host = self._endpoint.host
        where = "this machine" if own_addresses(host) else "not this machine"
        return EmbeddedEtcdError(
            f"no etcd answered at {self._settings.connection} within "
            f"{self._settings.timing.join_timeout_s:g} s: {answer.value}. {host} is {where}; is a "
            "node running there with embed=1?"
        )


def _single_endpoint(settings: Settings) -> Endpoint:
    if settings.connection.tls is not None:
        raise SettingsError("embed=1 works over http only: an embedded etcd has no certificates")
    if len(settings.connection.endpoints) != 1:
        raise SettingsError(
            f"embed=1 needs exactly one endpoint, the machine to start etcd on; got "
            f"{settings.connection}"
        )
    return settings.connection.endpoints[0]


def _is_kept(port: int) -> bool:
    """Tell whether a supervisor of this machine holds the lock of that port."""
    # Connecting a datagram socket asks without taking: binding would itself hold the lock briefly.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as question:
        try:
            question.connect(supervisor.lock_name(port))
        except OSError:
            return False
    return True
