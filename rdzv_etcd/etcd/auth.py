"""How this client proves its identity to etcd: its user's token, and its TLS files.

Knows user, password and token, PEM files, and where systems keep their root certificates. Must not
know endpoints, nor which calls need a token. Files are read again for every token and connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdTlsError, SettingsError
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.channel import Metadata, Server
from rdzv_etcd.etcd.errors import AttemptError, Fault, Verdict, judge, unavailable
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.process import begun_in_thread
from rdzv_etcd.settings.connection import Credentials, Tls
from rdzv_etcd.settings.secrets import read_again, read_file

_log = logging.getLogger("rdzv_etcd")

# Refuses the call at once on a member without a leader, instead of letting it wait there.
# Source: etcd's MetadataRequireLeaderKey
REQUIRE_LEADER: Metadata = (("hasleader", "true"),)
# Where distributions keep their bundle when OpenSSL's compiled-in path does not exist here (as in
# relocatable Python builds). Source: Go's crypto/x509/root_linux.go
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_LARGEST = 1 << 24
"""Bytes; what systems trust is a hundredth of it."""

_READ_LIMIT_S = 0.5
"""How long a token or a connection waits for the files that it is made with."""
_HANGS = f"their file system does not answer within {_READ_LIMIT_S:g} s"

T = TypeVar("T")
_Version = tuple[tuple[int, int, int] | None, ...]


class Rotated(Generic[T]):
    """What is in files, which may be replaced, on a file system that may hang: they are read again
    in a thread, as the event loop keeps leases meanwhile. What cannot be read is kept as it was."""

    def __init__(self, read: Callable[[T], T], first: T, kept: str, clock: Clock) -> None:
        """``read`` is given what was read before. ``kept`` begins the warnings, one per cause."""
        self.current = first
        self._read, self._kept, self._clock = read, kept, clock
        self._reading: Future[T] | None = None
        self._told = ""

    async def latest(self) -> T:
        """Return what the files contain now, or what they did, within half a second."""
        if self._told == _HANGS and self._reading is not None and not self._reading.done():
            return self.current
        why = ""
        try:
            await self._clock.wait_for(self._read_again(), _READ_LIMIT_S)
        except (SettingsError, EtcdTlsError) as error:
            why = str(error)
        except TimeoutError:
            why = _HANGS
        except (OSError, RuntimeError) as error:  # there are too many files or threads
            why = str(error)
        if why and why != self._told:
            _log.warning("%s: %s", self._kept, why)
        self._told = why
        return self.current

    async def _read_again(self) -> None:
        old = self._reading
        if old is not None:
            # It began before this call, and may not have found what is there now.
            with contextlib.suppress(SettingsError, EtcdTlsError, OSError):
                self.current = await asyncio.wrap_future(old)
        if self._reading is old:  # otherwise another call has begun a new one meanwhile
            read = partial(self._read, self.current)
            self._reading = begun_in_thread(read, "rdzv-etcd secret")
        self.current = await asyncio.wrap_future(cast("Future[T]", self._reading))


class Authenticator:
    """One user's token. Without credentials every call goes out without one."""

    def __init__(self, credentials: Credentials | None, clock: Clock) -> None:
        kept = "logging in to etcd with the user and password that were read before"
        self._credentials = (
            None if credentials is None else Rotated(read_again, credentials, kept, clock)
        )
        self._clock = clock
        self._metadata = REQUIRE_LEADER if credentials is None else None
        self._renewal = asyncio.Lock()

    @property
    def can_renew(self) -> bool:
        return self._credentials is not None

    @property
    def user(self) -> str | None:
        return None if self._credentials is None else self._credentials.current.user

    @property
    def current(self) -> Metadata | None:
        """The metadata for a call; ``None`` if a token must be requested first."""
        return self._metadata

    async def metadata(self, server: Server, limit_s: float) -> Metadata:
        """Return the metadata for a call, authenticating at ``server`` first if need be.

        Raises :class:`AttemptError` if that fails; the call was not sent then.
        """
        if self._metadata is not None:
            return self._metadata
        try:
            return await self._clock.wait_for(self._renewed(server, limit_s), limit_s)
        except TimeoutError:
            fault = unavailable(Verdict.NOT_DONE, "authentication got no answer in time")
            raise AttemptError(fault, server.name) from None

    def refuse(self, used: Metadata) -> None:
        """Forget the token in ``used``, unless it has been renewed since."""
        if self._metadata is used and self.can_renew:
            self._metadata = None

    async def _renewed(self, server: Server, limit_s: float) -> Metadata:
        async with self._renewal:
            if self._metadata is None:
                credentials = await cast("Rotated[Credentials]", self._credentials).latest()
                self._metadata = await self._authenticate(credentials, server, limit_s)
            return self._metadata

    async def _authenticate(
        self, credentials: Credentials, server: Server, limit_s: float
    ) -> Metadata:
        request = messages.load().AuthenticateRequest(
            name=credentials.user, password=credentials.password
        )
        try:
            response = await server.unary(
                "Authenticate", request, timeout_s=limit_s, metadata=REQUIRE_LEADER
            )
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                # As in etcd's own client: credentials do no harm where none are needed.
                return REQUIRE_LEADER
            fault = judge(error, authenticated=True)
            if fault.verdict is Verdict.UNKNOWN:  # of the token, not of the call that needs it
                fault = Fault(Verdict.NOT_DONE, f"authenticating: {fault.reason}", fault.error)
            elif fault.verdict is Verdict.STALE_TOKEN:
                fault = Fault(Verdict.FINAL, fault.reason, fault.error)
            raise AttemptError(fault, server.name) from error
        return (*REQUIRE_LEADER, ("token", response.token))


