"""Shows this library's log lines where the user asks for them: the option ``log``.

A library configures no logging by itself; whoever gives the option asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

from rdzv_etcd.settings import Log

NAME = "rdzv_etcd"


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``job``, ``node``, ``message``, ``pid``,
    and with a defect its ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "job": getattr(record, "rdzv_job", None),
            "node": getattr(record, "rdzv_node", None),
            "message": getattr(record, "rdzv_text", None) or record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


class _Shown(logging.StreamHandler):  # type: ignore[type-arg] # no subscript before 3.11
    """To whatever ``sys.stderr`` is when a line comes."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show(log: Log) -> None:
    """Write this library's lines to standard error, as the option says, and nowhere else.

    For the whole process: of several calls the last one counts. ``Log.LOGLEVEL`` changes nothing.
    """
    if log is Log.LOGLEVEL:
        return
    logger = logging.getLogger(NAME)
    for one in tuple(logger.handlers):  # torch's among them, under torchrun
        logger.removeHandler(one)
    handler = _Shown()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if log is Log.JSON else text)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if log is Log.WARNING else logging.INFO)
    logger.propagate = False
