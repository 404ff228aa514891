"""Text that others wrote is shown in printable characters, and not much of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.errors import EtcdUnavailableError, JobClosedError
from rdzv_etcd.names import display_name, display_names
from rdzv_etcd.text import LINE, SHOWN, shown


@given(st.text(), st.integers(1, 300))
def test_it_is_printable_and_short_and_stays_so(text: str, limit: int) -> None:
    once = shown(text, limit)
    assert once.isprintable()
    assert len(once) <= limit
    assert shown(once, limit) == once


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=SHOWN))
def test_what_is_printable_and_short_is_left_as_it_is(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("one\ntwo", "one\\ntwo"),
        ("\ud800", "\\ud800"),
        ("\u202e", "\\u202e"),
        (10**5000, "a number of 16610 bits"),
        (7, "7"),
    ],
    ids=["escape", "line", "surrogate", "direction", "digits", "number"],
)
def test_the_rest_is_escaped(text: object, expected: str) -> None:
    assert shown(text) == expected


def test_names_of_nodes_are_shown_so() -> None:
    hostile = "a\x1b[2J\n" + "x" * 10_000 + "~1~2"
    for text in (display_name(hostile), display_names([hostile, "b~1~x", hostile + "1"])):
        assert text.isprintable()
        assert len(text) < 400


def test_every_error_is_one_printable_line() -> None:
    hostile = "said \x1b[2J\n" + "x" * 1_000_000
    closed = JobClosedError(hostile, succeeded=True, was_member=False)
    for error in (EtcdUnavailableError(hostile), closed):
        assert str(error).isprintable()
        assert len(str(error)) <= LINE
