"""What workers get of the agent's environment: their round's epoch, and not etcd's password.

torch starts workers with a copy of ``os.environ`` as it is then. The password is therefore taken
out when a round is formed, which is just before, and put back when the handler is shut down: the
process may be a notebook's, and is its user's. Until then a new handler finds it here.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping

from rdzv_etcd.settings.config import PASSWORD_VARIABLE

EPOCH_VARIABLE = "RDZV_ETCD_EPOCH"
"""Tells workers the epoch of their round: a fencing token that only grows."""

_withheld: dict[str, str] = {}


def full_environment() -> Mapping[str, str]:
    """The process's environment, with what is being withheld from workers."""
    return ChainMap(os.environ, _withheld)


def prepare_for_workers(epoch: int) -> None:
    """Change this process's environment to what workers shall inherit."""
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        _withheld[PASSWORD_VARIABLE] = password
    os.environ[EPOCH_VARIABLE] = str(epoch)


def give_back() -> None:
    """Put back what was withheld, unless something else was put in its place."""
    while _withheld:
        name, value = _withheld.popitem()
        os.environ.setdefault(name, value)
