"""Every parser of what comes from outside, with good input to start from; and whole nodes."""

from __future__ import annotations

import atexit
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from rdzv_etcd.errors import RdzvEtcdError, SettingsError, StateCorruptError
from rdzv_etcd.etcd.auth import channel_credentials
from rdzv_etcd.etcd.port import Event, EventKind, GetResult, KeyValue
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.protocol.store import StoreKeys, content_of, number_of
from rdzv_etcd.protocol.views import control_after, control_from, nodes_from
from rdzv_etcd.settings.connection import Tls, parse_endpoints
from rdzv_etcd.settings.options import NAMES
from rdzv_etcd.settings.parse import settings_from_config
from tests.fuzz.mutate import NASTY, nasty_bytes, nasty_json, nasty_text
from tests.fuzz.nodes import nodes
from tests.protocol.golden import FORMED_TEXT, KEY, NODE_TEXT, WRITTEN
from tests.support.certificates import make_certificates

Shot: TypeAlias = Callable[[random.Random], None]
"""Makes one input and gives it to the parser."""

KEYS = JobKeys("/rdzv_etcd", "a job/ü")
_ENDPOINTS = (
    "host", "h1:2379,h2:2379", "https://h1,https://h2:1", "[2001:db8::1]:2379", "http://[::1]/",
)  # fmt: skip
_PIECES = ("http://", "https://", "[", "]", "::1", ":", ",", "/", "@", "h1", "2379", " ")
_TEXTS = (
    "10", "0.5", "https", "env:X", "SLURM_PROCID", "value:3", "/p", "yes", "1e400", "/dev/null",
)  # fmt: skip


def _value(rng: random.Random, valid: bytes) -> bytes:
    return (nasty_json if rng.random() < 0.6 else nasty_bytes)(rng, valid)


def _value_of(kind: str) -> Shot:
    """A value that is read can be written, and is the same when it is read again."""
    encode, decode, _, text = WRITTEN[kind]

    def shoot(rng: random.Random) -> None:
        try:
            found = decode(KEY, _value(rng, text.encode()))
        except StateCorruptError as error:
            str(error)
            return
        again = decode(KEY, encode(found))
        if isinstance(found, NodeInfo):  # its text is written in characters that can be shown
            found = replace(found, because=again.because)
        assert again == found

    return shoot


def _expect(parse: Callable[[], object]) -> None:
    try:
        parse()
    except RdzvEtcdError as error:
        str(error)


def endpoints(rng: random.Random) -> None:
    """What is read of endpoints is read again from what it is written as."""
    pieces = "".join(rng.choices(_PIECES, k=rng.randrange(8)))
    text = nasty_text(rng, rng.choice(_ENDPOINTS)) if rng.random() < 0.7 else pieces
    try:
        parsed = parse_endpoints(text)
    except SettingsError as error:
        str(error)
        return
    assert parsed.endpoints
    again = parse_endpoints(",".join(endpoint.target for endpoint in parsed.endpoints))
    assert again.endpoints == parsed.endpoints


def configuration(rng: random.Random) -> None:
    config: dict[str, object] = {}
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(list(NAMES)) if rng.random() < 0.9 else nasty_text(rng, "lease_ttl")
        config[name] = (
            rng.choice(NASTY) if rng.random() < 0.5 else nasty_text(rng, rng.choice(_TEXTS))
        )
    try:
        made = settings_from_config(
            endpoint=rng.choice(("host", "", "https://h1")),
            job_id=nasty_text(rng, "job"),
            min_nodes=rng.choice((1, 2, 0, -1)),
            max_nodes=rng.choice((1, 4, 2**70)),
            local_addr=rng.choice((None, "", nasty_text(rng, "10.0.0.1"))),
            config=config,
            environ={"RDZV_ETCD_USER": nasty_text(rng, "user"), "X": nasty_text(rng, "3")},
        )
    except SettingsError as error:
        str(error).encode(errors="backslashreplace")
        return
    assert made.timing.lease_ttl_s >= 2
    made.prefix.encode()


def store_value(rng: random.Random) -> None:
    value = nasty_bytes(rng, rng.choice((b"=value", b"#1,-5", b"#3,9223372036854775807", b"=12")))
    kv = KeyValue(nasty_bytes(rng, b"/k"), value, 1, 2, rng.choice((1, 2, 2**63 - 1)))
    _expect(lambda: (content_of(kv), number_of(kv)))


def keys(rng: random.Random) -> None:
    """Key decoding, and whole views of foreign keys among ours."""
    key = nasty_bytes(rng, rng.choice((KEYS.node("a~1~x"), KEYS.round, KEYS.change, KEYS.leader)))
    value = _value(rng, f"{rng.choice((NODE_TEXT, FORMED_TEXT))}}}".encode())
    kv = KeyValue(key, value, 5, 6, 1)
    StoreKeys(KEYS.store(1, "run")).name(key)
    read = GetResult(7, (kv,), 1)
    _expect(lambda: control_from(KEYS, read))
    _expect(lambda: nodes_from(KEYS, read, 0.0))
    empty = control_from(KEYS, GetResult(1, (), 0))
    _expect(lambda: control_after(KEYS, empty, 7, [Event(EventKind.PUT, kv)]))


@cache
def _certificates() -> tuple[tempfile.TemporaryDirectory[str], tuple[bytes, ...]]:
    """A folder that goes with the process, and good TLS files."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    make_certificates(Path(folder.name))
    files = sorted(Path(folder.name).iterdir())
    return folder, tuple(
        path.read_bytes() for path in files if path.suffix in (".pem", ".crt", ".key")
    )


def tls_files(rng: random.Random) -> None:
    folder, contents = _certificates()
    bad = [Path(folder.name) / f"bad{number}" for number in range(3)]
    for path in bad:
        content = rng.choice(contents)
        path.write_bytes(content if rng.random() < 0.3 else nasty_bytes(rng, content))
    ca, cert, key = (rng.choice((path, path, None)) for path in bad)
    _expect(lambda: channel_credentials(Tls(ca, cert, key)))


TARGETS: dict[str, Shot] = {
    **{kind: _value_of(kind) for kind in WRITTEN},
    "endpoints": endpoints,
    "configuration": configuration,
    "store_value": store_value,
    "keys": keys,
    "tls_files": tls_files,
    "nodes": nodes,
}
COSTLY = {"tls_files": 10, "nodes": 1000}
"""Targets of which one input costs as much as so many of others."""
