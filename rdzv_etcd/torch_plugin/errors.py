"""How failures pass between this library, torch's agent and its workers.

Ours become torch's exceptions; the way an agent ends becomes the job's outcome; how its workers
failed becomes a reason that other nodes log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

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
from rdzv_etcd.process import how_ended
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.text import shown

_log = logging.getLogger("rdzv_etcd")

# --- our errors become torch's --------------------------------------------------------------------

_COUNTERPARTS: dict[type[RdzvEtcdError], type[RendezvousError]] = {
    DrainedError: RendezvousGracefulExitError,
    JobClosedError: RendezvousClosedError,
    JoinTimeoutError: RendezvousTimeoutError,
    StateCorruptError: RendezvousStateError,
    EtcdError: RendezvousConnectionError,
    EmbeddedEtcdError: RendezvousConnectionError,
}
"""The first that fits counts."""


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise torch's exception for ours; the cause is in the message, not in a second traceback."""
    try:
        yield
    except SettingsError as error:
        _log.error("%s", str(error))
        raise  # a ValueError, as torch's own handlers raise for bad parameters
    except RdzvEtcdError as error:
        raised = _translated(error)
        if not isinstance(raised, RendezvousGracefulExitError):
            _log.error("%s", str(error))
        raise raised from None


def _translated(error: RdzvEtcdError) -> RendezvousError:
    kind: type[RendezvousError] = next(
        (theirs for ours, theirs in _COUNTERPARTS.items() if isinstance(error, ours)),
        RendezvousError,
    )
    if isinstance(error, JobClosedError) and error.succeeded and not error.was_member:
        kind = RendezvousGracefulExitError
    return kind(str(error))


# --- the agent's end becomes the job's ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent ended: whether that closes the job on all nodes, and why."""

    closes: bool
    succeeded: bool
    reason: str


def outcome_of(error: BaseException | None) -> Outcome:
    """Derive from the exception in flight during ``shutdown()`` how the agent ended.

    ``launch_agent`` calls ``shutdown()`` in a ``finally``: no exception means that the workers are
    done; ``ChildFailedError`` that they failed and no restart is left. Both close the job. Anything
    else is this node's own trouble - it could not take part, its program is missing, its disk is
    full, it was told to stop, its workers hang in the kernel (torch 2.13 gives them up without an
    exception) - and it just leaves: the other nodes may well do without it.
    """
    if error is None:
        state = getattr(getattr(_local_of("launch_agent", "result"), "state", None), "value", "")
        if state == "UNHEALTHY":
            return Outcome(False, False, "its workers hang in the kernel")
        return Outcome(True, True, "the workers have finished")
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        return Outcome(
            True, False, f"the worker of rank {rank} failed with exit code {failure.exitcode}"
        )
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


# --- why an agent asks for another round ----------------------------------------------------------

_SHOWN_MESSAGE = 120
_NOT_RECORDED = "To enable traceback see"
"""How torch's message begins where the script does not record its errors."""


def why_workers_failed() -> str:
    """Return how the first worker of this agent failed, in one line; an empty string if none has.

    torch's agent does not pass it to its rendezvous: it lies in a local variable of the agent's
    loop, from which ``next_rendezvous`` is called (``SimpleElasticAgent._invoke_run`` of torch 2.6
    to 2.13). It is for people to read: where it is not found as expected, the reason is empty.
    """
    result = _local_of("_invoke_run", "run_result")
    try:
        failures = getattr(result, "failures", None)
        if not failures or not isinstance(failures, Mapping):
            return ""
        # torch also shows the first one to fail as the root cause.
        rank, failure = min(failures.items(), key=lambda item: _timestamp(item[1]))
        others = f", {len(failures) - 1} more failed" if len(failures) > 1 else ""
        return f"worker of rank {shown(rank, 20)} {_how_it_failed(failure)}{others}"
    except Exception:  # noqa: BLE001 - another torch may keep anything there, and no round fails for it
        return ""


def _local_of(function: str, variable: str) -> object:
    """Return a local variable of the innermost function of that name that led here; or ``None``."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_code.co_name == function:
            return caller.f_locals.get(variable)
        frame = caller
    return None


def _timestamp(failure: object) -> float:
    value = getattr(failure, "timestamp", None)
    return value if isinstance(value, int | float) else 0.0


def _how_it_failed(failure: object) -> str:
    code = getattr(failure, "exitcode", None)
    how = how_ended(code) if isinstance(code, int) else "failed"
    if isinstance(code, int) and code < 0:  # torch's message has no more than that
        return how
    message = getattr(failure, "message", "")
    if isinstance(message, Mapping):  # what @record wrote: the error and more of it
        message = message.get("message", "")
    if not isinstance(message, str) or message.startswith(_NOT_RECORDED):
        return how
    first = message.strip().partition("\n")[0]
    return f"{how}: {shown(first, _SHOWN_MESSAGE)}" if first else how
