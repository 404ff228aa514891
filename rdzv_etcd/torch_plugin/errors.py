"""Translates this library's errors into torch's, and the way an agent ends into a job's outcome."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from rdzv_etcd.errors import (
    DrainedError,
    EmbeddedEtcdError,
    EtcdError,
    JobClosedError,
    JoinTimeoutError,
    RdzvEtcdError,
    SettingsError,
    StateCorruptError,
)
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.text import shown

_log = logging.getLogger("rdzv_etcd")


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise torch's exception for ours; the cause is in the message, not in a second traceback."""
    try:
        yield
    except SettingsError as error:
        _log.error("%s", str(error))
        without_traceback(error)
        raise  # a ValueError, as torch's own handlers raise for bad parameters
    except RdzvEtcdError as error:
        raised = translate(error)
        if not isinstance(raised, RendezvousGracefulExitError):
            _log.error("%s", str(error))
        raise without_traceback(raised) from None


def translate(error: RdzvEtcdError) -> RendezvousError:
    """Return torch's counterpart of ``error``."""
    text = str(error)
    if _ends_well(error):
        return RendezvousGracefulExitError(text)
    if isinstance(error, JobClosedError):
        return RendezvousClosedError(text)
    if isinstance(error, JoinTimeoutError):
        return RendezvousTimeoutError(text)
    if isinstance(error, StateCorruptError):
        return RendezvousStateError(text)
    if isinstance(error, EtcdError | EmbeddedEtcdError):
        return RendezvousConnectionError(text)
    return RendezvousError(text)


def _ends_well(error: RdzvEtcdError) -> bool:
    """Whether a node ends with it though nothing is wrong: its job was done without it, or it was
    drained."""
    if isinstance(error, JobClosedError):
        return error.succeeded and not error.was_member and not error.is_refused
    return isinstance(error, DrainedError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent ended: whether that closes the job for everybody, and why."""

    closes: bool
    succeeded: bool
    reason: str


def outcome_of(error: BaseException | None) -> Outcome:
    """Tell from the exception in flight during ``shutdown()`` how the agent ended.

    ``launch_agent`` calls ``shutdown()`` in a ``finally``: no exception means that the workers are
    done; ``ChildFailedError`` that they failed and no restart is left. Both close the job. Anything
    else is this node's own trouble - it could not take part, its program is missing, its disk is
    full, it was told to stop - and it just leaves: the others may well do without it.
    """
    if error is None:
        return Outcome(True, True, "the workers have finished")
    if isinstance(error, ChildFailedError):
        return Outcome(True, False, _failure(error))
    if isinstance(error, RendezvousError) or is_missing_result(error):
        return Outcome(False, False, "could not take part")
    if isinstance(error, Exception) and not isinstance(error, SignalException):
        return Outcome(False, False, f"its agent failed: {type(error).__name__}: {error}")
    return Outcome(False, False, f"was told to stop ({what_interrupted(error)})")


def is_missing_result(error: BaseException | None) -> bool:
    """Whether this is torch's failure on the ``None`` that its agent returns after a graceful exit.

    Up to torch 2.13 ``launch_agent`` calls ``result.is_failed()`` on it.
    """
    return isinstance(error, AttributeError) and error.name == "is_failed" and error.obj is None


def _failure(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"the worker of rank {rank} failed with exit code {failure.exitcode}"


E = TypeVar("E", bound=BaseException)

_MARK = "__rdzv_etcd_says_all__"


def without_traceback(error: E) -> E:
    """Return the error, which Python will print in one line if nobody catches it.

    At log level DEBUG it is printed as always, and so is it where the program has a
    ``sys.excepthook`` of its own.
    """
    setattr(error, _MARK, True)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _last_word
    return error


def _last_word(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not getattr(error, _MARK, False) or _log.isEnabledFor(logging.DEBUG):
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)


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
