"""etcd's protobuf messages: their classes, from the package etcd3, and the port's values in them.

Knows how etcd3 0.12.0's generated files are laid out, and both vocabularies. Must not know
connections or retries.

The generated ``kv_pb2``, ``auth_pb2`` and ``rpc_pb2`` build their descriptors by hand, which
protobuf 4 and later refuse. The serialized descriptors inside them are sound, so they are read out
of the source text, put into a pool of our own (no clash with another package's ``rpc.proto``), and
modules with the classes made from them take the generated modules' place before etcd3 is imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import threading
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from rdzv_etcd.errors import StubsError
from rdzv_etcd.etcd import (
    grpc_start,  # noqa: F401 - before etcd3, which imports grpc
    port,
)

_PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # in the order in which they depend on each other
_SERIALIZED = re.compile(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)")

_lock = threading.Lock()
_loaded: ModuleType | None = None


def load() -> Any:
    """Return the module ``etcd3.etcdrpc``: message classes and ``KVStub``, ``WatchStub``, ...

    Blocks for some ten milliseconds on the first call; later calls are free. May be called from
    any thread. If etcd3 was imported before (which works under protobuf 3.20) that one is used.
    Raises :class:`StubsError` if etcd3 is not installed or is another version.
    """
    global _loaded  # noqa: PLW0603 - one per process, as sys.modules is
    if _loaded is None:
        with _lock:
            if _loaded is None:
                if f"{_PACKAGE}.rpc_pb2" not in sys.modules:
                    _install()
                _loaded = importlib.import_module(_PACKAGE)
    return _loaded


def _install() -> None:
    """Put our modules where etcd3's own import statements find them."""
    specs = {name: _find(name) for name in _FILES}
    serialized = {name: _serialized_descriptor(spec) for name, spec in specs.items()}
    modules = _build(serialized, specs)
    sys.modules.update(modules)
    try:
        package = importlib.import_module(_PACKAGE)
    except BaseException:
        for name in modules:
            sys.modules.pop(name, None)
        raise
    for name, module in modules.items():
        # The import system sets a submodule as its parent's attribute only when it loads it.
        setattr(package, name.rpartition(".")[2], module)


def _find(name: str) -> ModuleSpec:
    """Find a generated module without importing its parents (etcd3's __init__ would fail)."""
    root = importlib.util.find_spec("etcd3")
    if root is None:
        raise StubsError(
            "the package etcd3 is not installed; install etcd3 0.12 (pip install etcd3)"
        )
    package = PathFinder.find_spec(_PACKAGE, root.submodule_search_locations)
    locations = package.submodule_search_locations if package is not None else None
    spec = PathFinder.find_spec(f"{_PACKAGE}.{name}", locations) if locations else None
    if spec is None:
        raise StubsError(f"{root.origin} has no {_PACKAGE}.{name}: this is not etcd3 0.12")
    return spec


def _serialized_descriptor(spec: ModuleSpec) -> bytes:
    """Read the serialized ``FileDescriptorProto`` out of a generated module's source."""
    source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
    found = _SERIALIZED.search(source) if source is not None else None
    if found is None:
        raise StubsError(f"{spec.origin} is not the file that etcd3 0.12 ships")
    text = ast.literal_eval(found.group(1))
    return bytes(text, "latin-1")  # what the file's own `_b` does


def _build(serialized: dict[str, bytes], specs: dict[str, ModuleSpec]) -> dict[str, ModuleType]:
    """Make one module per descriptor, with what protoc's output for it would define."""
    pool: Any = descriptor_pool.DescriptorPool()
    make_class = _class_maker(pool)
    modules: dict[str, ModuleType] = {}
    for name, content in serialized.items():
        pool.AddSerializedFile(content)
        path = descriptor_pb2.FileDescriptorProto.FromString(content).name
        file = pool.FindFileByName(path)
        module = ModuleType(f"{_PACKAGE}.{name}", f"Classes of {path}, made by rdzv_etcd.")
        module.__spec__ = specs[name]
        module.__file__ = specs[name].origin
        module.__package__ = _PACKAGE
        contents: dict[str, Any] = {"DESCRIPTOR": file}
        for message_name, descriptor in file.message_types_by_name.items():
            contents[message_name] = make_class(descriptor)
        for enum_name, descriptor in file.enum_types_by_name.items():
            contents[enum_name] = EnumTypeWrapper(descriptor)
            contents.update({value.name: value.number for value in descriptor.values})
        vars(module).update(contents)
        modules[module.__name__] = module
    return modules


def _class_maker(pool: Any) -> Any:
    """Return ``descriptor -> class``; protobuf renamed it (GetMessageClass since 4.22)."""
    current = getattr(message_factory, "GetMessageClass", None)
    if current is not None:
        return current
    factory: Any = message_factory.MessageFactory(pool)
    return factory.GetPrototype


