"""How to reach one etcd cluster: endpoints, TLS, user, time limits. Frozen; no I/O.

What may stand behind ``--rdzv-endpoint``:

host                  port 2379; an international name is taken in its xn-- form
h1:2379,h2:2379       several members of one etcd cluster
https://h1,https://h2 TLS; one scheme for all
[2001:db8::1]:2379    an IPv6 address, always in brackets
[fe80::1%eth0]:2379   a link-local one, with its zone; in URLs %25eth0 is the same
(nothing)             localhost:2379
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.fields import OptionKind, check_numbers, option
from rdzv_etcd.text import named

DEFAULT_PORT = 2379
_OPTION = "--rdzv-endpoint"


class Scheme(str, Enum):
    """How etcd is spoken to."""

    HTTP = "http"
    HTTPS = "https"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member's client address."""

    host: str
    port: int = DEFAULT_PORT

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
        OptionKind.FILE,
        "CA certificates (PEM) that etcd's certificate is checked against.",
        default=None,
        shown="the system's roots",
        aliases=("cacert",),
    )
    cert: Path | None = option(
        "cert",
        OptionKind.FILE,
        "Client certificate (PEM); may contain its key as well.",
        default=None,
        aliases=("ssl_cert",),
    )
    key: Path | None = option(
        "key",
        OptionKind.FILE,
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
        OptionKind.FILE,
        "File that holds the etcd user's name; read again whenever a token is renewed.",
        default=None,
        shown="`$RDZV_ETCD_USER`",
        compare=False,
    )
    password_file: Path | None = option(
        "password_file",
        OptionKind.FILE,
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
        OptionKind.SECONDS,
        "Time limit for one request to etcd with its retries.",
        default=60.0,
        aliases=("read_timeout",),
    )
    connect_timeout_s: float = option(
        "connect_timeout",
        OptionKind.SECONDS,
        "Time limit for the very first contact with etcd, so that a wrong endpoint is reported "
        "quickly.",
        default=10.0,
    )
    allow_plain_password: bool = option(
        "allow_plain_password",
        OptionKind.FLAG,
        "Send the password over plain http also to an etcd on another machine; otherwise that is "
        "refused.",
        default=False,
    )
    secret: str | None = field(default=None, repr=False)
    """That of an embedded etcd; ``tls`` is made from it."""
    secret_file: Path | None = option(
        "embed_secret_file",
        OptionKind.FILE,
        "File that holds the secret of an [embedded etcd](guide.md#the-secret), at least 16 "
        "characters, the same on all hosts: certificates for all of its traffic are made from it.",
        default=None,
        shown="`$RDZV_ETCD_EMBED_SECRET`",
        compare=False,
    )

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise SettingsError(
                "no etcd endpoint was given (--rdzv-endpoint host:2379[,host:2379])"
            )
        dotted = [it.host for it in self.endpoints if it.host.endswith(".")]
        if dotted and self.tls is not None:  # RFC 6066, 3
            raise SettingsError(
                f"{_OPTION} {dotted[0]!r}: TLS takes no host name with a dot at its end: write "
                f"{dotted[0].rstrip('.')}"
            )
        check_numbers(self)

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def __str__(self) -> str:
        return ",".join(f"{self.scheme}://{endpoint.target}" for endpoint in self.endpoints)


_MISSPELT_SCHEME = re.compile(r"(https?)(?::/?|//)(?!/)(?!\d+$)(.+)", re.IGNORECASE)
_LINK_LOCAL = ipaddress.IPv6Network("fe80::/10")
_HOST = re.compile(r"[\w.-]+")
_WRONG_SEPARATOR = re.compile(r"[;\s]")
_PLACEHOLDER = set("$<>{}")
_UNSET = ("None", "null", "undefined")
"""What programs write for a missing value."""


@dataclass(frozen=True, slots=True)
class ParsedEndpoints:
    """The endpoints, in the order typed and without repetitions."""

    endpoints: tuple[Endpoint, ...]
    scheme: str | None = None
    """``http``, ``https``, or ``None`` if no entry had one."""


