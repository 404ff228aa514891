"""Whatever torch's own stores refuse with a TypeError, a store on etcd refuses with one, and leaves
everything as it was; whatever they take, it takes with the same result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistStoreError

from rdzv_etcd.errors import MisuseError
from rdzv_etcd.torch_plugin.store import EtcdStore
from rdzv_etcd.world.round_store import RoundStore
from tests.store.conftest import Place

Call: TypeAlias = Callable[[Any], object]

BRIEF = timedelta(milliseconds=50)


class Two:
    def __index__(self) -> int:
        return 2


AMOUNTS: list[Any] = [
    *(0, -1, 2**31, 2**63 - 1, -(2**63), True, Two(), np.int32(3), np.int64(-3), np.uint8(3)),
    *(2**63, -(2**63) - 1, 2**64 + 5, -(2**64), 10**30, 10**5000, np.uint64(2**63)),
    *(1.0, 1.5, float("nan"), float("inf"), np.float64(3), None, "1", b"1", [1], object()),
]
KEYS: list[Any] = [
    *(
        "",
        "a/b",
        "\0",
        "a\0b",
        "\N{GRINNING FACE}",
        "k" * 2000,
        np.str_("k"),
        b"k",
        bytearray(b"k"),
    ),
    *("a\ud800", "\udcff", None, 1, 1.5, True, ["k"], ("k",), {}, object(), memoryview(b"k")),
]
VALUES: list[Any] = [
    *("", "v", b"", b"\xff\0", bytearray(b"v"), "\N{GRINNING FACE}", np.str_("v"), np.bytes_(b"v")),
    *("a\ud800", None, 1, 1.5, True, ["v"], {}, object(), np.array([1])),
]
SEVERAL: list[Any] = [
    [],
    ["a"],
    ["a", "b", "a"],
    ("a", "b"),
    [b"a"],
    "ab",
    b"ab",
    None,
    1,
    ["a", None],
]

BY_KEY: dict[str, Callable[[Any, Any], object]] = {
    "set": lambda store, key: (store.set(key, "v"), store.get(key)),
    "add": lambda store, key: store.add(key, 1),
    "append": lambda store, key: (store.append(key, "v"), store.get(key)),
    "compare_set": lambda store, key: store.compare_set(key, "", "v"),
    "check": lambda store, key: store.check([key]),
    "delete_key": lambda store, key: store.delete_key(key),
    "multi_set": lambda store, key: (store.multi_set([key], ["v"]), store.multi_get([key])),
}
BY_VALUE: dict[str, Callable[[Any, Any], object]] = {
    "set": lambda store, value: (store.set("k", value), store.get("k")),
    "append": lambda store, value: (store.append("k", value), store.get("k")),
    "compare_set, expected": lambda store, value: store.compare_set("k", value, "x"),
    "compare_set, desired": lambda store, value: store.compare_set("k", "", value),
    "multi_set": lambda store, value: (store.multi_set(["k"], [value]), store.get("k")),
}


def outcome(store: Store, call: Call) -> object:
    """What a call gives: its result, or that it was refused."""
    try:
        return call(store)
    except TypeError:
        return TypeError


def _swapped(call: Callable[[Any, Any], object], argument: Any, store: Any) -> object:
    return call(store, argument)


def same_as_torch(place: Place, call: Call, timeout: timedelta | None = None) -> None:
    """``timeout``: of a call that waits for what does not come."""
    store, torchs = place.open(), HashStore()
    for each in (store, torchs):
        if timeout is not None:
            each.set_timeout(timeout)
        each.set("a", "1")
        each.set("b", "2")
    expected = outcome(torchs, call)
    assert outcome(store, call) == expected
    if expected is TypeError:
        assert store.list_keys() == ["a", "b"]


@pytest.mark.parametrize("amount", AMOUNTS, ids=lambda amount: f"{type(amount).__name__}")
def test_amounts(place: Place, amount: Any) -> None:
    same_as_torch(place, lambda store: store.add("k", amount))


@pytest.mark.parametrize("first", [2**63 - 1, -(2**63), 2**62])
@pytest.mark.parametrize("second", [1, -1, 2**62, -(2**62) - 1])
def test_sums_beyond_64_bits_wrap(place: Place, first: int, second: int) -> None:
    same_as_torch(place, lambda store: [store.add("k", each) for each in (first, second, second)])


@pytest.mark.parametrize("call", BY_KEY.values(), ids=BY_KEY)
def test_keys(place: Place, call: Callable[[Any, Any], object]) -> None:
    for key in KEYS:
        one: Call = partial(_swapped, call, key)
        store, torchs = place.open(), HashStore()
        assert outcome(store, one) == outcome(torchs, one), repr(key)
        if isinstance(key, str | bytes) and outcome(torchs, one) is not TypeError:
            store.delete_key(key)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", BY_VALUE.values(), ids=BY_VALUE)
def test_values(place: Place, call: Callable[[Any, Any], object]) -> None:
    for value in VALUES:
        one: Call = partial(_swapped, call, value)
        store = place.open()
        assert outcome(store, one) == outcome(HashStore(), one), repr(value)
        store.delete_key("k")


@pytest.mark.parametrize("name", ["check", "multi_get", "wait"])
def test_several_keys(place: Place, name: str) -> None:
    for keys in SEVERAL:
        same_as_torch(
            place, partial(_swapped, lambda store, keys: getattr(store, name)(keys), keys), BRIEF
        )


@pytest.mark.parametrize("timeout", [timedelta(days=9999), 5.0, 1e9, timedelta.max])
def test_a_timeout_may_be_as_long_as_torch_lets_it_be(place: Place, timeout: Any) -> None:
    store = place.open()
    store.set("k", "v")
    assert store.wait(["k"], timeout) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("timeout", [timedelta(seconds=-1), timedelta.min, -0.5])
def test_a_timeout_below_zero_is_over_at_once(place: Place, timeout: Any) -> None:
    store = place.open()
    store.set("k", "v")
    store.wait(["k"], timeout)
    with pytest.raises(DistStoreError, match="keys: absent"):
        store.wait(["absent"], timeout)


@pytest.mark.parametrize("timeout", ["5", float("nan"), [5], object()])
def test_a_timeout_is_a_time(place: Place, timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout must be a timedelta"):
        place.open().wait(["k"], timeout)


@pytest.mark.parametrize(
    "amount",
    [2**63, -(2**63) - 1, 2**64 + 5, 10**5000],
    ids=["2**63", "-2**63-1", "2**64+5", "10**5000"],
)
def test_the_librarys_store_refuses_amounts_beyond_64_bits(place: Place, amount: int) -> None:
    store: RoundStore = place.round_store()
    with pytest.raises(MisuseError, match=r"'k' must be at least -2\*\*63 and below 2\*\*63"):
        store.add("k", amount)
    assert not store.check(["k"])


def test_the_type_is_named(place: Place) -> None:
    store: EtcdStore = place.open()
    with pytest.raises(TypeError, match=r"key .*None"):
        store.get(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not NoneType"):
        store.set("k", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whole number"):
        store.add("k", 1.5)  # type: ignore[arg-type]
