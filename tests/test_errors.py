"""The library's errors travel: between processes, and as copies."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import errors
from rdzv_etcd.errors import JobClosedError, RdzvEtcdError

_GIVEN: dict[str, Any] = {
    "message": "it went wrong\nbadly",
    "endpoints": {"etcd-0:2379": "refused"},
    "error": ZeroDivisionError("by zero"),
    "change": rdzv_etcd.Lost({"a~1~x": "its lease ran out"}),
    "arrived": ["a~1~x"],
    "missing": ["b~1~y"],
    "keys": ["seed"],
    "succeeded": True,
    "was_member": False,
}
"""What the constructors take, by name; anything else gets a number."""


def kinds(base: type[RdzvEtcdError] = RdzvEtcdError) -> Iterator[type[RdzvEtcdError]]:
    if base.__module__ == errors.__name__:
        yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def made(kind: type[RdzvEtcdError]) -> RdzvEtcdError:
    given = {name: _GIVEN.get(name, 5) for name in inspect.signature(kind.__init__).parameters}
    del given["self"]
    return kind(**given)


@pytest.mark.parametrize("kind", list(dict.fromkeys(kinds())))
def test_every_error_can_be_pickled_and_copied(kind: type[RdzvEtcdError]) -> None:
    error = made(kind)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert getattr(again, "msg", None) == getattr(error, "msg", None)  # an ImportError's


def work() -> None:
    raise JobClosedError("no more data", closed_by="a~1~x", succeeded=True, was_member=True)


def test_an_error_comes_back_from_a_pool_of_processes() -> None:
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(JobClosedError, match="no more data") as caught,
    ):
        pool.submit(work).result()
    assert caught.value.closed_by == "a~1~x"
    assert caught.value.succeeded
