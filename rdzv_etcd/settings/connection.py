"""How to reach one etcd cluster: endpoints, TLS, user, time limits. Frozen; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.fields import Kind, check_numbers, option


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member's client address."""

    host: str
    port: int = 2379

    @property
    def target(self) -> str:
        """``host:port`` for URLs, of which gRPC's targets are a kind: an IPv6 address in brackets,
        and ``%25`` before its zone (RFC 6874)."""
        host = self.host.replace("%", "%25")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS towards etcd. Without ``ca_cert`` the system's roots are trusted."""

    ca_cert: Path | None = option(
        "ca_cert",
        Kind.FILE,
        "CA certificates (PEM) that etcd's certificate is checked against.",
        default=None,
        shown="the system's roots",
        aliases=("cacert",),
    )
    cert: Path | None = option(
        "cert",
        Kind.FILE,
        "Client certificate (PEM); may contain its key as well.",
        default=None,
        shown="none",
        aliases=("ssl_cert",),
    )
    key: Path | None = option(
        "key",
        Kind.FILE,
        "Key of the client certificate (PEM).",
        default=None,
        shown="in `cert`",
        aliases=("ssl_cert_key",),
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password; kept out of ``repr`` so that they stay out of logs."""

    user: str
    password: str = field(repr=False)
    user_file: Path | None = option(
        "user_file",
        Kind.FILE,
        "File that holds the etcd user's name; read again whenever a token is renewed.",
        default=None,
        shown="`$RDZV_ETCD_USER`",
        compare=False,
    )
    password_file: Path | None = option(
        "password_file",
        Kind.FILE,
        "File that holds the etcd user's password; read again whenever a token is renewed.",
        default=None,
        shown="`$RDZV_ETCD_PASSWORD`",
        compare=False,
    )


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one etcd cluster."""

    endpoints: tuple[Endpoint, ...] = (Endpoint("localhost"),)
    tls: Tls | None = None
    """``None``: plain http."""
    credentials: Credentials | None = None
    request_timeout_s: float = option(
        "request_timeout",
        Kind.SECONDS,
        "Bounds one request to etcd with its retries.",
        default=60.0,
        aliases=("read_timeout",),
    )
    connect_timeout_s: float = option(
        "connect_timeout",
        Kind.SECONDS,
        "Bounds the very first contact with etcd, so that a wrong endpoint is reported quickly.",
        default=10.0,
    )
    allow_plain_password: bool = option(
        "allow_plain_password",
        Kind.FLAG,
        "Send the password over plain http to an etcd on another machine, too; otherwise that is "
        "refused.",
        default=False,
    )

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise SettingsError(
                "no etcd endpoint was given (--rdzv-endpoint host:2379[,host:2379])"
            )
        check_numbers(self)

    def __str__(self) -> str:
        scheme = "https" if self.tls is not None else "http"
        return ",".join(f"{scheme}://{endpoint.target}" for endpoint in self.endpoints)
