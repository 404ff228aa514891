"""How this agent's workers failed, if that is why it asks for another round.

torch's agent does not hand it to its rendezvous: it lies in a local variable of the agent's loop,
from which ``next_rendezvous`` is called (``SimpleElasticAgent._invoke_run`` of torch 2.6 to 2.13).
It is for people to read. Where it is not found as expected, nothing is told, and nothing breaks.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from rdzv_etcd.text import shown

_RESULT = "run_result"
_AGENTS_LOOP = "_invoke_run"
_WITHOUT_RECORD = "To enable traceback see"
"""How torch's message begins where the script does not record its errors."""
_SHOWN_MESSAGE = 120


def why_workers_failed() -> str:
    """Return how the first worker failed, in one line; an empty string if none has."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _AGENTS_LOOP:
            return _first_failure(frame.f_locals.get(_RESULT))
    return ""


def _first_failure(result: object) -> str:
    try:
        failures = getattr(result, "failures", None)
        return _told(failures) if isinstance(failures, Mapping) and failures else ""
    except Exception:  # noqa: BLE001 - another torch may keep anything there, and no round fails for it
        return ""


def _told(failures: Mapping[int, object]) -> str:
    """torch shows the first one to fail as the root cause as well."""
    rank, failure = min(failures.items(), key=lambda item: _timestamp(item[1]))
    code = getattr(failure, "exitcode", None)
    others = f", {len(failures) - 1} more failed" if len(failures) > 1 else ""
    return f"worker of rank {shown(rank, 20)} {_ended(code)}{_message(failure, code)}{others}"


def _timestamp(failure: object) -> float:
    value = getattr(failure, "timestamp", None)
    return value if isinstance(value, int | float) else 0.0


def _ended(code: object) -> str:
    if not isinstance(code, int):
        return "failed"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _message(failure: object, code: object) -> str:
    """The first line of the error itself, if the script records it with torch's ``@record``."""
    if isinstance(code, int) and code < 0:
        return ""  # torch says there what the code says already
    message = getattr(failure, "message", "")
    if isinstance(message, Mapping):  # what @record wrote: the error and more of it
        message = message.get("message", "")
    if not isinstance(message, str) or message.startswith(_WITHOUT_RECORD):
        return ""
    first = message.strip().partition("\n")[0]
    return f": {shown(first, _SHOWN_MESSAGE)}" if first else ""
