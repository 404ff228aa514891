"""Make :class:`Settings` from what torchrun or a library user passes, or say what is wrong.

Knows how options relate to each other. The only I/O is reading the files the options name.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import (
    Connection,
    Credentials,
    ParsedEndpoints,
    Tls,
    parse_endpoints,
)
from rdzv_etcd.settings.fields import (
    DEFAULT_PREFIX,
    LONGEST_S,
    MAX_EPOCH_CLAIM,
    Kind,
    Option,
    options_of,
    seconds_wanted,
    whole,
    whole_or_none,
)
from rdzv_etcd.settings.options import (
    NAMES,
    WITHOUT_MEANING,
    AfterEnd,
    JobSettings,
    Log,
    Orphans,
    Settings,
    Timing,
)
from rdzv_etcd.settings.secrets import read_secret
from rdzv_etcd.text import named, shown

USER_VARIABLE = "RDZV_ETCD_USER"
PASSWORD_VARIABLE = "RDZV_ETCD_PASSWORD"
EPOCH_VARIABLE = "RDZV_ETCD_EPOCH"
"""Tells workers the epoch of their round: a fencing token that only grows. Given to an agent it is
one that the job has reached before."""

NODE_ID_VARIABLE = "RDZV_ETCD_NODE_ID"
"""Tells workers the node id of their agent; by it a guard knows what to end (``orphans=kill``)."""

C = TypeVar("C", bound=Enum)

_CONNECTION = Connection()
_TIMING = Timing()
_SHORTEST_LEASE_S = 2  # etcd grants no shorter lease with its default election settings
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


def settings_from_config(
    *,
    endpoint: str | None,
    job_id: str,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None,
    config: Mapping[str, object],
    environ: Mapping[str, str],
    data: Mapping[str, object] | None = None,
    epoch_floor: int = 0,
) -> Settings:
    """Validate everything at once and return the settings; raises :class:`SettingsError`.

    ``endpoint`` is ``--rdzv-endpoint``; ``None`` is no endpoint, as no text is. ``config`` is
    ``--rdzv-conf``: names as in :data:`rdzv_etcd.settings.options.OPTIONS`, values as strings or as
    what they mean. A whole number may be of any type that is one. ``environ`` gives user and
    password, what ``rank_key`` names, and may give an ``epoch_floor``.
    """
    given = Given(config)
    job = JobSettings(min_nodes, max_nodes, **given.fields(JobSettings))
    timing = _timing(given, job)
    return Settings(
        job_id=_encodable("the job id (--rdzv-id)", job_id),
        job=job,
        connection=_connection(given, parse_endpoints(endpoint), environ, timing),
        timing=timing,
        local_addr=_local_addr(local_addr),
        data={} if data is None else data,
        epoch_floor=whole("epoch_floor", epoch_floor) or _epoch_floor(environ),
        **{
            **given.fields(Settings),
            "prefix": _prefix(given),
            "rank_key": _rank_key(given, environ),
            "after_end": _choice(given, "after_end", AfterEnd, AfterEnd.NEW_RUN),
            "log": _choice(given, "log", Log, Log.LOGLEVEL),
            "orphans": _choice(given, "orphans", Orphans, Orphans.LEAVE),
        },
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


def _choice(given: Given, name: str, choices: type[C], default: C) -> C:
    word = given.text(name)
    if word is None:
        return default
    try:
        return choices(word)
    except ValueError:
        known = ", ".join(choice.value for choice in choices)
        raise SettingsError(f"{name}={word!r} is none of {known}") from None


def is_default_job_id(job_id: str) -> bool:
    """Tell whether ``--rdzv-id`` was left at torchrun's default, which every such job shares."""
    return job_id == "none"


# --- connection -----------------------------------------------------------------------------------


