"""Make :class:`Settings` from what torchrun or a library user passes, or explain what is wrong.

Knows how each kind of value is written and how options relate to each other. The only I/O is
reading the files that options name.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rdzv_etcd.arguments import whole_or_none
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import (
    Connection,
    Credentials,
    ParsedEndpoints,
    Tls,
    parse_endpoints,
)
from rdzv_etcd.settings.fields import (
    MAX_EPOCH_CLAIM,
    WHOLE_DOMAIN,
    Option,
    OptionKind,
    options_of,
    whole,
)
from rdzv_etcd.settings.options import (
    NAMES,
    OPTIONS,
    WITHOUT_MEANING,
    JobSettings,
    Settings,
    Timing,
)
from rdzv_etcd.settings.secrets import check_embed_secret, read_secret, tls_from, waited_for
from rdzv_etcd.text import named, shown

USER_VARIABLE = "RDZV_ETCD_USER"
PASSWORD_VARIABLE = "RDZV_ETCD_PASSWORD"
SECRET_VARIABLE = "RDZV_ETCD_EMBED_SECRET"
"""The environment's secret of an embedded etcd."""
LOGIN = (USER_VARIABLE, PASSWORD_VARIABLE, SECRET_VARIABLE)
WITHHELD = (PASSWORD_VARIABLE, SECRET_VARIABLE)
"""Neither workers nor gates inherit these."""
EPOCH_VARIABLE = "RDZV_ETCD_EPOCH"
"""Gives workers the epoch of their round: a fencing token that only grows. Given to an agent, it is
one that the job has reached before."""

NODE_ID_VARIABLE = "RDZV_ETCD_NODE_ID"
"""Gives workers the node id of their agent; by it a guard knows what to end (``orphans=kill``)."""

WORKER_VARIABLE = "RDZV_ETCD_WORKER"
"""Gives workers what they take part in the job with (``in_process=1``): JSON, without secrets."""

_SHORTEST_LEASE_S = 2  # etcd grants no shorter lease with its default election settings
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRETS = frozenset({"user", "username", "password", "passwd", "token", "credentials"})
_SECRETS |= {"secret", "embed_secret"}
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


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

    ``endpoint`` is ``--rdzv-endpoint``; ``None`` and an empty text mean no endpoint. ``config`` is
    ``--rdzv-conf``: names as in :data:`rdzv_etcd.settings.options.OPTIONS`, values as strings or as
    what they mean. A whole number may be of any type that is one. ``environ`` gives user and
    password, what ``rank_key`` and ``domain_key`` name, and may give an ``epoch_floor``.
    """
    given = _Given(config)
    job = JobSettings(min_nodes, max_nodes, **given.fields(JobSettings))
    timing = _timing(given, job)
    fields = given.fields(Settings)
    if "prefix" in fields:
        fields["prefix"] = _prefix(given)
    for name in ("rank_key", "domain_key"):
        if name in fields:
            fields[name] = _resolved(name, fields[name], environ)
    return Settings(
        job_id=_encodable("the job id (--rdzv-id)", job_id),
        job=job,
        connection=_connection(given, parse_endpoints(endpoint), environ, timing),
        timing=timing,
        local_addr=_local_addr(local_addr),
        data={} if data is None else data,
        epoch_floor=whole("epoch_floor", epoch_floor) or _epoch_floor(environ),
        **fields,
    )


# --- one option -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    typed: str
    """The name that the user typed."""
    value: Any


class _Given:
    """All options that were given, by our name.

    torchrun passes strings; library users may pass numbers of any type, booleans and paths.
    ``None`` counts as not given.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._entries: dict[str, _Entry] = {}
        for typed, raw in config.items():
            option = _find(typed)
            if option is None or raw is None:
                continue
            entry = _Entry(typed, _parse(option, typed, raw))
            other = self._entries.get(option.name)
            self._entries[option.name] = entry if other is None else _merge(other, entry)

    def value(self, name: str) -> Any:
        """``None`` if it was not given."""
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def typed(self, name: str) -> str:
        """The name to use in a message: what the user typed, or ours."""
        entry = self._entries.get(name)
        return name if entry is None else entry.typed

    def fields(self, settings: type) -> dict[str, Any]:
        """Return what was given for the fields of a dataclass, by the field's name."""
        values = {field: self.value(option.name) for field, option in options_of(settings).items()}
        return {field: value for field, value in values.items() if value is not None}