def parse_endpoints(text: str | None) -> ParsedEndpoints:
    """Parse a comma-separated list of endpoints; raises :class:`SettingsError`.

    An entry without a scheme takes that of the others. ``None`` means no endpoint, as an empty text
    does.
    """
    if text is not None and not isinstance(text, str):
        raise SettingsError(
            f"{_OPTION} is {named(text)}; it must be text: host:port, or several with commas"
        )
    if text is None or not text.strip():
        return ParsedEndpoints((Endpoint("localhost", DEFAULT_PORT),))
    if "@" in text:  # before any message could repeat a password
        raise SettingsError(
            f"{_OPTION} contains user information (…@host), which would end up in logs: set "
            "RDZV_ETCD_USER and RDZV_ETCD_PASSWORD in the environment instead"
        )
    is_filled_in = not set(text) & _PLACEHOLDER
    if is_filled_in and any(_WRONG_SEPARATOR.search(part.strip()) for part in text.split(",")):
        listed = ",".join(filter(None, re.split(r"[;,\s]+", text)))
        raise SettingsError(
            f"{_OPTION} {text!r} contains a semicolon or a blank; endpoints are separated by "
            f"commas: write {listed or 'h1:2379,h2:2379'}"
        )
    schemes: dict[str, str] = {}
    endpoints: dict[Endpoint, None] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            raise SettingsError(
                f"{_OPTION} {text!r} has an empty entry: a comma too many, or a blank after the "
                "comma, at which the shell has split it; write h1:2379,h2:2379 without blanks"
            )
        scheme, address = _split_scheme(entry)
        if scheme is not None:
            schemes.setdefault(scheme, entry)
        endpoints.setdefault(_parse_address(entry, address))
    if len(schemes) > 1:
        raise SettingsError(
            f"{_OPTION} mixes http and https ({schemes['http']!r}, {schemes['https']!r}): all "
            "endpoints of a cluster must have the same scheme"
        )
    return ParsedEndpoints(tuple(endpoints), next(iter(schemes), None))


def _split_scheme(entry: str) -> tuple[str | None, str]:
    misspelt = _MISSPELT_SCHEME.fullmatch(entry)
    if misspelt is not None:
        scheme, address = misspelt.groups()
        raise SettingsError(f"{_OPTION} {entry!r}: write {scheme.lower()}://{address}")
    scheme, separator, rest = entry.partition("://")
    if not separator:
        return None, entry
    if scheme.lower() not in ("http", "https"):
        address, _, path = rest.partition("/")
        job = path.partition("?")[0]
        instead = f"write {address or 'host:port'}"
        if job and scheme.lower() == "etcd":  # a URL as torch's first etcd backend has them
            instead += f", and --rdzv-id={job}"
        raise SettingsError(f"{_OPTION} {entry!r}: the scheme must be http or https; {instead}")
    return scheme.lower(), rest


def _parse_address(entry: str, address: str) -> Endpoint:
    address = address.removesuffix("/")
    if re.search(r"[/?#]", address):
        raise SettingsError(
            f"{_OPTION} {entry!r} has a path; it must be host:port only (keys are placed under "
            "the etcd_prefix setting)"
        )
    if address.startswith("["):
        host, closing, rest = address[1:].partition("]")
        host = re.sub("%25(?=.)", "%", host, count=1)  # %25 alone: the interface of number 25
        if not closing or not _is_ipv6(host) or (rest and not rest.startswith(":")):
            raise SettingsError(f"{_OPTION} {entry!r}: expected [IPv6 address]:port")
        if "%" not in host and ipaddress.IPv6Address(host) in _LINK_LOCAL:
            raise SettingsError(
                f"{_OPTION} {entry!r}: a link-local address needs the name of this machine's "
                f"interface on that link: write [{host}%eth0]{rest} if it is eth0"
            )
        number, percent, zone = host.partition("%")
        host = f"{ipaddress.IPv6Address(number)}{percent}{zone}"  # as gRPC writes it, and compares
        return Endpoint(host, _parse_port(entry, rest[1:]) if rest else DEFAULT_PORT)
    if address.count(":") > 1:
        raise SettingsError(
            f"{_OPTION} {entry!r} is ambiguous: write an IPv6 address in brackets, "
            f"as in [2001:db8::1]:{DEFAULT_PORT}"
        )
    host, colon, port = address.partition(":")
    if not host.isascii():
        with contextlib.suppress(UnicodeError):
            host = host.encode("idna").decode()  # as DNS, certificates and gRPC have it
    if not host.isascii() or not _HOST.fullmatch(host) or host in _UNSET:
        problem = "has no host" if not host else f"has an invalid host, {host!r}"
        raise SettingsError(f"{_OPTION} {entry!r} {problem}{_why(host)}; expected host:port")
    return Endpoint(host, _parse_port(entry, port) if colon else DEFAULT_PORT)


def _parse_port(entry: str, text: str) -> int:
    if re.fullmatch("0+", text):
        raise SettingsError(
            f"{_OPTION} {entry!r}: port 0, any free one, is how c10d keeps the jobs of one machine "
            "apart; here --rdzv-id does: give each job an id of its own, and write "
            f"{entry.rstrip('/0')}{DEFAULT_PORT}, with --rdzv-conf=embed=1 if no etcd runs "
            "there"
        )
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise SettingsError(
            f"{_OPTION} {entry!r}: the port must be a number from 1 to 65535{_why(text)}"
        )
    return int(text)


def _why(part: str) -> str:
    """What usually causes such a part of an endpoint."""
    if not part or part in _UNSET:
        return " (was a variable not set?)"
    if set(part) & _PLACEHOLDER:
        return " (a variable or placeholder that was not replaced)"
    if set(part) & set("'\"`"):
        return " (quotes that have become part of the value)"
    return ""


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
