"""What test processes share is given to one of them at a time."""

from __future__ import annotations

import os
import sys
import uuid

from tests.support.processes import claim, free_port, output

_CLAIM = (
    "import sys; from tests.support.processes import claim; print(claim(sys.argv[1]) is not None)"
)


def claim_elsewhere(name: str) -> str:
    """Let another process try, and end."""
    return output([sys.executable, "-c", _CLAIM, name]).strip()


def test_a_claim_excludes_everyone_until_it_is_given_up() -> None:
    name = uuid.uuid4().hex
    held = claim(name)
    assert held is not None
    assert claim(name) is None
    assert claim_elsewhere(name) == "False"
    os.close(held)
    assert claim_elsewhere(name) == "True"  # which ends with that process
    again = claim(name)
    assert again is not None
    os.close(again)


def test_a_free_port_is_not_given_away_twice() -> None:
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == 100
    assert claim_elsewhere(f"port-{ports[0]}") == "False"
