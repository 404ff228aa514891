"""Holds the authentication token and renews it, one renewal at a time.

Knows user, password and token. Must not know which calls need it. Files that user and password
came from are read again for every token, which blocks briefly.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.channel import Metadata, Server
from rdzv_etcd.etcd.errors import AttemptError, Fault, Verdict, judge, unavailable
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.settings.connection import Credentials
from rdzv_etcd.settings.secrets import read_again

_log = logging.getLogger("rdzv_etcd")

# Refuses the call at once on a member without a leader, instead of letting it wait there.
# Source: etcd's MetadataRequireLeaderKey
REQUIRE_LEADER: Metadata = (("hasleader", "true"),)


class Authenticator:
    """One user's token. Without credentials every call goes out without one."""

    def __init__(self, credentials: Credentials | None, clock: Clock) -> None:
        self._credentials = credentials
        self._clock = clock
        self._metadata = REQUIRE_LEADER if credentials is None else None
        self._renewal = asyncio.Lock()

    @property
    def can_renew(self) -> bool:
        return self._credentials is not None

    @property
    def user(self) -> str | None:
        return None if self._credentials is None else self._credentials.user

    @property
    def current(self) -> Metadata | None:
        """The metadata for a call; ``None`` if a token has to be got first."""
        return self._metadata

    async def metadata(self, server: Server, limit_s: float) -> Metadata:
        """Return the metadata for a call, authenticating at ``server`` first if need be.

        Raises :class:`AttemptError` if that fails; whatever its cause, the call was not sent.
        """
        if self._metadata is not None:
            return self._metadata
        try:
            return await self._clock.wait_for(self._renewed(server, limit_s), limit_s)
        except TimeoutError:
            fault = unavailable(Verdict.NOT_SENT, "authentication got no answer in time")
            raise AttemptError(fault, server.name) from None

    def refuse(self, used: Metadata) -> None:
        """Forget the token in ``used``, unless it has been renewed since."""
        if self._metadata is used and self.can_renew:
            self._metadata = None

    async def _renewed(self, server: Server, limit_s: float) -> Metadata:
        async with self._renewal:
            if self._metadata is None:
                self._metadata = await self._authenticate(server, limit_s)
            return self._metadata

    def _read_again(self) -> Credentials:
        """Return user and password as they are now; those of before if they cannot be read."""
        try:
            self._credentials = read_again(cast(Credentials, self._credentials))
        except SettingsError as error:
            _log.warning(
                "logging in to etcd with the user and password that were read before: %s", error
            )
        return cast(Credentials, self._credentials)

    async def _authenticate(self, server: Server, limit_s: float) -> Metadata:
        credentials = self._read_again()
        request = messages.load().AuthenticateRequest(
            name=credentials.user, password=credentials.password
        )
        try:
            response = await server.unary(
                "Authenticate", request, timeout_s=limit_s, metadata=REQUIRE_LEADER
            )
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                # As etcd's own client does: credentials do no harm where none are needed.
                return REQUIRE_LEADER
            fault = judge(error, authenticated=True)
            if fault.verdict is Verdict.UNKNOWN:  # of the token, not of the call that needs it
                fault = Fault(Verdict.NOT_SENT, f"authenticating: {fault.reason}", fault.error)
            elif fault.verdict is Verdict.STALE_TOKEN:
                fault = Fault(Verdict.FINAL, fault.reason, fault.error)
            raise AttemptError(fault, server.name) from error
        return (*REQUIRE_LEADER, ("token", response.token))
