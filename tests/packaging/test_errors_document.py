"""docs/troubleshooting.md: every class, and messages that are those of the code."""

from __future__ import annotations

from tests.packaging.errors_document import (
    DOCUMENT,
    kinds,
    messages,
    renewed,
    written_in_the_code,
)

TEXT = DOCUMENT.read_text(encoding="utf-8")
BASES = {"RdzvEtcdError", "EtcdRefusedError"}  # raised as what they are the base of


def test_the_classes_are_the_code_s() -> None:
    """If this fails, run ``python -m tests.packaging.errors_document``."""
    assert renewed(TEXT) == TEXT
    assert "<!-- errors:begin -->" in TEXT


def test_every_error_that_is_raised_has_a_message_with_what_to_do() -> None:
    assert {kind.__name__ for kind in kinds()} - BASES == {error for _, error in messages(TEXT)}


def test_every_message_is_in_the_code() -> None:
    code = written_in_the_code()
    missing = [message for message, _ in messages(TEXT) if message.strip() not in code]
    assert missing == []
