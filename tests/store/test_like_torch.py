"""A store on etcd answers like torch's own ``HashStore``, which is asked the same; and what that
refuses with a TypeError, it refuses with one, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistStoreError

from tests.store.conftest import BRIEF, Place, Two

Call: TypeAlias = Callable[[Any], object]

PROGRAMS: dict[str, Call] = {
    "set again": lambda s: (s.set("k", "first"), s.set("k", "second"), s.get("k")),
    "set of one key twice": lambda s: (s.multi_set(["k"] * 2, ["1", "2"]), s.multi_get(["k"] * 2)),
    "check": lambda s: [
        s.multi_set(["k", "l"], ["1", "2"]),
        *map(s.check, (["k", "l"], ["k", "k"], ["k", "absent"], [])),
    ],
    "wait for nothing": lambda s: (s.wait([]), s.multi_get([])),
    "delete": lambda s: (s.set("k", "v"), s.delete_key("k"), s.delete_key("k"), s.check(["k"])),
    "num_keys": lambda s: (s.add("n", 1), s.set("k", "v"), s.num_keys()),
    "add": lambda s: [
        *[s.add("n", amount) for amount in (5, 5, -3, -3, 5, 0)],
        *(s.get("n"), s.multi_get(["n"])),
    ],
    "add nothing": lambda s: [
        *(s.add("n", 0), s.get("n")),
        *[s.add("n", amount) for amount in (0, 2, 1, 0)],
    ],
    "add after set": lambda s: [
        *(s.set("n", "unrelated history"), s.set("n", "5"), s.add("n", 0), s.add("n", 3)),
        *(s.add("n", 3), s.get("n"), s.set("n", "-4"), s.add("n", 1)),
    ],
    "add to a number with a sign": lambda s: (s.set("n", "+5"), s.add("n", 1)),
    "add to a number with spaces": lambda s: (s.set("n", " 5 "), s.add("n", 1)),
    "add to a number with zeros": lambda s: (s.set("n", 5000 * "0" + "41"), s.add("n", 1)),
    "add beyond 64 bits": lambda s: (s.set("n", str(2**63 - 1)), s.add("n", 1), s.add("n", -1)),
    "set and delete after add": lambda s: [
        *([s.add("n", 2) for _ in range(3)], s.set("n", "text"), s.get("n"), s.delete_key("n")),
        *(s.add("n", 2), s.delete_key("n"), s.add("n", 7)),
    ],
    "compare_set": lambda s: [
        *(s.compare_set("k", "expected", "new"), s.check(["k"])),
        *(s.compare_set("k", "", "first"), s.compare_set("k", "", "second")),
        *(s.compare_set("k", "other", "second"), s.compare_set("k", b"first", b"\x00\xff")),
        *(s.get("k"), s.set("empty", ""), s.compare_set("empty", "", "filled")),
    ],
    "compare_set of a counter": lambda s: [
        *(s.add("n", 4), s.add("n", 4), s.compare_set("n", "4", "x")),
        *(s.compare_set("n", "8", "100"), s.add("n", 1)),
    ],
    "append": lambda s: [
        *([s.append("k", each) for each in ("a", b"\x00", "", "b")], s.get("k")),
        *(s.add("n", 4), s.append("n", "2"), s.get("n")),
    ],
}

AMOUNTS: list[Any] = [
    *(0, -1, 2**31, 2**63 - 1, -(2**63), True, Two(), np.int32(3), np.int64(-3), np.uint8(3)),
    *(2**63, -(2**63) - 1, 2**64 + 5, -(2**64), 10**30, 10**5000, np.uint64(2**63)),
    *(1.0, 1.5, float("nan"), float("inf"), np.float64(3), None, "1", b"1", [1], object()),
]
KEYS: list[Any] = [
    *("", "k/", "k/l", "/k//l/", "torch elastic", "%", "\0", "k\0l", "\N{GRINNING FACE}"),
    *("k" * 2000, np.str_("k"), b"k", bytearray(b"k")),
    *("a\ud800", "\udcff", None, 1, 1.5, True, ["k"], ("k",), {}, object(), memoryview(b"k")),
]
VALUES: list[Any] = [
    *("", "v", b"", bytes(range(256)), bytearray(b"v"), "\N{GRINNING FACE}", np.str_("v")),
    *(np.bytes_(b"v"), b"=", b"#1,0", "5", b"x" * 500_000),
    *("a\ud800", None, 1, 1.5, True, ["v"], {}, object(), np.array([1])),
]
SEVERAL: list[Any] = [
    *([], ["a"], ["a", "b", "a"], ("a", "b"), [b"a"], "ab", b"ab", None, 1, ["a", None]),
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


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(place: Place, program: Call) -> None:
    store, torchs = place.open(), HashStore()
    assert outcome(store, program) == outcome(torchs, program)


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


def test_the_type_is_named(place: Place) -> None:
    store = place.open()
    with pytest.raises(TypeError, match=r"key .*None"):
        store.get(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not NoneType"):
        store.set("k", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whole number"):
        store.add("k", 1.5)  # type: ignore[arg-type]
