"""Translates this library's errors into torch's, and the way an agent ends into a job's outcome."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.torch_plugin.last_word import without_traceback

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
