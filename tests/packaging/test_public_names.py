"""What ``import rdzv_etcd`` gives, and what it costs. tests/typed uses every public name."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import sys
import typing

import pytest

import rdzv_etcd
from rdzv_etcd.settings import OPTIONS
from rdzv_etcd.settings.fields import OptionKind
from rdzv_etcd.world.connect import Options
from tests.support.processes import output

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
heavy = ("grpc", "google", "etcd3", "tenacity", "torch", "rdzv_etcd.node", "rdzv_etcd.etcd")
print(sorted(name for name in sys.modules if name.startswith(heavy)))
"""


def test_the_errors_and_the_version_are_there_and_nothing_heavy_is_loaded_for_them() -> None:
    assert output([sys.executable, "-c", _USE]).strip() == "[]"


_LOOK = """
import inspect, sys
import rdzv_etcd
from rdzv_etcd import *

inspect.getmembers(rdzv_etcd)
print("torch" in globals(), "torch" in sys.modules, end=" ")
print(rdzv_etcd.torch.run.__module__)
"""


def test_torch_is_loaded_only_for_who_names_it() -> None:
    """``import *`` must not put something else in the place of the user's torch."""
    words = output([sys.executable, "-c", _LOOK]).split()
    assert words == ["False", "False", "rdzv_etcd.torch.recovery"]


_KINDS = {
    OptionKind.SECONDS: "float",
    OptionKind.WHOLE_SECONDS: "int",
    OptionKind.COUNT: "int",
    OptionKind.COUNT_OR_ALL: "int | str",
    OptionKind.FLAG: "bool",
    OptionKind.FILE: "str | Path",
    OptionKind.TEXT: "str",
}


def test_connect_takes_every_option_by_its_name_and_in_its_unit() -> None:
    named = {name: hint.__forward_arg__ for name, hint in Options.__annotations__.items()}
    assert named == {option.name: _KINDS[option.kind] for option in OPTIONS}


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("Observer", "job state events close"),
        ("JobEvents", "next is_closed close"),
        ("Listener", "address port socket detach close"),
        ("Closure", "by reason succeeded wall_s"),
    ],
)
def test_no_public_attribute_is_gone(name: str, promised: str) -> None:
    """The programs of tests/typed use all of groups, worlds and stores."""
    faces = [rdzv_etcd, rdzv_etcd.aio] if hasattr(rdzv_etcd.aio, name) else [rdzv_etcd]
    for face in faces:
        kind = getattr(face, name)
        there = {*dir(kind), *getattr(kind, "__slots__", ()), *getattr(kind, "__annotations__", ())}
        assert set(promised.split()) - there == set(), face.__name__


def test_no_field_of_a_frozen_value_is_gone() -> None:
    """In their order: they can be given, and matched, by position."""
    fields = {
        "Master": "address port",
        "WorldMember": "rank node_id host address data",
        "Lost": "members waiting",
        "Left": "members waiting",
        "Waiting": "nodes because",
        "Finished": "by reason",
        "Failed": "by reason",
    }
    for name, promised in fields.items():
        there = [field.name for field in dataclasses.fields(getattr(rdzv_etcd, name))]
        assert there[: len(promised.split())] == promised.split(), name


_DIFFERENT = {"members", "node_ids", "store", "keep", "worlds", "events"}
"""What each face has its own way of; its name is there in both, but for what is torch's."""


@pytest.mark.parametrize("name", ["Group", "World", "RoundStore", "Observer", "JobEvents"])
def test_both_faces_have_the_same_names_parameters_and_documentation(name: str) -> None:
    one, other = getattr(rdzv_etcd, name), getattr(rdzv_etcd.aio, name)
    public = {each for each in {*dir(one), *dir(other)} if not each.startswith("_")}
    for each in public - {"keep"}:
        mine, its = getattr(one, each), getattr(other, each)
        if each in _DIFFERENT:
            continue
        assert (mine.__doc__ or "") == (its.__doc__ or "") != "", each
        if callable(mine):
            assert inspect.signature(mine).parameters == inspect.signature(its).parameters, each
            waits = inspect.iscoroutinefunction(its)
            assert mine is its or waits, each  # the same, or made from the same
            assert mine.__qualname__ == f"{name}.{each}" or not waits


def test_a_call_is_documented_as_if_it_were_written_in_its_face() -> None:
    for face in (rdzv_etcd, rdzv_etcd.aio):
        assert typing.get_type_hints(face.Group.fail) == {
            "reason": str,
            "force": bool,
            "return": bool,
        }
        shown = pydoc.plain(pydoc.render_doc(face.Group.join))
        assert "join(self, timeout_s: 'float | None' = None, *, because: 'str' = '')" in shown
        assert "-> 'World'" in shown
        assert "Arrive for the next round" in shown


def test_asyncio_s_connect_takes_the_same() -> None:
    parameters = inspect.signature(rdzv_etcd.connect).parameters
    assert inspect.signature(rdzv_etcd.aio.connect).parameters == parameters


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="'rdzv_etcd' has no attribute 'Grup'"):
        rdzv_etcd.Grup  # noqa: B018
