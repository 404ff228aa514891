"""Checks that the etcd layer works under every protobuf it promises, each in its own environment.

    python tools/check_protobuf_versions.py [--etcd PATH] [--only 5.29 ...]

For each protobuf version: a fresh virtual environment with a grpcio of the same time, etcd3 and
this package (both with --no-deps: torch is not needed here), and no environment variable set. In
it, with warnings as errors: put, get, watch and lease through this library's client and through
etcd3's own, and the store's transactions, which are nested and have all kinds of parts, on a real
etcd server. Prints a table; the exit code is 1 if anything failed.

Needs a package index and an etcd binary (``--etcd``, else ``RDZV_ETCD_BINARY``, else ``etcd`` on
PATH).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Combination:
    """A protobuf release line and a grpcio that was current with it."""

    protobuf: str
    grpcio: str

    @property
    def requirements(self) -> list[str]:
        return [f"protobuf=={self.protobuf}.*", f"grpcio=={self.grpcio}.*"]


COMBINATIONS = (
    Combination("3.20", "1.49"),
    Combination("4.25", "1.62"),
    Combination("5.29", "1.71"),
    Combination("6", "1.76"),
    Combination("7", "1"),
)

EXERCISE = """
import asyncio, os, sys, threading

environment = dict(os.environ)
from rdzv_etcd.etcd.port import Compare, EventKind, Get, Put, Relation, Target, Txn
assert "grpc" not in sys.modules and "google.protobuf" not in sys.modules, "the port is not light"
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.settings.connection import Connection, Endpoint
assert dict(os.environ) == environment, "the environment was changed"

async def ours(port):
    client = EtcdClient(Connection((Endpoint("127.0.0.1", port),)))
    await client.connect()
    lease = await client.grant(60)
    watch = client.watch(b"/ours/", b"/ours0", start_revision=lease.revision + 1)
    guard = Compare(b"/ours/a", Target.VERSION, Relation.EQUAL, 0)
    done = await client.txn(Txn((guard,), (Put(b"/ours/a", b"1", lease.lease_id),)))
    assert done.succeeded
    got = await client.get(Get(b"/ours/a"))
    assert [kv.value for kv in got.kvs] == [b"1"]
    batch = await asyncio.wait_for(watch.__anext__(), 20)
    assert batch.revision == done.revision
    assert await client.keep_alive(lease.lease_id) == 60
    assert await client.revoke(lease.lease_id)
    batch = await asyncio.wait_for(watch.__anext__(), 20)
    assert batch.events[0].kind is EventKind.DELETE
    await stored(client)
    await client.close()

async def stored(client):
    lease = await client.grant(60)
    keys = JobKeys("/ours", "job").store(1)
    await client.txn(Txn((), (StoreKeys(keys).begin(lease.lease_id),)))
    store = KeyValueStore(client, keys, lease.lease_id, writer="it", clock=SystemClock())
    assert [await store.add("n", k, 20) for k in (2, 2, 3, 0)] == [2, 4, 7, 7]
    assert await store.compare_set("c", b"", b"1", 20) == b"1"
    assert await store.compare_set("c", b"2", b"3", 20) == b"1"
    await store.append("c", b"!", 20)
    await store.multi_set([("d", b"4"), ("e", b"5")], 20)
    assert await store.multi_get(["c", "d", "e"], 20) == [b"1!", b"4", b"5"]
    waiting = asyncio.ensure_future(store.get("q", 20))
    await store.set("q", b"6", 20)
    assert await waiting == b"6"
    assert await store.delete("d", 20)
    assert sorted(await store.list_keys(20)) == ["c", "e", "n", "q"]
    assert await client.revoke(lease.lease_id)

def theirs(port):
    import etcd3
    client = etcd3.client(port=port)
    lease = client.lease(60)
    events, cancel = client.watch("/theirs")
    client.put("/theirs", "2", lease)
    assert client.get("/theirs")[0] == b"2"
    assert type(next(events)).__name__ == "PutEvent"
    cancel()
    assert client.transaction(
        [client.transactions.version("/theirs") == 1], [client.transactions.delete("/theirs")], []
    )[0]
    lease.revoke()
    return client  # etcd3's watch thread dies with a traceback when its client is closed

port = int(sys.argv[1])
asyncio.run(ours(port))
left_open = theirs(port)
import google.protobuf, grpc
print(google.protobuf.__version__, grpc.__version__, flush=True)
os._exit(0)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check all supported protobuf versions.")
    parser.add_argument("--etcd", default=os.environ.get("RDZV_ETCD_BINARY", "etcd"))
    parser.add_argument("--only", nargs="*", help="protobuf versions, as in the table")
    arguments = parser.parse_args()
    chosen = [c for c in COMBINATIONS if not arguments.only or c.protobuf in arguments.only]
    with tempfile.TemporaryDirectory(prefix="rdzv-etcd-protobuf-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        with running_etcd(arguments.etcd, folder) as port:
            failures = [c for c in chosen if not check(c, folder, wheel, port)]
    return 1 if failures or not chosen else 0


def check(combination: Combination, folder: Path, wheel: Path, port: int) -> bool:
    """Try one combination, print its line of the table, and tell whether it worked."""
    python = make_environment(combination, folder, wheel)
    script = folder / "exercise.py"
    script.write_text(EXERCISE, encoding="utf-8")
    unwanted = ("PROTOCOL_BUFFERS", "GRPC_", "PYTHON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    done = subprocess.run(
        [python, "-W", "error", script, str(port)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    worked = done.returncode == 0 and not done.stderr
    versions = done.stdout.strip() or "-"
    print(f"protobuf {combination.protobuf:<6} {versions:<18} {'ok' if worked else 'FAILED'}")
    if not worked:
        print(done.stderr)
    sys.stdout.flush()
    return worked


def make_environment(combination: Combination, folder: Path, wheel: Path) -> Path:
    """Create the virtual environment of one combination and return its interpreter."""
    place = folder / f"protobuf-{combination.protobuf}"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip(python, "install", *combination.requirements, "tenacity", "six")
    pip(python, "install", "--no-deps", "etcd3==0.12.*", str(wheel))
    return python


def build_wheel(folder: Path) -> Path:
    """Build this package from a copy, so that no build output lands in the working tree."""
    copy = folder / "source"
    copy.mkdir()
    for item in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / item).exists():
            shutil.copy(ROOT / item, copy)
    shutil.copytree(ROOT / "rdzv_etcd", copy / "rdzv_etcd")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(copy))
    return next(folder.glob("rdzv_etcd-*.whl"))


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)} failed:\n{done.stderr}")


@contextmanager
def running_etcd(binary: str, folder: Path) -> Iterator[int]:
    """Run an etcd on free loopback ports; yields its client port."""
    client, peer = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [
        binary,
        "--data-dir",
        str(folder / "etcd"),
        "--initial-cluster",
        f"default={peer_url}",
    ]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until_listening(client, process)
        yield client
    finally:
        process.kill()
        process.wait()


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("etcd did not start") from None
            time.sleep(0.05)  # a starting server tells nobody
        else:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
