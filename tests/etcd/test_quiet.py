"""gRPC never writes to the console, changes no environment variable and is in no fork's way."""

from __future__ import annotations

from tests.etcd.tools import python
from tests.support.certificates import Certificates
from tests.support.processes import free_port
from tests.support.servers import EtcdServer

WRONG_CA = """
import asyncio, os, sys
from pathlib import Path
before = dict(os.environ)
from rdzv_etcd.errors import EtcdTlsError, EtcdUnavailableError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.settings.connection import Connection, Endpoint, Tls

async def contact(port, tls, error):
    client = EtcdClient(Connection((Endpoint("127.0.0.1", port),), tls, connect_timeout_s=1))
    try:
        await client.connect()
    except error as failed:
        print(failed)
    finally:
        await client.close()

asyncio.run(contact(int(sys.argv[1]), Tls(Path(sys.argv[2])), EtcdTlsError))
asyncio.run(contact(int(sys.argv[3]), None, EtcdUnavailableError))
assert dict(os.environ) == before
"""

CHILDREN = """
import asyncio, multiprocessing, os, subprocess, sys, threading
from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.settings.connection import Connection, Endpoint

def nothing():
    pass

def main(port):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    run = lambda coro: asyncio.run_coroutine_threadsafe(coro, loop).result(60)
    client = EtcdClient(Connection((Endpoint("127.0.0.1", port),)))
    lease = run(client.grant(60))
    async def watching():
        return client.watch(b"/rdzv_etcd/t/children", start_revision=lease.revision)
    watch = run(watching())
    async def busy():
        while not stop.is_set():
            assert await client.keep_alive(lease.lease_id) == 60
    stop = threading.Event()
    work = asyncio.run_coroutine_threadsafe(busy(), loop)
    for number in range(4):
        subprocess.run([sys.executable, "-c", ""], check=True)
        # with a preexec_fn it is a real fork, not vfork
        subprocess.run(["true"], check=True, preexec_fn=nothing)
        child = os.fork()
        if child == 0:
            if number % 2:
                os._exit(0)
            sys.exit(0)
        assert os.waitpid(child, 0) == (child, 0)
    worker = multiprocessing.get_context("spawn").Process(target=os.getpid)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    stop.set()
    work.result(60)
    run(client.txn(Txn((), (Put(b"/rdzv_etcd/t/children", b""),))))
    assert run(watch.__anext__()).events
    run(client.revoke(lease.lease_id))
    run(client.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

if __name__ == "__main__":
    main(int(sys.argv[1]))
    print("done")
"""

PORT_IS_LIGHT = """
import sys
import rdzv_etcd.etcd.port
heavy = {"grpc", "google.protobuf", "etcd3", "tenacity", "asyncio"} & set(sys.modules)
assert not heavy, heavy
"""


def test_failed_handshakes_and_refused_connections_print_nothing(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    done = python(WRONG_CA, str(tls_etcd.port), str(certificates.foreign_ca), str(free_port()))
    assert (done.returncode, done.stderr) == (0, "")
    tls, refused = done.stdout.splitlines()
    assert "check ca_cert" in tls
    assert "connection refused" in refused


def test_children_of_every_kind_start_and_end_while_channels_live(etcd_server: EtcdServer) -> None:
    done = python(CHILDREN, str(etcd_server.port))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_port_imports_nothing_heavy() -> None:
    done = python(PORT_IS_LIGHT)
    assert (done.returncode, done.stderr) == (0, "")
