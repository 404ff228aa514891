"""Make sure an etcd answers at the endpoint: use it, start it, or wait for who starts it.

Knows who may start it and how long to wait. Blocks; called before a group connects.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rdzv_etcd.embedded import lock
from rdzv_etcd.embedded.addresses import own_addresses
from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.launch import launch
from rdzv_etcd.embedded.probe import Answer, Found, probe
from rdzv_etcd.embedded.trust import check_owner, check_password, is_trusted, user_of
from rdzv_etcd.embedded.waiting import WARN_AFTER_S, WARN_AGAIN_S, why_nobody_answers
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Endpoint, Settings
from rdzv_etcd.settings.hosts import is_loopback

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_RETRY_START_S = 5.0


@dataclass(frozen=True, slots=True)
class StartedEtcd:
    """The etcd that this call started; it runs on when this process ends."""

    binary: Path
    supervisor_pid: int
    """SIGTERM to it ends etcd and removes its data."""


def ensure_etcd(settings: Settings, environ: Mapping[str, str] | None = None) -> StartedEtcd | None:
    """Return when an etcd answers at the endpoint; blocks for at most ``join_timeout_s``.

    If none answers and the endpoint names this machine, one is started; nodes on other machines,
    and those here that came second, wait for it. With credentials it lets nobody else in. Returns
    what was started, ``None`` if nothing had to be. Without ``embed`` it returns at once.

    Raises :class:`EmbeddedEtcdError` if etcd is not installed, does not start, belongs to another
    user of this machine, the port is taken by something else, or nobody started one in time;
    :class:`EtcdAuthError` if it does not know our password; :class:`SettingsError` if the
    connection is of a kind that cannot be embedded.
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
        self._began = time.monotonic()
        self._told = False
        self._next_warning = self._began + WARN_AFTER_S
        self._silent_since: float | None = None
        self._next_start = 0.0

    def run(self) -> StartedEtcd | None:
        deadline = self._began + self._settings.timing.join_timeout_s
        pause_s = 0.05
        while True:
            found = probe(self._endpoint, _PROBE_TIMEOUT_S)
            if found.answer is Answer.ETCD:
                self._accept()
                return None
            self._refuse_strangers(found.answer)
            if found.answer is Answer.NOTHING:
                started = self._start_if_ours(deadline)
                if started is not None:
                    return started
            if time.monotonic() > deadline:
                raise self._nobody_came(found)
            self._tell(found)
            time.sleep(pause_s)  # there is nobody yet who could announce the start
            pause_s = min(1.0, pause_s * 1.5)

    def _accept(self) -> None:
        """Raise unless what answers may be trusted with our workers."""
        check_owner(self._endpoint, own_addresses(self._endpoint.host))
        check_password(self._settings.connection, _PROBE_TIMEOUT_S)

    def _start_if_ours(self, deadline: float) -> StartedEtcd | None:
        """Start it if the endpoint is this machine's and nobody here does so already."""
        if time.monotonic() < self._next_start or self._is_kept():
            return None
        addresses = own_addresses(self._endpoint.host)
        if not addresses:
            return None
        self._next_start = time.monotonic() + _RETRY_START_S
        binary = find_binary(self._environ)
        status = launch(self._settings, binary, addresses, self._environ, deadline)
        if status["outcome"] == "failed":
            self._accept_other(status["detail"])
            return None
        if status["outcome"] == "taken":
            return None
        log.info(
            "started an embedded etcd %s (%s, supervisor pid %s) at %s; it stops by itself %g s "
            "after the last node has left",
            binary.version,
            binary.path,
            status["detail"],
            self._settings.connection,
            self._settings.embed_grace_s,
        )
        self._warn_of_islands()
        return StartedEtcd(binary.path, int(status["detail"]))

    def _warn_of_islands(self) -> None:
        most = self._settings.job.max_nodes
        if most > 1 and is_loopback(self._endpoint.host):
            log.warning(
                "started an etcd at %s, which no other machine can reach by that endpoint: if the "
                "%d nodes of job %r are not all on this machine, each machine now has an etcd of "
                "its own; name one of the machines in --rdzv-endpoint",
                self._settings.connection,
                most,
                self._settings.job_id,
            )

    def _accept_other(self, problem: str) -> None:
        """A failed start is none if somebody else's etcd took the port meanwhile."""
        answer = probe(self._endpoint, _PROBE_TIMEOUT_S).answer
        if answer is Answer.ETCD:
            return
        self._refuse_strangers(answer)
        raise EmbeddedEtcdError(
            f"the embedded etcd did not start at {self._settings.connection}: {problem}"
        )

    def _is_kept(self) -> bool:
        """Tell whether a supervisor of this machine holds the lock of the port."""
        keeper = lock.holder(self._endpoint.port)
        if keeper is None:
            return False
        if keeper.uid is not None and not is_trusted(keeper.uid):
            raise EmbeddedEtcdError(
                f"{user_of(keeper.uid)} holds port {self._endpoint.port} of this machine for an "
                f"embedded etcd (process {keeper.pid}): choose another port in --rdzv-endpoint"
            )
        return True

    def _refuse_strangers(self, answer: Answer) -> None:
        """Raise if what listens there is not etcd, or has been silent for too long."""
        where = self._settings.connection
        if answer is Answer.TLS:
            raise EmbeddedEtcdError(f"{where}: {answer.value}; write https:// in the endpoint")
        if answer is Answer.STRANGER:
            raise EmbeddedEtcdError(
                f"{where}: {answer.value}; free the port or choose another in --rdzv-endpoint"
            )
        if answer is not Answer.SILENCE or lock.holder(self._endpoint.port) is not None:
            self._silent_since = None
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        limit_s = self._settings.connection.connect_timeout_s
        if now - self._silent_since > limit_s:
            raise EmbeddedEtcdError(
                f"{where}: {answer.value} (waited {limit_s:g} s for etcd to answer)"
            )

    def _tell(self, found: Found) -> None:
        """Say once what is waited for; and after some seconds, now and then, why it takes long."""
        limit_s = self._settings.timing.join_timeout_s
        if not self._told:
            self._told = True
            log.info(
                "waiting up to %g s for the etcd at %s, which a node on the machine %s starts",
                limit_s,
                self._settings.connection,
                self._endpoint.host,
            )
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARN_AGAIN_S
            log.warning(
                "waiting %d s (of %g) for the etcd at %s: %s",
                now - self._began,
                limit_s,
                self._settings.connection,
                why_nobody_answers(self._endpoint, found),
            )

    def _nobody_came(self, found: Found) -> EmbeddedEtcdError:
        return EmbeddedEtcdError(
            f"no etcd answered at {self._settings.connection} within "
            f"{self._settings.timing.join_timeout_s:g} s: "
            f"{why_nobody_answers(self._endpoint, found)}"
        )


def _single_endpoint(settings: Settings) -> Endpoint:
    if settings.connection.tls is not None:
        raise SettingsError("embed=1 works over http only: an embedded etcd has no certificates")
    if len(settings.connection.endpoints) != 1:
        raise SettingsError(
            f"embed=1 needs exactly one endpoint, the machine to start etcd on; got "
            f"{settings.connection}"
        )
    endpoint = settings.connection.endpoints[0]
    secret = settings.connection.credentials is not None
    if secret and not (settings.connection.allow_plain_password or is_loopback(endpoint.host)):
        raise SettingsError(
            f"the etcd password would be sent to {settings.connection} in plain text, which "
            "anybody on the way can read; an embedded etcd has no TLS: set allow_plain_password=1 "
            "if that network is trusted"
        )
    return endpoint