class TlsFiles:
    """Credentials that follow their files: what was rotated on disk serves the next connection.

    Making one reads them, and raises what :func:`channel_credentials` raises.
    """

    def __init__(self, tls: Tls, clock: Clock) -> None:
        def read(before: tuple[_Version, grpc.ChannelCredentials]) -> tuple[_Version, Any]:
            version = _version(tls)
            return before if version == before[0] else (version, channel_credentials(tls))

        first = _version(tls), channel_credentials(tls)
        self._files = Rotated(read, first, "TLS still uses the files as they were before", clock)

    @property
    def current(self) -> grpc.ChannelCredentials:
        return self._files.current[1]

    async def latest(self) -> grpc.ChannelCredentials:
        """Return the same object until the files change, to some that can be used."""
        return (await self._files.latest())[1]


def _version(tls: Tls) -> _Version:
    """Distinguish versions of the files. Kubernetes replaces a folder's link, others rename."""
    return tuple(
        _file_version(path) for path in (tls.ca_cert, tls.cert, tls.key) if path is not None
    )


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return credentials for a secure channel.

    Raises :class:`EtcdTlsError` naming the file that is missing, is not PEM or does not match, and
    :class:`SettingsError` for a key without a certificate.
    """
    roots = system_roots() if tls.ca_cert is None else _read_ca(tls.ca_cert)
    if tls.cert is None:
        if tls.key is not None:
            raise SettingsError(
                f"a client key ({tls.key}) was given without its certificate (cert)"
            )
        return grpc.ssl_channel_credentials(root_certificates=roots)
    chain, key = _read_pair(tls.cert, tls.key)
    return grpc.ssl_channel_credentials(
        root_certificates=roots, private_key=key, certificate_chain=chain
    )


def system_roots() -> bytes | None:
    """Return the system's root certificates as PEM; ``None``: none found, gRPC uses its own.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` are honoured, as OpenSSL does.
    """
    paths = ssl.get_default_verify_paths()
    for candidate in (paths.cafile, *_BUNDLES):
        if candidate is not None and Path(candidate).is_file():
            return Path(candidate).read_bytes()
    if paths.capath is not None:
        parts = [file.read_bytes() for file in sorted(Path(paths.capath).glob("*.[0-9]"))]
        return b"\n".join(parts) or None
    return None


def _read(path: Path, what: str) -> bytes:
    try:
        return read_file(path, f"the {what} {path}", _LARGEST)
    except SettingsError as error:
        raise EtcdTlsError(str(error)) from error
    except OSError as error:
        raise EtcdTlsError(f"cannot read the {what} {path}: {error.strerror}") from error


def _read_ca(path: Path) -> bytes:
    content = _read(path, "CA certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Only ASCII is taken; comments between the certificates may be in any encoding.
    text = content.decode("ascii", errors="replace").replace("\ufffd", "?")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise EtcdTlsError(
            f"the CA certificate {path} is not a PEM certificate ({_reason(error)})"
        ) from error
    return content


def _read_pair(cert: Path, key: Path | None) -> tuple[bytes, bytes]:
    chain = _read(cert, "client certificate")
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        raise EtcdTlsError(f"the client certificate {cert} is not a PEM certificate")
    key_path = cert if key is None else key
    key_content = _read(key_path, "client key")
    if b"PRIVATE KEY-----" not in key_content:
        missing = "; set key, or append the key to it" if key is None else ""
        raise EtcdTlsError(f"{key_path} contains no PEM private key{missing}")
    if b"ENCRYPTED" in key_content:
        _refuse_encrypted(key_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(cert, key_path, password=lambda: _refuse_encrypted(key_path))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise EtcdTlsError(
                f"the client key {key_path} does not belong to the certificate {cert}"
            ) from error
        raise EtcdTlsError(
            f"the client certificate {cert} or key {key_path} is unusable ({_reason(error)})"
        ) from error
    return chain, key_content


def _refuse_encrypted(path: Path) -> NoReturn:
    raise EtcdTlsError(f"the client key {path} is encrypted; only unencrypted keys can be used")


def _reason(error: ssl.SSLError | ValueError) -> str:
    return getattr(error, "reason", None) or str(error)
