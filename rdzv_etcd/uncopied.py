"""Objects that cannot be copied, as they are one process's part in something; knows none of them.

Without this, Python would copy what they are made of, one after the other, until it comes to a
lock, a socket or a source of random numbers, and say that this is what cannot be copied.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from rdzv_etcd.errors import CannotCopyError


class Uncopied:
    """Base of what pickle and copy refuse with :class:`~rdzv_etcd.errors.CannotCopyError`."""

    _instead: ClassVar[str]
    """What a program does instead, after "instead"."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopyError(
            f"a {type(self).__name__} of this process cannot be pickled or copied, nor handed to "
            f"another process; instead {self._instead}"
        )
