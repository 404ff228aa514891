"""Arguments that a program may pass to the round's store, and how others are refused."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from rdzv_etcd.errors import MisuseError, RequestTooLargeError, StoreTimeoutError
from rdzv_etcd.world.round_store import RoundStore
from tests.store.conftest import Place, Two


@pytest.fixture
def store(place: Place) -> RoundStore:
    return place.round_store()


Call: TypeAlias = Callable[[RoundStore, Any], object]

REFUSED: dict[str, tuple[list[Call], list[Any], str]] = {
    # wait("seed") would wait for the keys s, e, e and d.
    "one for several keys": (
        [RoundStore.multi_get, RoundStore.wait, RoundStore.check],
        ["seed", b"seed", 5, None],
        "they must be a list of texts",
    ),
    "a key": (
        [
            *(RoundStore.get, RoundStore.delete),
            lambda store, key: store.wait([key]),
            lambda store, key: store.set(key, b""),
            lambda store, key: store.multi_set({key: b""}),
            lambda store, key: store.add(key, 1),
            lambda store, key: store.append(key, b""),
            lambda store, key: store.compare_set(key, b"", b""),
        ],
        [5, b"seed", None],
        r"\({type}\); it must be text",
    ),
    "text": ([RoundStore.get], ["a\ud800"], "at position 1 it has a lone surrogate"),
    "a value": (
        [
            lambda store, value: store.set("seed", value),
            lambda store, value: store.multi_set({"seed": value}),
            lambda store, value: store.append("seed", value),
            lambda store, value: store.compare_set("seed", b"", value),
            lambda store, value: store.compare_set("seed", value, b""),
        ],
        ["text", 5, None],
        "the value for store key 'seed' is .* must be byte",
    ),
    "values": ([RoundStore.multi_set], [[("seed", b"")]], "they must be a dict"),
    # Parts of it would be lost, and what is left would count as another amount.
    "an amount": (
        [lambda store, amount: store.add("n", amount)],
        [1.5, 3.0, math.nan, "5", None, decimal.Decimal(1)],
        "the amount to add to store key 'n' is .* whole number",
    ),
    "64 bits": (
        [lambda store, amount: store.add("n", amount)],
        [2**63, -(2**63) - 1, 10**5000],
        r"'n' must be at least -2\*\*63 and below 2\*\*63",
    ),
    "a time limit": (
        [lambda store, timeout_s: store.set("seed", b"17", timeout_s)],
        ["5", True, math.nan, b"5", [5], decimal.Decimal(5)],
        "the time limit is .* must be a number of seconds",
    ),
}


@pytest.mark.parametrize(("calls", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused(
    store: RoundStore, calls: list[Call], arguments: list[Any], message: str
) -> None:
    for call in calls:
        for argument in arguments:
            expected = message.replace("{type}", type(argument).__name__)
            with pytest.raises(MisuseError, match=expected):
                call(store, argument)
    assert store.num_keys() == 0


def test_several_keys_may_come_in_anything(store: RoundStore) -> None:
    values = {"a": b"1", "b": b"2"}
    store.multi_set(values)
    store.wait(values.keys())
    assert store.multi_get(key for key in values) == [b"1", b"2"]
    assert store.check({"a", "b"})


@pytest.mark.parametrize("value", [bytearray(b"17"), memoryview(b"17")])
def test_a_value_may_be_anything_like_bytes(store: RoundStore, value: Any) -> None:
    store.set("seed", value)
    store.append("seed", value)
    assert store.compare_set("seed", memoryview(b"1717"), value) == b"17"  # type: ignore[arg-type]


def test_an_amount_may_be_of_any_type_of_whole_numbers(store: RoundStore) -> None:
    amounts: list[Any] = [1, Two(), True]
    assert [store.add("n", amount) for amount in amounts] == [1, 3, 4]


@pytest.mark.parametrize("timeout_s", [5, fractions.Fraction(5), math.inf, 1e300, 10**400, None])
def test_a_time_limit_may_be_of_any_size_and_type(store: RoundStore, timeout_s: Any) -> None:
    store.set("seed", b"17", timeout_s)
    assert store.get("seed", timeout_s) == b"17"


@pytest.mark.parametrize("timeout_s", [0, -1, -math.inf])
def test_no_time_is_enough_for_what_is_there(store: RoundStore, timeout_s: Any) -> None:
    store.set("seed", b"17", timeout_s)
    assert store.get("seed", timeout_s) == b"17"
    with pytest.raises(StoreTimeoutError):
        store.get("other", timeout_s)


_TOO_LARGE = b"x" * 1_800_000
_TEXT = r"^{} store key 'seed' takes {} bytes{}, more than etcd accepts in one .* cut it into"


@pytest.mark.parametrize(
    ("call", "doing", "size", "of"),
    [
        (lambda store: store.set("seed", _TOO_LARGE), "to set", 1_800_004, ""),
        (lambda store: store.multi_set({"seed": _TOO_LARGE, "b": b""}), "to set", 1_800_004, ""),
        (lambda store: store.append("seed", _TOO_LARGE), "to append to", 1_800_004, ""),
        (
            lambda store: store.compare_set("seed", b"", _TOO_LARGE),
            "compare_set of",
            1_800_004,
            " with what is expected",
        ),
    ],
)
def test_what_is_too_large_is_named(
    store: RoundStore, call: Callable[[RoundStore], object], doing: str, size: int, of: str
) -> None:
    with pytest.raises(RequestTooLargeError, match=_TEXT.format(doing, size, of)):
        call(store)
    assert not store.check(["seed"])


def test_what_gets_too_large_bit_by_bit_is_named(store: RoundStore) -> None:
    """What is there already is sent again, so a small addition may be too much."""
    store.set("seed", b"x" * 1_000_000)
    of = ", the 1000000 that were there before twice"
    with pytest.raises(RequestTooLargeError, match=_TEXT.format("to append to", 2_000_005, of)):
        store.append("seed", b"y")


def test_a_message_shows_no_more_of_a_key_than_people_read(store: RoundStore) -> None:
    with pytest.raises(RequestTooLargeError, match=r"'a{79}…' takes 2000001 bytes, more"):
        store.set("a" * 2_000_000, b"v")
    with pytest.raises(StoreTimeoutError, match=r"keys: a{79}…$") as caught:
        store.get("a" * 1000, 0)
    assert caught.value.keys == ("a" * 1000,)
