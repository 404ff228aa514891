"""Lets one call in and refuses the others, also where a signal's handler raises."""

from __future__ import annotations


class OneAtATime:
    """At most one is inside.

    A lock would do if no exception could come between its being taken and the ``try`` that gives
    it back. Here each call brings a token of its own, and leaving without being inside is nothing.
    """

    def __init__(self) -> None:
        self._inside: dict[None, object] = {}

    def enter(self, token: object) -> bool:
        """Let it in, unless another one is inside; tell whether it is."""
        return self._inside.setdefault(None, token) is token

    def leave(self, token: object) -> None:
        """Make room for the next one, if this one is inside."""
        if self._inside.get(None) is token:
            self._inside.clear()
