"""Makes ``etcd3.etcdrpc`` importable under every protobuf from 3.20 on, and hands it out.

Knows how etcd3 0.12.0's generated files are laid out and what they must offer to etcd3's own code.
Must not know what the messages mean, nor open any connection.

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
from rdzv_etcd.etcd import grpc_start  # noqa: F401 - before etcd3, which imports grpc

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