# etcdserverpb.Compare.CompareTarget / CompareResult: the numbers are part of etcd's protocol.
_TARGETS = {
    port.Target.VERSION: (0, "version"),
    port.Target.CREATE: (1, "create_revision"),
    port.Target.MOD: (2, "mod_revision"),
    port.Target.VALUE: (3, "value"),
    port.Target.LEASE: (4, "lease"),
}
_RELATIONS = {
    port.Relation.EQUAL: 0,
    port.Relation.GREATER: 1,
    port.Relation.LESS: 2,
}
_DELETE_EVENT = 1  # mvccpb.Event.DELETE


# -- requests -------------------------------------------------------------------------------------


def range_request(request: port.Get) -> Any:
    return load().RangeRequest(**_range_fields(request))


def txn_request(request: port.Txn) -> Any:
    """Build the request; never one that etcd would take for a transaction that only reads.

    etcd up to 3.5.4 crashes when it applies such a one and the caller has gone meanwhile
    (https://github.com/etcd-io/etcd/issues/14110; 3.5.5 and 3.5.6 crash in another way, #14891).
    An operation that is not a read keeps it off that path: an empty transaction is one, changes
    nothing, and needs neither space nor the right to write. It goes through etcd's log, as writes
    do.
    """
    # From plain dicts: half the time that a message object for every part takes.
    fields = _txn_fields(request)
    if all(isinstance(op, port.Get) for op in (*request.success, *request.failure)):
        fields["failure"].append({"request_txn": {}})
    return load().TxnRequest(**fields)


def watch_request(
    key: bytes, range_end: bytes | None, start_revision: int, *, puts_only: bool = False
) -> Any:
    """Build the request that opens a watch.

    Progress notifications (every ten minutes) let a quiet watch move its resume point, so that a
    later reconnect does not ask for a revision that was compacted meanwhile.
    """
    rpc = load()
    create = rpc.WatchCreateRequest(
        key=key,
        range_end=range_end or b"",
        start_revision=start_revision,
        progress_notify=True,
        filters=(rpc.WatchCreateRequest.NODELETE,) if puts_only else (),
    )
    return rpc.WatchRequest(create_request=create)


def _txn_fields(request: port.Txn) -> dict[str, Any]:
    return {
        "compare": [_compare_fields(guard) for guard in request.guards],
        "success": [_op_fields(op) for op in request.success],
        "failure": [_op_fields(op) for op in request.failure],
    }


def _compare_fields(guard: port.Compare) -> dict[str, Any]:
    target, field = _TARGETS[guard.target]
    return {
        "result": _RELATIONS[guard.relation],
        "target": target,
        "key": guard.key,
        "range_end": guard.range_end or b"",
        field: guard.operand,
    }


def _range_fields(request: port.Get) -> dict[str, Any]:
    order = {"sort_order": 2, "sort_target": 3} if request.newest_first else {}  # DESCEND, MOD
    return {
        **order,
        "key": request.key,
        "range_end": request.range_end or b"",
        "limit": request.limit,
        "keys_only": request.keys_only,
        "count_only": request.count_only,
    }


def _op_fields(op: port.Op) -> dict[str, Any]:
    if isinstance(op, port.Get):
        return {"request_range": _range_fields(op)}
    if isinstance(op, port.Put):
        return {
            "request_put": {
                "key": op.key,
                "value": op.value,
                "lease": op.lease_id,
                "ignore_value": op.ignore_value,
            }
        }
    if isinstance(op, port.Delete):
        return {"request_delete_range": {"key": op.key, "range_end": op.range_end or b""}}
    return {"request_txn": _txn_fields(op)}


# -- responses ------------------------------------------------------------------------------------


def key_value(message: Any) -> port.KeyValue:
    return port.KeyValue(
        key=message.key,
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        version=message.version,
        lease_id=message.lease,
    )


def get_result(message: Any, revision: int = 0) -> port.GetResult:
    return port.GetResult(
        revision=message.header.revision or revision,
        kvs=tuple(key_value(kv) for kv in message.kvs),
        count=message.count,
    )


def txn_result(request: port.Txn, message: Any, revision: int = 0) -> port.TxnResult:
    """Return the results of the caller's operations, without that of what :func:`txn_request`
    added."""
    at = message.header.revision or revision
    asked = request.success if message.succeeded else request.failure
    return port.TxnResult(
        revision=at,
        succeeded=message.succeeded,
        results=tuple(
            _op_result(op, response, at)
            for op, response in zip(asked, message.responses, strict=False)
        ),
    )


def event(message: Any) -> port.Event:
    kind = port.EventKind.DELETE if message.type == _DELETE_EVENT else port.EventKind.PUT
    return port.Event(kind, key_value(message.kv))


def _op_result(op: port.Op, message: Any, revision: int) -> port.OpResult:
    if isinstance(op, port.Txn):
        return txn_result(op, message.response_txn, revision)
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return get_result(message.response_range, revision)
    return port.WriteResult(getattr(message, kind).header.revision or revision)
