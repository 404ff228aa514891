"""Make :class:`Settings` from what torchrun or a library user passes, or say what is wrong.

Knows how options relate to each other. The only I/O is reading the files the options name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.endpoints import ParsedEndpoints, parse_endpoints
from rdzv_etcd.settings.given import Given
from rdzv_etcd.settings.model import (
    DEFAULT_EMBED_GRACE_S,
    DEFAULT_PREFIX,
    DEFAULT_SLICE_NODES,
    MAX_EPOCH_CLAIM,
    AfterEnd,
    Connection,
    Credentials,
    JobSettings,
    Settings,
    Timing,
    Tls,
)
from rdzv_etcd.settings.secrets import read_secret

USER_VARIABLE = "RDZV_ETCD_USER"
PASSWORD_VARIABLE = "RDZV_ETCD_PASSWORD"
EPOCH_VARIABLE = "RDZV_ETCD_EPOCH"
"""Tells workers the epoch of their round: a fencing token that only grows. Given to an agent it is
one that the job has reached before."""

_CONNECTION = Connection()
_TIMING = Timing()
_SHORTEST_LEASE_S = 2  # etcd grants no shorter lease with its default election settings
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


def settings_from_config(
    *,
    endpoint: str,
    job_id: str,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None,
    config: Mapping[str, object],
    environ: Mapping[str, str],
) -> Settings:
    """Validate everything at once and return the settings; raises :class:`SettingsError`.

    ``config`` is ``--rdzv-conf``: names as in :data:`rdzv_etcd.settings.options.OPTIONS`, values as
    strings or as what they mean. ``environ`` gives user and password and what ``rank_key`` names.
    """
    given = Given(config)
    job = JobSettings(min_nodes, max_nodes, given.whole("node_unit") or 1)
    return Settings(
        job_id=_encodable("the job id (--rdzv-id)", job_id),
        job=job,
        connection=_connection(given, parse_endpoints(endpoint), environ),
        timing=_timing(given, job),
        prefix=_prefix(given),
        rank_key=_rank_key(given, environ),
        local_addr=_local_addr(local_addr),
        slice_nodes=given.whole("slice_nodes") or DEFAULT_SLICE_NODES,
        after_end=_after_end(given),
        epoch_floor=_epoch_floor(environ),
        embed=given.flag("embed"),
        embed_grace_s=given.seconds("embed_grace") or DEFAULT_EMBED_GRACE_S,
    )


def _epoch_floor(environ: Mapping[str, str]) -> int:
    """What workers hand back: the epoch of the checkpoint that they will go on from."""
    text = environ.get(EPOCH_VARIABLE, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_EPOCH_CLAIM):
        raise SettingsError(
            f"{EPOCH_VARIABLE}={text[:40]!r} is not an epoch: a whole number up to "
            f"{MAX_EPOCH_CLAIM} is expected, or nothing"
        )
    return int(text)


def _after_end(given: Given) -> AfterEnd:
    word = given.text("after_end")
    if word is None:
        return AfterEnd.NEW_RUN
    try:
        return AfterEnd(word)
    except ValueError:
        known = ", ".join(choice.value for choice in AfterEnd)
        raise SettingsError(f"after_end={word!r} is none of {known}") from None


def is_default_job_id(job_id: str) -> bool:
    """Tell whether ``--rdzv-id`` was left at torchrun's default, which every such job shares."""
    return job_id == "none"


# --- connection -----------------------------------------------------------------------------------


def _connection(given: Given, endpoints: ParsedEndpoints, environ: Mapping[str, str]) -> Connection:
    join_timeout_s = given.seconds("join_timeout") or _TIMING.join_timeout_s
    return Connection(
        endpoints=endpoints.endpoints,
        tls=_tls(given, endpoints.scheme),
        credentials=_credentials(given, environ),
        allow_plain_password=given.flag("allow_plain_password"),
        request_timeout_s=given.seconds("request_timeout") or _CONNECTION.request_timeout_s,
        connect_timeout_s=given.seconds("connect_timeout")
        or min(_CONNECTION.connect_timeout_s, join_timeout_s),
    )


def _tls(given: Given, scheme: str | None) -> Tls | None:
    protocol = given.text("protocol")
    if protocol is not None and protocol.lower() not in ("http", "https"):
        raise SettingsError(f"protocol={protocol} must be http or https")
    if protocol is not None and scheme is not None and protocol.lower() != scheme:
        raise SettingsError(f"protocol={protocol} contradicts {scheme}:// in --rdzv-endpoint")
    secure = (protocol or scheme or "http").lower() == "https"
    files = [given.typed(name) for name in ("ca_cert", "cert", "key") if given.entry(name)]
    if files and not secure:
        raise SettingsError(
            f"{' and '.join(files)} given, but the connection is plain http: add protocol=https"
        )
    if given.entry("key") and not given.entry("cert"):
        raise SettingsError(
            f"{given.typed('key')} given without its certificate: add cert=, or ssl_cert="
        )
    if not secure:
        return None
    return Tls(given.file("ca_cert"), given.file("cert"), given.file("key"))


def _credentials(given: Given, environ: Mapping[str, str]) -> Credentials | None:
    user = _secret(given, "user_file", environ.get(USER_VARIABLE))
    password = _secret(given, "password_file", environ.get(PASSWORD_VARIABLE))
    if user is None and password is None:
        return None
    if user is None:
        raise SettingsError(
            f"an etcd password is given without a user: set {USER_VARIABLE} or give user_file="
        )
    if password is None:
        raise SettingsError(
            f"an etcd user is given without a password: set {PASSWORD_VARIABLE} or give "
            "password_file="
        )
    return Credentials(user, password, given.file("user_file"), given.file("password_file"))


