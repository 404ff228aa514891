"""Shows this library's log lines where torchrun shows torch's own, at the same level."""

from __future__ import annotations

import logging
import os

_NAME = "rdzv_etcd"


def follow_torch() -> None:
    """Set the level as torch does (``LOGLEVEL``, by default WARNING) and use torch's handlers.

    Leaves a program alone that has configured logging itself: one that has set the logger's level,
    or has a handler on it or on the root logger.
    """
    logger = logging.getLogger(_NAME)
    if logger.level == logging.NOTSET:
        wanted = os.environ.get("LOGLEVEL", "")
        level = logging.getLevelName(wanted.upper()) if wanted else logging.WARNING
        logger.setLevel(level if isinstance(level, int) else logging.WARNING)
    if not logger.hasHandlers():
        for handler in logging.getLogger("torch.distributed").handlers:
            logger.addHandler(handler)
