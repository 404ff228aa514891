"""What torch's events and metrics tell of a rendezvous: the same as with ``c10d``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import NodeState, RdzvEvent
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests.plugin.handlers import PluginJob, leave
from tests.support.markdown import ROOT, Document
from tests.support.processes import free_port

DESTINATION = "dynamic_rendezvous"


class Recorded(logging.Handler):
    """What a user puts at torch's destination."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RdzvEvent] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(RdzvEvent.deserialize(record.getMessage()))

    def of_handler(self, run_id: str) -> list[tuple[NodeState, str, int | None]]:
        """Those of the handler itself, without its name, its steps and its heartbeats."""
        kept = [
            event
            for event in self.events
            if event.run_id == run_id
            and re.search(r"RendezvousHandler\.(?!_keep_alive)|:create_handler$", event.name)
        ]
        return [
            (event.node_state, re.sub(r"node '[^']*'", "node", event.message), event.rank)
            for event in kept
        ]


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    """Put the handler where torch looks for it, as long as that takes."""
    before = handlers._log_handlers[DESTINATION]
    handlers._log_handlers[DESTINATION] = handler
    events._events_loggers.pop(DESTINATION, None)
    logger = logging.getLogger(f"torchelastic-events-{DESTINATION}")
    others = list(logger.handlers)
    for each in others:
        logger.removeHandler(each)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for each in others:
            logger.addHandler(each)
        handlers._log_handlers[DESTINATION] = before
        events._events_loggers.pop(DESTINATION, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    recorded = Recorded()
    with listening(recorded):
        yield recorded


def live(handler: RendezvousHandler) -> None:
    """Two rounds and the end, as a torchrun has them whose worker failed once."""
    handler.next_rendezvous()
    handler.next_rendezvous()
    handler.shutdown()


@pytest.mark.slow
def test_a_handlers_events_are_those_of_c10d(job: PluginJob, recorded: Recorded) -> None:
    live(job.handler())
    ours = recorded.of_handler(job.id)
    theirs_id = f"{job.id}-c10d"
    live(
        get_rendezvous_handler(
            RendezvousParameters(
                "c10d", f"127.0.0.1:{free_port()}", theirs_id, 1, 1, "127.0.0.1", is_host="1"
            )
        )
    )
    theirs = [
        (state, message.replace(theirs_id, job.id), rank)
        for state, message, rank in recorded.of_handler(theirs_id)
    ]
    # c10d counts its rounds from 0, and the second one of a node alone begins with its exit.
    assert [(state, re.sub(r"round \d+", "round", text), rank) for state, text, rank in ours] == [
        (state, re.sub(r"round \d+", "round", text), rank) for state, text, rank in theirs
    ]
    assert len(ours) == 5
    first = next(event for event in recorded.events if event.run_id == job.id)
    assert (first.hostname, first.error_trace) == ("127.0.0.1", "")
    assert first.pid


def test_what_fails_is_an_event_with_its_traceback(job: PluginJob, recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="lease_ttl"):
        job.handler(lease_ttl="soon")
    handler = job.handler("2", join_timeout=1)
    with pytest.raises(Exception, match="was not formed within 1 s"):
        handler.next_rendezvous()
    leave(handler)
    failed = [event for event in recorded.events if event.node_state is NodeState.FAILED]
    assert [event.message.partition(":")[0] for event in failed] == [
        "SettingsError",
        "RendezvousTimeoutError",
    ]
    assert all("Traceback" in event.error_trace for event in failed)


class Broken(logging.Handler):
    """A user's, with a defect."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ZeroDivisionError


def test_a_users_handler_that_raises_disturbs_no_job(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    with listening(Broken()):
        live(job.handler())


def test_the_document_s_example_shows_them(
    job: PluginJob, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    (code,) = Document(ROOT / "docs/metrics.md").code("python")
    exec(compile(code, "docs/metrics.md", "exec"), {})
    shows = handlers._log_handlers[DESTINATION]
    assert shows is not recorded
    with listening(shows):
        live(job.handler())
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert len([RdzvEvent.deserialize(line) for line in lines]) == 5