def _secret(given: Given, option: str, from_environment: str | None) -> str | None:
    """The content of the file that was named, else the variable; never part of a message."""
    path = given.file(option)
    if path is None:
        value = (from_environment or "").rstrip("\r\n")
        if not value.isprintable():
            raise SettingsError(
                f"{USER_VARIABLE} or {PASSWORD_VARIABLE} has characters that are not text"
            )
        return value or None
    return read_secret(path, given.typed(option))


# --- timing ---------------------------------------------------------------------------------------


def _timing(given: Given, job: JobSettings) -> Timing:
    join_timeout_s = given.seconds("join_timeout") or _TIMING.join_timeout_s
    settle_s = given.seconds("settle")
    lease_ttl_s = _lease_ttl_s(given)
    return Timing(
        lease_ttl_s=lease_ttl_s,
        keep_alive_timeout_s=given.seconds("heartbeat_timeout"),
        join_timeout_s=join_timeout_s,
        last_call_timeout_s=_last_call_timeout_s(given, job, join_timeout_s),
        rejoin_timeout_s=given.seconds("rejoin_timeout") or _TIMING.rejoin_timeout_s,
        settle_s=_TIMING.settle_s if settle_s is None else settle_s,
        closed_ttl_s=given.whole("closed_ttl") or _TIMING.closed_ttl_s,
        ended_ttl_s=given.whole("ended_ttl") or _TIMING.ended_ttl_s,
        job_lease_ttl_s=_job_lease_ttl_s(given, lease_ttl_s),
        close_timeout_s=given.seconds("close_timeout") or _TIMING.close_timeout_s,
    )


def _lease_ttl_s(given: Given) -> int:
    """``lease_ttl``, or etcd-v2's interval times attempts, which must agree with it."""
    direct = given.whole("lease_ttl")
    factors = ("keep_alive_interval", "keep_alive_max_attempt")
    named = "lease_ttl"
    ttl_s = direct
    if any(given.entry(name) for name in factors):
        interval_s = given.seconds("keep_alive_interval") or 5.0
        attempts = given.whole("keep_alive_max_attempt") or 3
        named = " × ".join(factors)
        ttl_s = math.ceil(interval_s * attempts)
        if direct is not None and direct != ttl_s:
            raise SettingsError(f"lease_ttl={direct} contradicts {named}, which makes {ttl_s}")
    if ttl_s is None:
        return _TIMING.lease_ttl_s
    if ttl_s < _SHORTEST_LEASE_S:
        raise SettingsError(f"{named} is {ttl_s} s; etcd's shortest lease is {_SHORTEST_LEASE_S} s")
    return ttl_s


def _last_call_timeout_s(given: Given, job: JobSettings, join_timeout_s: float) -> float:
    asked_s = given.seconds("last_call_timeout") or _TIMING.last_call_timeout_s
    if given.entry("last_call_timeout") and asked_s > join_timeout_s and job.is_elastic:
        raise SettingsError(
            f"last_call_timeout={asked_s:g} is longer than {given.typed('join_timeout')}="
            f"{join_timeout_s:g}: nodes would give up before the round closes"
        )
    return min(asked_s, join_timeout_s)


def _job_lease_ttl_s(given: Given, lease_ttl_s: int) -> int | None:
    ttl_s = given.whole("job_lease_ttl")
    if ttl_s is not None and ttl_s < lease_ttl_s:
        raise SettingsError(
            f"job_lease_ttl={ttl_s} is shorter than a node's lease ({lease_ttl_s} s): the job's "
            "keys would vanish before its nodes do"
        )
    return ttl_s


# --- names ----------------------------------------------------------------------------------------


def _prefix(given: Given) -> str:
    prefix = given.text("etcd_prefix")
    if prefix is None:
        return DEFAULT_PREFIX
    if any(not character.isprintable() for character in prefix):
        raise SettingsError(f"{given.typed('etcd_prefix')}={prefix!r} has unprintable characters")
    stem = prefix.strip("/")
    if not stem:
        raise SettingsError(
            f"{given.typed('etcd_prefix')}={prefix!r} would mix a job's keys with everybody's: "
            "give it a name"
        )
    return f"/{stem}"


def _local_addr(address: str | None) -> str | None:
    if not address:
        return None
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise SettingsError(f"--local-addr {address!r} is neither a host name nor an address")
    return address


def _rank_key(given: Given, environ: Mapping[str, str]) -> str | None:
    """Resolve ``env:NAME``, ``value:TEXT``, a bare name in capitals (a variable), or a literal.

    What it means depends on its form only, never on which variables happen to be set.
    """
    text = given.text("rank_key")
    if text is None:
        return None
    kind, colon, rest = text.partition(":")
    if colon and kind == "value":
        if not rest:
            raise SettingsError(f"rank_key={text} has nothing behind the colon")
        return rest
    if colon and kind == "env":
        name = rest
    elif _VARIABLE_NAME.fullmatch(text):
        name = text
    else:
        return text
    value = environ.get(name, "").strip()
    if not value:
        literal = "" if colon else f" (for the literal text write rank_key=value:{text})"
        raise SettingsError(
            f"rank_key={text} names the environment variable {name!r}, which is not set{literal}"
        )
    return _encodable(f"the environment variable {name}", value)


def _encodable(what: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{what} is not valid UTF-8: {text!r}") from error
    return text
