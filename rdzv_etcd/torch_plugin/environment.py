"""What workers get of the agent's environment: their round's epoch, their agent's node id, and not
etcd's password.

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

from rdzv_etcd.settings.config import EPOCH_VARIABLE, NODE_ID_VARIABLE, PASSWORD_VARIABLE

_withheld: dict[str, str] = {}
_replaced: dict[str, tuple[str | None, str]] = {}
"""What the user gave (``None``: nothing), and what was put in its place for workers."""


def full_environment() -> Mapping[str, str]:
    """The process's environment, with what is being withheld from workers."""
    environ = ChainMap(os.environ, _withheld)
    return environ.new_child({name: _replaced[name][0] or "" for name in _ours()})


def prepare_for_workers(epoch: int, node_id: str) -> None:
    """Change this process's environment to what workers should inherit."""
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        _withheld[PASSWORD_VARIABLE] = password
    ours = _ours()
    for name, value in ((EPOCH_VARIABLE, str(epoch)), (NODE_ID_VARIABLE, node_id)):
        given = _replaced[name][0] if name in ours else os.environ.get(name)
        _replaced[name] = given, value
        os.environ[name] = value


def give_back() -> None:
    """Put back what was withheld, unless something else was put in its place."""
    while _withheld:
        name, value = _withheld.popitem()
        os.environ.setdefault(name, value)
    for name in _ours():
        given, _ = _replaced[name]
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given
    _replaced.clear()


def _ours() -> set[str]:
    """What is in the environment as it was put there for workers."""
    return {name for name, (_, value) in _replaced.items() if os.environ.get(name) == value}
