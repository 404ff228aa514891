"""What ``import rdzv_etcd`` gives, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rdzv_etcd
from rdzv_etcd.group.connect import Options
from rdzv_etcd.settings import OPTIONS
from rdzv_etcd.settings.fields import Kind

_USE = """
import sys
import rdzv_etcd

before = {name for name in sys.modules if name.startswith("rdzv_etcd.")}
assert before == set(), before
assert rdzv_etcd.__version__
try:
    raise rdzv_etcd.errors.SettingsError("wrong")
except rdzv_etcd.errors.RdzvEtcdError:
    pass
heavy = ("grpc", "google", "etcd3", "tenacity", "torch", "rdzv_etcd.group", "rdzv_etcd.etcd")
print(sorted(name for name in sys.modules if name.startswith(heavy)))
"""


def test_the_errors_and_the_version_are_there_and_nothing_heavy_is_loaded_for_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _USE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", rdzv_etcd.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rdzv_etcd, name) is not None
    assert name in dir(rdzv_etcd)


_KINDS = {
    Kind.SECONDS: "float",
    Kind.WHOLE_SECONDS: "int",
    Kind.COUNT: "int",
    Kind.FLAG: "bool",
    Kind.FILE: "str | Path",
    Kind.TEXT: "str",
}


def test_connect_takes_every_option_by_its_name_and_in_its_unit() -> None:
    named = {name: hint.__forward_arg__ for name, hint in Options.__annotations__.items()}
    assert named == {option.name: _KINDS[option.kind] for option in OPTIONS}


_DIFFERENT = {
    "World": {"members", "node_ids"},  # methods there, because they may wait
    "RoundStore": {"keep"},  # for torch's C++
}


def _public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", ["Group", "World", "RoundStore"])
def test_asyncio_s_face_has_the_same_names_and_parameters(name: str) -> None:
    one, other = getattr(rdzv_etcd, name), getattr(rdzv_etcd.aio, name)
    missing = _public(one).keys() ^ _public(other).keys()
    assert missing <= _DIFFERENT.get(name, set())
    assert one.__annotations__ == other.__annotations__
    for method in _public(one).keys() & _public(other).keys() - _DIFFERENT.get(name, set()):
        mine, its = _public(one)[method], _public(other)[method]
        assert callable(mine) == callable(its), method
        if callable(mine) and callable(its):
            parameters = inspect.signature(mine).parameters
            assert parameters == inspect.signature(its).parameters, method


def test_asyncio_s_connect_takes_the_same() -> None:
    parameters = inspect.signature(rdzv_etcd.connect).parameters
    assert inspect.signature(rdzv_etcd.aio.connect).parameters == parameters


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="'rdzv_etcd' has no attribute 'Grup'"):
        rdzv_etcd.Grup  # noqa: B018