def _connection(
    given: Given, endpoints: ParsedEndpoints, environ: Mapping[str, str], timing: Timing
) -> Connection:
    fields = given.fields(Connection)
    if "connect_timeout_s" not in fields:
        fields["connect_timeout_s"] = min(_CONNECTION.connect_timeout_s, timing.join_timeout_s)
    return Connection(
        endpoints=endpoints.endpoints,
        tls=_tls(given, endpoints.scheme),
        credentials=_credentials(given, environ),
        **fields,
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
    return Tls(**given.fields(Tls))


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
    return Credentials(user, password, **given.fields(Credentials))


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
    fields = given.fields(Timing)
    fields["lease_ttl_s"] = _lease_ttl_s(given, fields.get("lease_ttl_s"))
    timing = Timing(**fields)
    _check_last_call(given, job, timing)
    if timing.job_ttl_s < timing.lease_ttl_s:
        raise SettingsError(
            f"job_lease_ttl={timing.job_ttl_s} is shorter than a node's lease "
            f"({timing.lease_ttl_s} s): the job's keys would vanish before its nodes do"
        )
    return replace(
        timing, last_call_timeout_s=min(timing.last_call_timeout_s, timing.join_timeout_s)
    )


def _lease_ttl_s(given: Given, direct: int | None) -> int:
    """``lease_ttl``, or etcd-v2's interval times attempts, which must agree with it."""
    factors = ("keep_alive_interval", "keep_alive_max_attempt")
    named = "lease_ttl"
    ttl_s = _TIMING.lease_ttl_s if direct is None else direct
    if any(given.entry(name) for name in factors):
        interval_s, attempts = (given.number(name) for name in factors)
        named = " × ".join(factors)
        ttl_s = math.ceil((interval_s or 5.0) * (attempts or 3))
        if direct is not None and direct != ttl_s:
            raise SettingsError(f"lease_ttl={direct} contradicts {named}, which makes {ttl_s}")
    if ttl_s < _SHORTEST_LEASE_S:
        raise SettingsError(f"{named} is {ttl_s} s; etcd's shortest lease is {_SHORTEST_LEASE_S} s")
    return ttl_s


def _check_last_call(given: Given, job: JobSettings, timing: Timing) -> None:
    asked_s, join_timeout_s = timing.last_call_timeout_s, timing.join_timeout_s
    if given.entry("last_call_timeout") and asked_s > join_timeout_s and job.is_elastic:
        raise SettingsError(
            f"last_call_timeout={asked_s:g} is longer than {given.typed('join_timeout')}="
            f"{join_timeout_s:g}: nodes would give up before the round closes"
        )


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


def _local_addr(address: object) -> str | None:
    if address is None:
        return None
    if not isinstance(address, str):
        raise SettingsError(
            f"--local-addr is {named(address)}, which is neither a host name nor an address in "
            "text: give it as text"
        )
    if not address:
        return None
    if address.startswith("[") and address.endswith("]"):  # as an IPv6 address in an endpoint
        address = address[1:-1]
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise SettingsError(
            f"--local-addr {shown(repr(address))} is neither a host name nor an address"
        )
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


def _encodable(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise SettingsError(f"{what} is {named(text, 100)}; it must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(
            f"{what} is not valid UTF-8: {text!r}; if it was typed as UTF-8, the locale of this "
            "process is another one: set LC_ALL=C.UTF-8"
        ) from error
    return text


_SECRETS = frozenset({"user", "username", "password", "passwd", "token", "credentials"})
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})

Value = float | int | bool | str | Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One option that was given."""

    typed: str
    """The name the user typed."""
    value: Value


class Given:
    """All options that were given, by our name.

    torchrun passes strings; library users may pass numbers of any type, booleans and paths.
    ``None`` counts as not given.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._entries: dict[str, Entry] = {}
        for typed, raw in config.items():
            if typed in WITHOUT_MEANING:
                continue
            option = _find(typed)
            if raw is None:
                continue
            entry = Entry(typed, _parse(option, typed, raw))
            other = self._entries.get(option.name)
            if other is None:
                self._entries[option.name] = entry
            else:
                self._entries[option.name] = _merge(other, entry)

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def typed(self, name: str) -> str:
        """The name to use in a message: what the user typed, or ours."""
        entry = self._entries.get(name)
        return name if entry is None else entry.typed

    def fields(self, settings: type) -> dict[str, Any]:
        """Return what was given for the fields of a dataclass, by the field's name."""
        by_field = {
            field: self.entry(option.name) for field, option in options_of(settings).items()
        }
        return {field: entry.value for field, entry in by_field.items() if entry is not None}

    def number(self, name: str) -> float | None:
        value = self._value(name)
        return value if isinstance(value, int | float) else None

    def text(self, name: str) -> str | None:
        value = self._value(name)
        return None if value is None else str(value)

    def file(self, name: str) -> Path | None:
        value = self._value(name)
        return value if isinstance(value, Path) else None

    def _value(self, name: str) -> Value | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.value


def _find(typed: object) -> Option:
    if not isinstance(typed, str):
        raise SettingsError(f"the name of a rendezvous option must be text, not {_shown(typed)}")
    if typed.lower() in _SECRETS:
        raise SettingsError(
            f"{typed}= is refused, because values given here end up in process lists and logs: "
            "set RDZV_ETCD_USER and RDZV_ETCD_PASSWORD in the environment, or give user_file= and "
            "password_file="
        )
    option = NAMES.get(typed)
    if option is None:
        near = difflib.get_close_matches(typed.lower(), NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(NAMES))}"
        raise SettingsError(f"unknown rendezvous option {typed!r}; {hint}")
    return option


