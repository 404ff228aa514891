"""etcd3 can be imported; tools/check_protobuf_versions.py tries it under every protobuf."""

from __future__ import annotations

import pytest

from tests.etcd.tools import python
from tests.support.servers import EtcdServer

USER_PROGRAM = """
import sys
from rdzv_etcd.etcd import messages
rpc = messages.load()
assert messages.load() is rpc
import etcd3
import etcd3.etcdrpc.rpc_pb2, etcd3.etcdrpc.kv_pb2
assert rpc is etcd3.etcdrpc
assert etcd3.etcdrpc.rpc_pb2.RangeRequest is rpc.RangeRequest
assert rpc.RangeRequest.ASCEND == 1 and rpc.NOSPACE == rpc.AlarmType.Value("NOSPACE") == 1
assert rpc.RangeRequest.FromString(rpc.RangeRequest(key=b"k").SerializeToString()).key == b"k"
client = etcd3.client(port=int(sys.argv[1]))
client.put("/rdzv_etcd/t/stubs", "1")
assert client.get("/rdzv_etcd/t/stubs")[0] == b"1"
assert client.delete("/rdzv_etcd/t/stubs")
client.close()
"""

AFTER_A_FAILED_IMPORT = """
try:
    import etcd3
except (TypeError, DeprecationWarning):  # protobuf 3.20 only warns, which is an error here
    pass
from rdzv_etcd.etcd import messages
messages.load()
import etcd3
etcd3.client
"""

FROM_MANY_THREADS = """
import threading
from rdzv_etcd.etcd import messages
found, start = set(), threading.Barrier(8)
def load():
    start.wait()
    found.add(id(messages.load().TxnRequest))
threads = [threading.Thread(target=load) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 1, found
"""

BESIDE_ANOTHER_RPC_PROTO = """
from google.protobuf import descriptor_pb2, descriptor_pool
other = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="etcdserverpb")
other.message_type.add(name="RangeRequest")
descriptor_pool.Default().Add(other) if hasattr(
    descriptor_pool.Default(), "Add"
) else descriptor_pool.Default().AddSerializedFile(other.SerializeToString())
from rdzv_etcd.etcd import messages
assert messages.load().RangeRequest(key=b"k").key == b"k"
"""


def test_etcd3_works_for_the_user_afterwards(etcd_server: EtcdServer) -> None:
    done = python(USER_PROGRAM, str(etcd_server.port))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "script",
    [AFTER_A_FAILED_IMPORT, FROM_MANY_THREADS, BESIDE_ANOTHER_RPC_PROTO],
    ids=["after a failed import", "from many threads", "beside another package's rpc.proto"],
)
def test_the_classes_are_there(script: str) -> None:
    done = python(script)
    assert (done.returncode, done.stderr) == (0, "")
