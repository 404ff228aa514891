"""Makes text that others wrote fit to be shown: on a terminal, in a log line, in an error.

Node names, addresses, reasons and values come from other nodes, or from other programs that write
to etcd. A line break in one would forge a log line, an escape sequence command the reader's
terminal, and a megabyte bury what matters.
"""

from __future__ import annotations

SHOWN = 200
"""Characters of one text that another program wrote."""
LINE = 2000
"""Characters of a whole message, which names several of them."""


def shown(text: object, limit: int = SHOWN) -> str:
    """Return ``text`` in printable characters, at most ``limit`` of them; the rest is cut off.

    Other characters are escaped as Python does it. Doing it twice changes nothing.
    """
    whole = text if isinstance(text, str) else _written(text)
    if len(whole) <= limit and whole.isprintable():
        return whole
    some = "".join(
        character if character.isprintable() else _escaped(character)
        for character in whole[: limit + 1]
    )
    return some if len(some) <= limit else f"{some[: limit - 1]}…"


def many(count: int, noun: str) -> str:
    """Return the count with its noun: ``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def named(value: object, limit: int = 80) -> str:
    """Return a value of whatever type as messages show it: as Python writes it, and its type."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of 5,000 digits
        text = "too large"
    return f"{shown(text, limit)} ({type(value).__name__})"


def _written(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**50:  # Python writes no number of 5,000 digits
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