def _find(typed: object) -> Option | None:
    """Return the option of that name, ``None`` for one that has no effect here."""
    if not isinstance(typed, str):
        raise SettingsError(f"the name of a rendezvous option must be text, not {_shown(typed)}")
    if typed.lower() in _SECRETS:
        instead = f"{USER_VARIABLE} and {PASSWORD_VARIABLE}", "user_file= and password_file="
        if "secret" in typed.lower():
            instead = SECRET_VARIABLE, "embed_secret_file="
        raise SettingsError(
            f"{typed}= is refused, because values given here end up in process lists and logs: "
            f"set {instead[0]} in the environment, or give {instead[1]}"
        )
    if typed in WITHOUT_MEANING:
        return None
    if typed not in NAMES:
        known = [name for option in OPTIONS for name in option.names]
        near = difflib.get_close_matches(typed.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        raise SettingsError(f"unknown rendezvous option {typed!r}; {hint}")
    return NAMES[typed]


def _merge(first: _Entry, second: _Entry) -> _Entry:
    if {first.typed, second.typed} == {"timeout", "join_timeout"}:
        # torchrun sets `timeout` by itself: the user has not asked for it.
        return first if first.typed == "join_timeout" else second
    if first.value != second.value:
        raise SettingsError(
            f"{first.typed}={first.value} and {second.typed}={second.value} are two names of the "
            "same setting with different values: keep one"
        )
    return first


def _parse(option: Option, typed: str, raw: object) -> Any:
    if isinstance(raw, str):
        raw = raw.strip()
        if not raw:
            raise SettingsError(f"{typed} is empty")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in raw):
            raise SettingsError(f"{typed}={raw!r} is not valid UTF-8")
    if option.kind is OptionKind.FLAG:
        return _parse_flag(typed, raw)
    if option.kind is OptionKind.FILE:
        return _parse_file(typed, raw)
    if option.kind is OptionKind.TEXT:
        return _parse_text(option, typed, raw)
    return _parse_number(option, typed, raw)


def _parse_flag(typed: str, raw: object) -> bool:
    word = raw.lower() if isinstance(raw, str) else ""
    try:
        if word in _YES or bool(raw == 1):
            return True
        if word in _NO or bool(raw == 0):
            return False
    except (TypeError, ValueError, RuntimeError):  # an array: it equals no number
        pass
    raise SettingsError(f"{typed}={_shown(raw)} must be 0 or 1")


def _parse_number(option: Option, typed: str, raw: object) -> float:
    if option.kind is OptionKind.COUNT_OR_ALL and isinstance(raw, str) and raw.lower() == "all":
        return WHOLE_DOMAIN
    value = raw if (found := whole_or_none(raw)) is None else found
    if isinstance(value, str | numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and option.allows(number):
            if option.kind is OptionKind.SECONDS:
                return number
            if number == int(number):
                return int(number)
    raise SettingsError(f"{typed}={_shown(raw)} must be {option.wanted}")


def _parse_text(option: Option, typed: str, raw: object) -> Any:
    number = whole_or_none(raw)
    if number is not None and abs(number) < 10**18:
        raw = str(number)  # rank_key=7, domain_key=3
    if not isinstance(raw, str):
        raise SettingsError(f"{typed}={_shown(raw)} must be text")
    if not option.choices:
        return raw
    for choice in option.choices:
        if choice.value == raw.lower():
            return choice
    known = ", ".join(choice.value for choice in option.choices)
    raise SettingsError(f"{typed}={_shown(raw)} must be one of {known}")


def _parse_file(typed: str, raw: object) -> Path:
    """A file that can be read."""
    if not isinstance(raw, str | Path):
        raise SettingsError(f"{typed}={_shown(raw)} must be the path of a file")

    which = f"{typed}={str(raw)!r}"

    def look() -> Path:
        try:
            path = Path(raw).expanduser()
            path.stat()
            if path.is_file() or path.is_dir():  # what is read from a pipe is gone
                with path.open("rb") as file:
                    file.read(1)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"{which} cannot be read: {reason}") from error
        return path

    return waited_for(look, which)


