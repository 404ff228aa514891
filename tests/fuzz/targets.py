"""Every parser of what comes from outside, with good input to start from; and whole nodes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rdzv_etcd.errors import RdzvEtcdError, SettingsError
from rdzv_etcd.etcd.auth import channel_credentials
from rdzv_etcd.etcd.port import Event, EventKind, GetResult, KeyValue
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import (
    Accusation,
    Change,
    Closure,
    Drain,
    Ended,
    Leader,
    NodeInfo,
    Refused,
    Round,
    Slices,
)
from rdzv_etcd.protocol.store import StoreKeys, content_of, number_of
from rdzv_etcd.protocol.views import control_after, control_from, nodes_from
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.connection import Tls, parse_endpoints
from rdzv_etcd.settings.options import NAMES
from rdzv_etcd.settings.parse import settings_from_config
from tests.fuzz.mutate import NASTY, nasty_bytes, nasty_json, nasty_text
from tests.fuzz.nodes import nodes
from tests.support.certificates import make_certificates

Shot: TypeAlias = Callable[[random.Random], None]
"""Makes one input and gives it to the parser."""

KEYS = JobKeys("/rdzv_etcd", "a job/ü")
_SETTINGS = JobSettings(1, 4, 1)
_RECORD = Round(3, "run", ("a~1~x", "b~2~y"), _SETTINGS, "10.0.0.1", 29500, 0x7F, 5)
_CLOSED = Round(
    3, "run", ("a~1~x",), _SETTINGS, "h", 1, 0x7F, 5, 9, ("c",), Closure("a", "done", True, 1.5)
)
_LARGE = Round(
    3, "run", (), JobSettings(1, 400), "h", 1, 0x7F, 5, slices=Slices(300, 10, "run.2.9")
)
_NODE = NodeInfo("a~1~x", "10.0.0.1", 29500, 4, _SETTINGS, "rack1", "SIGTERM", 77, because="?")
_ENDPOINTS = (
    "host", "h1:2379,h2:2379", "https://h1,https://h2:1", "[2001:db8::1]:2379", "http://[::1]/",
)  # fmt: skip
_TEXTS = (
    "10",
    "0.5",
    "https",
    "env:X",
    "SLURM_PROCID",
    "value:3",
    "/p",
    "yes",
    "1e400",
    "/dev/null",
)


def _value(rng: random.Random, valid: bytes) -> bytes:
    return (nasty_json if rng.random() < 0.6 else nasty_bytes)(rng, valid)


def _decodes(decode: Callable[[bytes], object], *valid: bytes) -> Shot:
    return lambda rng: _expect(lambda: decode(_value(rng, rng.choice(valid))))


def _expect(parse: Callable[[], object]) -> None:
    try:
        parse()
    except RdzvEtcdError as error:
        str(error)


def endpoints(rng: random.Random) -> None:
    _expect(lambda: parse_endpoints(nasty_text(rng, rng.choice(_ENDPOINTS))))


def configuration(rng: random.Random) -> None:
    config: dict[str, object] = {}
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(list(NAMES)) if rng.random() < 0.9 else nasty_text(rng, "lease_ttl")
        config[name] = (
            rng.choice(NASTY) if rng.random() < 0.5 else nasty_text(rng, rng.choice(_TEXTS))
        )
    _expect(
        lambda: settings_from_config(
            endpoint="host",
            job_id=nasty_text(rng, "job"),
            min_nodes=rng.choice((1, 2, 0, -1)),
            max_nodes=rng.choice((1, 4, 2**70)),
            local_addr=rng.choice((None, "", nasty_text(rng, "10.0.0.1"))),
            config=config,
            environ={"RDZV_ETCD_USER": nasty_text(rng, "user"), "X": nasty_text(rng, "3")},
        )
    )


def store_value(rng: random.Random) -> None:
    value = nasty_bytes(rng, rng.choice((b"=value", b"#1,-5", b"#3,9223372036854775807", b"=12")))
    kv = KeyValue(nasty_bytes(rng, b"/k"), value, 1, 2, rng.choice((1, 2, 2**63 - 1)))
    _expect(lambda: (content_of(kv), number_of(kv)))


def keys(rng: random.Random) -> None:
    """Key decoding, and whole views of keys that somebody else has written among ours."""
    key = nasty_bytes(rng, rng.choice((KEYS.node("a~1~x"), KEYS.round, KEYS.change, KEYS.leader)))
    value = _value(rng, rng.choice((values.encode_node(_NODE), values.encode_round(_RECORD))))
    kv = KeyValue(key, value, 5, 6, 1)
    StoreKeys(KEYS.store(1, "run")).name(key)
    read = GetResult(7, (kv,), 1)
    _expect(lambda: control_from(KEYS, read))
    _expect(lambda: nodes_from(KEYS, read, 0.0))
    empty = control_from(KEYS, GetResult(1, (), 0))
    _expect(lambda: control_after(KEYS, empty, 7, [Event(EventKind.PUT, kv)]))


def job_keys(rng: random.Random) -> None:
    """Every job id has keys of its own, whatever characters it has."""
    job_id = nasty_text(rng, "a/job")
    try:
        mine = JobKeys("/rdzv_etcd", job_id)
        assert mine.round in mine.below
        assert mine.root.count(b"/") == 3
    except SettingsError:
        assert not job_id


COSTLY = {"tls_files": 10, "nodes": 1000}
"""Targets of which one input costs as much as so many of others."""


@contextmanager
def targets() -> Iterator[dict[str, Shot]]:
    """All parsers by name; the TLS files lie in a folder that goes with the block."""
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "endpoints": endpoints,
            "configuration": configuration,
            "round": _decodes(
                lambda value: values.decode_round(KEYS.round, value),
                values.encode_round(_RECORD),
                values.encode_round(_CLOSED),
                values.encode_round(_LARGE),
            ),
            "slice": _decodes(
                lambda value: values.decode_slice(KEYS.slice(3, "run.2.9", 7), value),
                values.encode_slice({"a~1~x": 0, "b~2~y": 299}),
            ),
            "change": _decodes(
                lambda value: values.decode_change(KEYS.change, value),
                values.encode_change(Change("run", 3, ("c",), {"a~1~x": "left"}, 2, {"c": "?"})),
            ),
            "drain": _decodes(
                lambda value: values.decode_drain(KEYS.drain("a~1~x"), value),
                values.encode_drain(Drain("an operator", "maintenance", 7)),
            ),
            "ended": _decodes(
                lambda value: values.decode_ended(KEYS.ended, value),
                values.encode_ended([Ended("run", Closure("a~1~x", "done", True, 1.5), 7)] * 2),
            ),
            "epoch": _decodes(
                lambda value: values.decode_epoch(KEYS.epoch, value),
                values.encode_epoch(1_800_000_000_000_000),
            ),
            "refused": _decodes(
                lambda value: values.decode_refused(KEYS.refused, value),
                values.encode_refused(Refused("a~1~x", _SETTINGS, 1.5, "its gate said no")),
            ),
            "leader": _decodes(
                lambda value: values.decode_leader(KEYS.leader, value),
                values.encode_leader(Leader("a~1~x", _SETTINGS)),
            ),
            "node": _decodes(
                lambda value: values.decode_place(KEYS.node("a~1~x"), "a~1~x", value),
                values.encode_node(_NODE),
            ),
            "accusation": _decodes(
                lambda value: values.decode_place(KEYS.node("a~1~x"), "a~1~x", value),
                values.encode_accusation(Accusation("b~1~x", "its process exited", True)),
            ),
            "store_value": store_value,
            "keys": keys,
            "job_keys": job_keys,
            "tls_files": _tls_files(Path(folder)),
            "nodes": nodes,
        }


def _tls_files(folder: Path) -> Shot:
    good = make_certificates(folder)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".pem", ".crt", ".key")]
    contents = [path.read_bytes() for path in files]
    assert good
    assert contents
    bad = [folder / f"bad{number}" for number in range(3)]

    def shoot(rng: random.Random) -> None:
        for path in bad:
            content = rng.choice(contents)
            path.write_bytes(content if rng.random() < 0.3 else nasty_bytes(rng, content))
        ca, cert, key = (rng.choice((path, path, None)) for path in bad)
        _expect(lambda: channel_credentials(Tls(ca, cert, key)))

    return shoot
