"""Log lines that a person can follow: what this node waits for and why, when it changes."""

from __future__ import annotations

import logging

from rdzv_etcd.text import LINE, shown

_log = logging.getLogger("rdzv_etcd")

PROGRESS_EVERY_S = 2.0
"""Progress (3 of 64 nodes here, 4 of 64 …) is told at most this often; the last state always."""


class StatusLog:
    """Says a thing once, in one line. ``who`` names the node in each of them."""

    def __init__(self, job_id: str, who: str) -> None:
        self._prefix = f"[{job_id}] {who}: "
        self._names = {"rdzv_job": job_id, "rdzv_node": who}
        self._last = ""
        self._progress_after_s = 0.0

    def say(self, text: str, *, warn: bool = False) -> None:
        """Log at INFO, or with ``warn`` at WARNING, if it differs from the last line."""
        if text != self._last:
            self._last = text
            level = logging.WARNING if warn else logging.INFO
            _log.log(level, "%s", shown(f"{self._prefix}{text}", LINE), extra=self._extra(text))

    def warn(self, text: str) -> None:
        """Log at WARNING if it differs from the last line."""
        self.say(text, warn=True)

    def error(self, text: str) -> None:
        """Log at ERROR, in as many lines as ``text`` has, which nobody else has written."""
        # Not cut: what matters of a stack is its end.
        _log.error("%s%s", self._prefix, text, extra={**self._names, "rdzv_text": text})

    def fail(self, text: str, error: BaseException) -> None:
        """Log at ERROR, with the traceback."""
        text = f"{text}: {error!r}"
        line = shown(f"{self._prefix}{text}", LINE)
        _log.error("%s", line, exc_info=error, extra=self._extra(text))

    def _extra(self, text: str) -> dict[str, object]:
        """What is in the line, for formatters that keep it apart."""
        return {**self._names, "rdzv_text": shown(text, LINE)}

    def progress(self, text: str, now_s: float) -> float | None:
        """Tell how a wait goes on, unless something was told just now.

        Returns when to call again with the text as it is then, ``None`` if all is told.
        """
        if not text or text == self._last:
            return None
        if now_s < self._progress_after_s:
            return self._progress_after_s
        self._progress_after_s = now_s + PROGRESS_EVERY_S
        self.say(text)
        return None