def _shown(raw: object) -> str:
    """A value for a message: short, and with its type unless that is plain to see."""
    if isinstance(raw, str | float | bool) or (type(raw) is int and abs(raw) < 10**18):
        return repr(raw)[:80]
    return named(raw)


# --- connection -----------------------------------------------------------------------------------


def _connection(
    given: _Given, endpoints: ParsedEndpoints, environ: Mapping[str, str], timing: Timing
) -> Connection:
    secret = _embed_secret(given, environ)
    made = Connection(
        endpoints=endpoints.endpoints,
        tls=_tls(given, endpoints.scheme, secret),
        credentials=_credentials(given, environ),
        secret=secret,
        **given.fields(Connection),
    )
    if given.value("connect_timeout") is None:
        made = replace(made, connect_timeout_s=min(made.connect_timeout_s, timing.join_timeout_s))
    return made


def _embed_secret(given: _Given, environ: Mapping[str, str]) -> str | None:
    option = "embed_secret_file"
    secret = _secret(given, option, SECRET_VARIABLE, environ, is_private=True)
    path = given.value(option)
    named = SECRET_VARIABLE if path is None else f"{option}={str(path)!r}"
    if secret is None and SECRET_VARIABLE in environ:
        secret = ""  # not "none": what should have filled it has failed
    if secret is not None:
        check_embed_secret(secret, named)
    return secret


def _tls(given: _Given, scheme: str | None, secret: str | None) -> Tls | None:
    protocol = given.value("protocol")
    if protocol is not None and scheme is not None and protocol.value != scheme:
        raise SettingsError(f"protocol={protocol.value} contradicts {scheme}:// in --rdzv-endpoint")
    files = given.fields(Tls)
    if secret is not None:
        if files or "http" in (scheme, protocol):
            with_it = " and ".join(map(given.typed, files)) or "http"
            raise SettingsError(
                f"{with_it} given together with the secret of an embedded etcd, which speaks TLS "
                f"with certificates made from it: keep one; {SECRET_VARIABLE} and "
                "embed_secret_file are not for an etcd of your own"
            )
        return tls_from(secret)
    if "https" in (scheme, protocol):
        if "key" in files and "cert" not in files:
            raise SettingsError(
                f"{given.typed('key')} given without its certificate: add cert=, or ssl_cert="
            )
        return Tls(**files)
    if files:
        raise SettingsError(
            f"{' and '.join(map(given.typed, files))} given, but the connection is plain http: add "
            "protocol=https"
        )
    return None


def _credentials(given: _Given, environ: Mapping[str, str]) -> Credentials | None:
    user = _secret(given, "user_file", USER_VARIABLE, environ)
    password = _secret(given, "password_file", PASSWORD_VARIABLE, environ)
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


def _secret(
    given: _Given,
    option: str,
    variable: str,
    environ: Mapping[str, str],
    *,
    is_private: bool = False,
) -> str | None:
    """The content of the file that was named, else the variable; never part of a message."""
    path = given.value(option)
    if path is not None:
        return read_secret(path, given.typed(option), is_private=is_private)
    value = environ.get(variable, "").rstrip("\r\n")
    if not value.isprintable():
        raise SettingsError(f"{variable} has characters that are not text")
    return value or None


