"""Scenes for the pure decisions, written as a story.

scene = Scene(2, 4, members="a b c", at=5)      # round 5 is formed with a, b, c as ranks 0, 1, 2
scene.back("a b")                               # they have arrived for round 6
scene.gone("c")                                 # its presence is gone
scene.new("d")                                  # a newcomer
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from rdzv_etcd.protocol.closing import Close, KeepWaiting, decide_close
from rdzv_etcd.protocol.lead import decide_change
from rdzv_etcd.protocol.model import (
    Accusation,
    Accused,
    Change,
    Closure,
    Control,
    Ended,
    NodeInfo,
    Nodes,
    Presence,
    Round,
    Slices,
)
from rdzv_etcd.settings import JobSettings, Timing

NOW_S = 1000.0
LAST_CALL_S = 30.0
SETTLE_S = 0.2
REJOIN_S = 120.0
TIMING = Timing(last_call_timeout_s=LAST_CALL_S, settle_s=SETTLE_S, rejoin_timeout_s=REJOIN_S)


@functools.cache  # a record that is unchanged has the same tuple
def names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


class Scene:
    """A control view and the presences, under construction."""

    def __init__(
        self,
        least: int = 1,
        most: int = 4,
        unit: int = 1,
        *,
        members: str = "",
        at: int = 5,
        expelled: str = "",
        heirs: str = "",
        segment: int = 1,
        domains: Mapping[str, int] | None = None,
    ) -> None:
        """With segments, the first letter of a node's name is its domain."""
        self.settings = JobSettings(least, most, unit, segment)
        self.opened_s = NOW_S - 5.0
        self.give_up_s = math.inf
        self._revision = 100
        self._present: dict[str, Presence] = {}
        self._left: dict[str, str] = {}
        self._gone: dict[str, float] = {}
        self._accused: dict[str, Accused] = {}
        record = None
        if members:
            record = Round(
                at,
                "run",
                names(members),
                self.settings,
                "10.0.0.1",
                2000,
                7,
                expelled=names(expelled),
                heirs=names(heirs),
                domains=domains or {},
            )
        self.control = Control(self._revision, record, 50 if members else 0)
        for name in names(members):
            self._put(name, at, NOW_S - 100)

    # -- who is there -----------------------------------------------------------------------------

    def back(self, words: str, seen_s: float = NOW_S - 1.0, *, because: str = "") -> Scene:
        """Members that have arrived again."""
        return self.new(words, seen_s, because=because)

    def new(
        self,
        words: str,
        seen_s: float = NOW_S - 1.0,
        *,
        settings: JobSettings | None = None,
        arrived_for: int | None = None,
        trained: int = 0,
        because: str = "",
    ) -> Scene:
        """Nodes that have arrived for the next round; ``trained`` is the epoch of their last."""
        for name in names(words):
            number = self.control.next_number if arrived_for is None else arrived_for
            self._put(name, number, seen_s, settings, trained)
            presence = self._present[name]
            self._present[name] = replace(presence, info=replace(presence.info, because=because))
        return self

    def spare(self, words: str) -> Scene:
        """Nodes that wait since before the round was formed."""
        assert self.control.round is not None
        return self.new(words, NOW_S - 90, arrived_for=self.control.round.number)

    def gone(self, words: str, ago_s: float | None = None) -> Scene:
        """Without presence: forever, or for so long."""
        for name in names(words):
            del self._present[name]
            if ago_s is not None:
                self._gone[name] = NOW_S - ago_s
        return self

    def accused(self, name: str, accusation: Accusation, ago_s: float) -> Scene:
        """Without presence, which another one has put an accusation in the place of."""
        self._accused[name] = Accused(accusation, self._revision, NOW_S - ago_s)
        return self

    def left(self, words: str) -> Scene:
        """Announced that they leave, and went."""
        self._left.update(dict.fromkeys(names(words), "left"))
        return self.gone(words)

    def leaving(self, words: str) -> Scene:
        for name in names(words):
            presence = self._present[name]
            info = replace(presence.info, leaving="SIGTERM")
            self._present[name] = replace(presence, info=info)
        return self

    def finished(self, words: str) -> Scene:
        """Nodes whose work in their world is done."""
        for name in names(words):
            presence = self._present[name]
            self._present[name] = replace(presence, info=replace(presence.info, finished=True))
        return self

    def changed(
        self, lost: str = "", waiters: str = "", *, left: str = "", unnamed: int = 0
    ) -> Scene:
        """The leader has published a change of the formed round."""
        record = self.control.round
        assert record is not None
        gone = dict.fromkeys(names(lost), "lease expired")
        gone |= dict.fromkeys(names(left), "left: SIGTERM")
        change = Change(record.run, record.number, names(waiters), gone, unnamed)
        self.control = replace(self.control, change=change, change_revision=60)
        return self

    def slices(self) -> Scene:
        """The members are named in slices, of which some were lost."""
        record = self.control.round
        assert record is not None
        record = replace(record, slices=Slices(record.size, 1, "edition"))
        self.control = replace(self.control, round=record)
        return self

    def closed(self, *, succeeded: bool = True) -> Scene:
        assert self.control.round is not None
        closure = Closure("a", "done", succeeded, 0.0)
        record = replace(self.control.round, closure=closure)
        self._revision += 1
        self.control = replace(
            self.control,
            round=record,
            round_revision=self._revision,
            ended=(Ended(record.origin, closure, self.control.epoch),),
            ended_revision=self._revision,
        )
        return self

    def marker_gone(self) -> Scene:
        """The closed marker is no more; etcd remembers the end."""
        self.control = replace(self.control, round=None, round_revision=0)
        return self

    def _put(
        self,
        name: str,
        arrived_for: int,
        seen_s: float,
        settings: JobSettings | None = None,
        trained: int = 0,
    ) -> None:
        self._revision += 1
        before = self._present.get(name)
        info = NodeInfo(
            name,
            f"host-{name}",
            2000,
            arrived_for,
            settings if settings else self.settings,
            domain=name[0] if self.settings.has_segments else None,
            epoch_trained=trained,
        )
        created = self._revision if before is None else before.create_revision
        self._present[name] = Presence(info, created, self._revision, seen_s)

    # -- what is decided --------------------------------------------------------------------------

    @property
    def nodes(self) -> Nodes:
        present, left = dict(self._present), dict(self._left)
        return Nodes(
            self._revision, present, left, gone=dict(self._gone), accused=dict(self._accused)
        )

    def close(self, now_s: float = NOW_S) -> Close | KeepWaiting:
        return decide_close(
            self.control,
            self.nodes,
            self.settings,
            TIMING,
            now_s,
            opened_s=self.opened_s,
            give_up_s=self.give_up_s,
        )

    def closed_world(self, now_s: float = NOW_S) -> str:
        """The members by rank; fails if the round is not closed now."""
        decision = self.close(now_s)
        assert isinstance(decision, Close), decision
        return " ".join(node.node_id for node in decision.world)

    def change(self, *, trusted: bool = True) -> Change | KeepWaiting:
        trust_s = NOW_S if trusted else NOW_S + 3.0
        return decide_change(self.control, self.nodes, NOW_S, trust_absence_s=trust_s)

    def published(self, *, trusted: bool = True) -> tuple[str, dict[str, str]] | None:
        """The waiters and the lost members of the change; ``None``: nothing is published."""
        decision = self.change(trusted=trusted)
        if isinstance(decision, KeepWaiting):
            return None
        return " ".join(decision.waiters), dict(decision.lost)
