"""What a program may pass to the round's store, and what it is told of the rest."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import pytest

from rdzv_etcd.errors import MisuseError, RequestTooLargeError, StoreTimeoutError
from rdzv_etcd.world.round_store import RoundStore
from tests.store.conftest import Place, Two


@pytest.fixture
def store(place: Place) -> RoundStore:
    return place.round_store()


@pytest.mark.parametrize("call", ["multi_get", "wait", "check"])
@pytest.mark.parametrize("keys", ["seed", b"seed", 5, None])
def test_several_keys_are_no_single_one(store: RoundStore, call: str, keys: object) -> None:
    """``wait("seed")`` would wait for the keys s, e, e and d."""
    with pytest.raises(MisuseError, match="they must be a list of texts"):
        getattr(store, call)(keys)


def test_several_keys_may_come_in_anything(store: RoundStore) -> None:
    values = {"a": b"1", "b": b"2"}
    store.multi_set(values)
    store.wait(values.keys())
    assert store.multi_get(key for key in values) == [b"1", b"2"]
    assert store.check({"a", "b"})


@pytest.mark.parametrize("key", [5, b"seed", None])
def test_a_key_is_text(store: RoundStore, key: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.wait([key]),
        lambda: store.set(key, b""),
        lambda: store.multi_set({key: b""}),
        lambda: store.add(key, 1),
        lambda: store.append(key, b""),
        lambda: store.compare_set(key, b"", b""),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(MisuseError, match=rf"\({type(key).__name__}\); it must be text"):
            call()


def test_a_key_that_no_text_can_have(store: RoundStore) -> None:
    with pytest.raises(MisuseError, match="at position 1 it has a lone surrogate"):
        store.set("a\ud800", b"")


@pytest.mark.parametrize("value", ["text", 5, None])
def test_a_value_is_bytes(store: RoundStore, value: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.set("seed", value),
        lambda: store.multi_set({"seed": value}),
        lambda: store.append("seed", value),
        lambda: store.compare_set("seed", b"", value),
        lambda: store.compare_set("seed", value, b""),
    ]
    for call in calls:
        with pytest.raises(MisuseError, match=r"the value for store key 'seed' is .* must be byte"):
            call()
    with pytest.raises(MisuseError, match="they must be a dict"):
        store.multi_set([("seed", b"")])  # type: ignore[arg-type]
    assert store.num_keys() == 0


@pytest.mark.parametrize("value", [bytearray(b"17"), memoryview(b"17")])
def test_a_value_may_be_anything_like_bytes(store: RoundStore, value: Any) -> None:
    store.set("seed", value)
    store.append("seed", value)
    assert store.compare_set("seed", memoryview(b"1717"), value) == b"17"  # type: ignore[arg-type]


@pytest.mark.parametrize("amount", [1.5, 3.0, math.nan, "5", None, decimal.Decimal(1)])
def test_an_amount_is_a_whole_number(store: RoundStore, amount: Any) -> None:
    """Parts of it would be lost, and what is left would count as another amount."""
    with pytest.raises(MisuseError, match=r"the amount to add to store key 'n' is .* whole number"):
        store.add("n", amount)
    assert not store.check(["n"])


@pytest.mark.parametrize("amount", [2**63, -(2**63) - 1, 10**5000], ids=["2**63", "-2**63-1", ""])
def test_an_amount_has_64_bits(store: RoundStore, amount: int) -> None:
    with pytest.raises(MisuseError, match=r"'n' must be at least -2\*\*63 and below 2\*\*63"):
        store.add("n", amount)
    assert not store.check(["n"])


def test_an_amount_may_be_of_any_type_of_whole_numbers(store: RoundStore) -> None:
    amounts: list[Any] = [1, Two(), True]
    assert [store.add("n", amount) for amount in amounts] == [1, 3, 4]


@pytest.mark.parametrize("timeout_s", ["5", True, math.nan, b"5", [5], decimal.Decimal(5)])
def test_a_time_limit_is_a_number(store: RoundStore, timeout_s: Any) -> None:
    with pytest.raises(MisuseError, match=r"the time limit is .* must be a number of seconds"):
        store.set("seed", b"17", timeout_s)


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
