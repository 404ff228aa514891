"""Log lines that a person can follow: what this node waits for and why, when it changes."""

from __future__ import annotations

import logging

_log = logging.getLogger("rdzv_etcd")


class Narrator:
    """Says a thing once. ``who`` names the node in every line."""

    def __init__(self, job_id: str, who: str) -> None:
        self._prefix = f"[{job_id}] {who}: "
        self._last = ""

    def say(self, text: str) -> None:
        """Log at INFO if it differs from the last line."""
        if text != self._last:
            self._last = text
            _log.info("%s%s", self._prefix, text)

    def warn(self, text: str) -> None:
        if text != self._last:
            self._last = text
            _log.warning("%s%s", self._prefix, text)