def _merge(first: Entry, second: Entry) -> Entry:
    if {first.typed, second.typed} == {"timeout", "join_timeout"}:
        # torchrun sets `timeout` by itself: it says nothing about what the user wants.
        return first if first.typed == "join_timeout" else second
    if first.value != second.value:
        raise SettingsError(
            f"{first.typed}={first.value} and {second.typed}={second.value} are two names of the "
            "same setting with different values: keep one"
        )
    return first


def _parse(option: Option, typed: str, raw: object) -> Value:
    if isinstance(raw, str):
        raw = raw.strip()
        if not raw:
            raise SettingsError(f"{typed} is empty")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in raw):
            raise SettingsError(f"{typed}={raw!r} is not valid UTF-8")
    if option.kind is Kind.FLAG:
        return _parse_flag(typed, raw)
    if option.kind in (Kind.WHOLE_SECONDS, Kind.COUNT):
        return _parse_whole(option, typed, raw)
    if option.kind is Kind.SECONDS:
        return _parse_seconds(option, typed, raw)
    if option.kind in (Kind.FILE, Kind.NEW_FILE):
        return (_parse_file if option.kind is Kind.FILE else _parse_new_file)(typed, raw)
    if isinstance(raw, str):
        return raw
    number = whole_or_none(raw)
    if number is not None and abs(number) < 10**18:
        return str(number)  # rank_key=7
    raise SettingsError(f"{typed}={_shown(raw)} must be text")


def _parse_flag(typed: str, raw: object) -> bool:
    word = raw.lower() if isinstance(raw, str) else ""
    if word in _YES or _equals(raw, 1):
        return True
    if word in _NO or _equals(raw, 0):
        return False
    raise SettingsError(f"{typed}={_shown(raw)} must be 0 or 1")


def _equals(raw: object, number: int) -> bool:
    """Whether they are equal; what has several values, as an array has, equals no number."""
    try:
        return bool(raw == number)
    except (TypeError, ValueError, RuntimeError):
        return False


def _number(typed: str, raw: object, wanted: str) -> float:
    whole = whole_or_none(raw)
    value = raw if whole is None else whole
    if isinstance(value, str | numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise SettingsError(f"{typed}={_shown(raw)} must be {wanted}")


def _parse_seconds(option: Option, typed: str, raw: object) -> float:
    wanted = seconds_wanted(option)
    number = _number(typed, raw, wanted)
    if number < 0 or (number == 0 and not option.zero):
        raise SettingsError(f"{typed}={raw} must be {wanted}")
    if number > LONGEST_S:
        raise SettingsError(f"{typed}={raw} is more than ten years ({LONGEST_S} seconds)")
    return number


def _parse_whole(option: Option, typed: str, raw: object) -> int:
    least = 0 if option.zero else 1
    unit = " of seconds" if option.kind is Kind.WHOLE_SECONDS else ""
    number = _number(typed, raw, f"a whole number{unit}")
    if number != int(number) or number < least:
        raise SettingsError(f"{typed}={raw} must be a whole number{unit}, at least {least}")
    if number > LONGEST_S:
        raise SettingsError(f"{typed}={raw} is too large (the most is {LONGEST_S})")
    return int(number)


def _shown(raw: object) -> str:
    """A value for a message: whatever a caller passed, short, and with its type unless that is
    plain to see."""
    if isinstance(raw, str | float | bool) or (type(raw) is int and abs(raw) < 10**18):
        return repr(raw)[:80]
    return named(raw)


def _parse_file(typed: str, raw: object) -> Path:
    if not isinstance(raw, str | Path):
        raise SettingsError(f"{typed}={_shown(raw)} must be the path of a file")
    try:
        path = Path(raw).expanduser()
        path.stat()
        if path.is_file() or path.is_dir():  # what is read from a pipe is gone
            with path.open("rb") as file:
                file.read(1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{typed}={str(raw)!r} cannot be read: {reason}") from error
    return path


def _parse_new_file(typed: str, raw: object) -> Path:
    """Where a file will be written; whether that can be done shows when it is."""
    if not isinstance(raw, str | Path):
        raise SettingsError(f"{typed}={_shown(raw)} must be the path of a file")
    try:
        return Path(raw).expanduser().absolute()  # the process may change its directory
    except (OSError, RuntimeError) as error:
        raise SettingsError(f"{typed}={str(raw)!r} is no path: {error}") from error
