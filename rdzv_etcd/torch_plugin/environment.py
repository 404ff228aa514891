"""What workers get of the agent's environment: their round's epoch, and not etcd's password.

torch starts workers with a copy of ``os.environ`` as it is then. The password is therefore taken
out when a round is formed, which is just before, and put back when the handler is shut down: the
process may be a notebook's, and is its user's. Until then a new handler finds it here. The same
goes for the epoch that the user gave: another job of this process should not begin above this
one's.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping

from rdzv_etcd.settings.config import EPOCH_VARIABLE, PASSWORD_VARIABLE

_withheld: dict[str, str] = {}
_epochs: list[str | None] = []
"""What the user gave as the epoch, and the one that was put in its place; empty: nothing was."""


def full_environment() -> Mapping[str, str]:
    """The process's environment, with what is being withheld from workers."""
    environ = ChainMap(os.environ, _withheld)
    if _is_ours():
        environ = environ.new_child({EPOCH_VARIABLE: _epochs[0] or ""})
    return environ


def prepare_for_workers(epoch: int) -> None:
    """Change this process's environment to what workers should inherit."""
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        _withheld[PASSWORD_VARIABLE] = password
    given = _epochs[0] if _is_ours() else os.environ.get(EPOCH_VARIABLE)
    _epochs[:] = [given, str(epoch)]
    os.environ[EPOCH_VARIABLE] = str(epoch)


def give_back() -> None:
    """Put back what was withheld, unless something else was put in its place."""
    while _withheld:
        name, value = _withheld.popitem()
        os.environ.setdefault(name, value)
    if _is_ours():
        del os.environ[EPOCH_VARIABLE]
        if _epochs[0] is not None:
            os.environ[EPOCH_VARIABLE] = _epochs[0]
    _epochs.clear()


def _is_ours() -> bool:
    """Whether the epoch in the environment is one that was put there for workers."""
    return bool(_epochs) and os.environ.get(EPOCH_VARIABLE) == _epochs[1]