# --- timing ---------------------------------------------------------------------------------------


def _timing(given: _Given, job: JobSettings) -> Timing:
    fields = given.fields(Timing)
    fields["lease_ttl_s"] = _lease_ttl_s(given)
    timing = Timing(**fields)
    if timing.job_ttl_s < timing.lease_ttl_s:
        raise SettingsError(
            f"job_lease_ttl={timing.job_ttl_s} is shorter than a node's lease "
            f"({timing.lease_ttl_s} s): the job's keys would vanish before its nodes do"
        )
    last_call_s, join_timeout_s = timing.last_call_timeout_s, timing.join_timeout_s
    if given.value("last_call_timeout") and last_call_s > join_timeout_s and job.is_elastic:
        raise SettingsError(
            f"last_call_timeout={last_call_s:g} is longer than {given.typed('join_timeout')}="
            f"{join_timeout_s:g}: nodes would give up before the round closes"
        )
    return replace(timing, last_call_timeout_s=min(last_call_s, join_timeout_s))


def _lease_ttl_s(given: _Given) -> int:
    """``lease_ttl``, or etcd-v2's interval times attempts, which must agree with it."""
    name = "lease_ttl"
    direct: int | None = given.value(name)
    ttl_s = Timing().lease_ttl_s if direct is None else direct
    interval_s = given.value("keep_alive_interval")
    attempts = given.value("keep_alive_max_attempt")
    if interval_s or attempts:
        name = "keep_alive_interval × keep_alive_max_attempt"
        ttl_s = math.ceil((interval_s or 5.0) * (attempts or 3))
        if direct is not None and direct != ttl_s:
            raise SettingsError(f"lease_ttl={direct} contradicts {name}, which makes {ttl_s}")
    if ttl_s < _SHORTEST_LEASE_S:
        raise SettingsError(f"{name} is {ttl_s} s; etcd's shortest lease is {_SHORTEST_LEASE_S} s")
    return ttl_s


# --- names ----------------------------------------------------------------------------------------


def _prefix(given: _Given) -> str:
    typed, prefix = given.typed("etcd_prefix"), given.value("etcd_prefix")
    if not prefix.isprintable():
        raise SettingsError(f"{typed}={prefix!r} has unprintable characters")
    stem = prefix.strip("/")
    if not stem:
        raise SettingsError(
            f"{typed}={prefix!r} would mix a job's keys with those of all other programs: give it "
            "a name"
        )
    return f"/{stem}"


def _local_addr(address: object) -> str | None:
    if address is None:
        return None
    if not isinstance(address, str):
        raise SettingsError(
            f"--local-addr is {named(address)}, neither a host name nor an address: give it as text"
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


def _resolved(option: str, text: str, environ: Mapping[str, str]) -> str:
    """Resolve ``env:NAME``, ``value:TEXT``, a bare name in capitals (a variable), or a literal.

    What it means depends on its form only, never on which variables happen to be set.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "value":
        if not rest:
            raise SettingsError(f"{option}={text} has nothing behind the colon")
        return rest
    if colon and kind == "env":
        name, literal = rest, ""
    elif _VARIABLE_NAME.fullmatch(text):
        name, literal = text, f" (for the literal text write {option}=value:{text})"
    else:
        return text
    value = environ.get(name, "").strip()
    if not value:
        raise SettingsError(
            f"{option}={text} names the environment variable {name!r}, which is not set{literal}"
        )
    return _encodable(f"the environment variable {name}", value)


def _epoch_floor(environ: Mapping[str, str]) -> int:
    """Return the epoch of the checkpoint from which workers resume, which they hand back."""
    text = environ.get(EPOCH_VARIABLE, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_EPOCH_CLAIM):
        raise SettingsError(
            f"{EPOCH_VARIABLE}={text[:40]!r} is not an epoch: a whole number up to "
            f"{MAX_EPOCH_CLAIM} is expected, or nothing"
        )
    return int(text)


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
