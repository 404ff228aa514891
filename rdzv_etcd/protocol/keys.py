"""Key paths of one job. Below ``store`` :mod:`rdzv_etcd.protocol.store` builds some as well.

    <prefix>/<job>/audit/<round>/<run>         what happened in a round            as ctl/epoch
    <prefix>/<job>/barrier/<round>/<name>/…    barriers and exchanges              job lease
    <prefix>/<job>/ctl/round                   the round record                    job lease
    <prefix>/<job>/ctl/ended                   the last runs that are over         its own
    <prefix>/<job>/ctl/epoch                   what the next run counts on from    its own
    <prefix>/<job>/ctl/leader                  who closes rounds                   its session
    <prefix>/<job>/ctl/change                  why the formed round is over        job lease
    <prefix>/<job>/ctl/drain/<node id>         a request that this node leave      its own, session
    <prefix>/<job>/ctl/stranger                which node could not join, and why  its own
    <prefix>/<job>/nodes/<node id>             presence of one node                its session
    <prefix>/<job>/ranks/<round>/<edition>/<n> a slice of a large world's ranks    job lease
    <prefix>/<job>/store/<round>/<run>/<key>   the round's key-value store         job lease

A round's number alone does not name it: another run of the job counts from 1 again, perhaps while
the last one's keys still live. ``ctl`` and ``nodes`` are neighbours, so one watch covers both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import quote

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd.port import Delete, Get, prefix_end

_ROUND_DIGITS = 10
_RANK_DIGITS = 6


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys in ``[start, end)``."""

    start: bytes
    end: bytes

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key < self.end

    def after(self, key: bytes) -> KeyRange:
        """Return the part of this range that comes after ``key``."""
        return KeyRange(_next_key(key), self.end)

    def read(self, *, limit: int = 0, keys_only: bool = False, count_only: bool = False) -> Get:
        """Read its keys, or the first ``limit`` of them."""
        return Get(self.start, self.end, limit, keys_only, count_only)

    def delete(self) -> Delete:
        return Delete(self.start, self.end)


def span(keys: Collection[bytes]) -> KeyRange:
    """Return the smallest range that all the keys are in."""
    return KeyRange(min(keys), _next_key(max(keys)))


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Every key path of one job.

    The job id is percent-encoded, so an id with ``/``, spaces or non-ASCII characters is one path
    segment and cannot reach another job's keys.
    """

    prefix: str
    job_id: str
    root: bytes = field(init=False, repr=False, compare=False)
    """The prefix of all the job's keys, with a trailing slash."""

    def __post_init__(self) -> None:
        if not self.job_id:
            raise SettingsError("the job id (--rdzv-id) is empty")
        # surrogatepass: an argument that is not valid text is also an id
        job = quote(self.job_id, safe="", errors="surrogatepass")
        root = f"{self.prefix.rstrip('/')}/{job}/".encode(errors="surrogateescape")
        object.__setattr__(self, "root", root)  # every key is made from it

    # -- control: what every node watches ---------------------------------------------------------

    @property
    def round(self) -> bytes:
        return self.root + b"ctl/round"

    @property
    def leader(self) -> bytes:
        return self.root + b"ctl/leader"

    @property
    def change(self) -> bytes:
        return self.root + b"ctl/change"

    @property
    def ended(self) -> bytes:
        return self.root + b"ctl/ended"

    @property
    def epoch(self) -> bytes:
        return self.root + b"ctl/epoch"

    @property
    def refused(self) -> bytes:
        return self.root + b"ctl/stranger"

    def drain(self, node_id: str) -> bytes:
        return self.drains.start + node_id.encode()

    def drained(self, key: bytes) -> str:
        """Return the node id in a key of :attr:`drains`."""
        return key[len(self.drains.start) :].decode(errors="replace")

    @property
    def drains(self) -> KeyRange:
        """A part of :attr:`control`."""
        return _range(self.root + b"ctl/drain/")

    @property
    def control(self) -> KeyRange:
        return _range(self.root + b"ctl/")

    # -- presence: what only the leader watches ---------------------------------------------------

    def node(self, node_id: str) -> bytes:
        return self.root + b"nodes/" + node_id.encode()

    @property
    def nodes(self) -> KeyRange:
        return _range(self.root + b"nodes/")

    @property
    def watched(self) -> KeyRange:
        """Control and presences: the whole state of a job."""
        return KeyRange(self.control.start, self.nodes.end)

    def node_id(self, key: bytes) -> str:
        """Return the node id in a key of :attr:`nodes`."""
        return key[len(self.nodes.start) :].decode(errors="replace")

    # -- per round --------------------------------------------------------------------------------

    # A range that is deleted is no wider than rounds' numbers: a job whose prefix is below this
    # job's root (another team's, named like a segment of these paths) keeps its keys.

    def audit(self, round_number: int, run: str) -> bytes:
        return self.root + b"audit/" + _round(round_number) + b"/" + _segment(run)

    @property
    def audits(self) -> KeyRange:
        return self._rounds(b"audit/")

    def store(self, round_number: int, run: str) -> KeyRange:
        """The range of a round's store; a store key is ``store(r, run).start + key``."""
        return _range(self.root + b"store/" + _round(round_number) + b"/" + _segment(run) + b"/")

    @property
    def ranks(self) -> KeyRange:
        return self._rounds(b"ranks/")

    def editions(self, round_number: int) -> KeyRange:
        """All attempts to publish the ranks of a round."""
        return _range(self.root + b"ranks/" + _round(round_number) + b"/")

    def edition(self, round_number: int, edition: str) -> KeyRange:
        return _range(self.editions(round_number).start + _segment(edition) + b"/")

    def slice(self, round_number: int, edition: str, index: int) -> bytes:
        return self.edition(round_number, edition).start + b"%05d" % index

    @property
    def stores(self) -> KeyRange:
        return self._rounds(b"store/")

    def barrier(self, round_number: int, name: str) -> KeyRange:
        return _range(self.root + b"barrier/" + _round(round_number) + b"/" + _segment(name) + b"/")

    @property
    def barriers(self) -> KeyRange:
        return self._rounds(b"barrier/")

    def rounds(self, before: int | None = None) -> tuple[KeyRange, ...]:
        """Return the keys of all rounds, or of those before one; audits are not among them."""
        return tuple(self._rounds(family, before) for family in (b"barrier/", b"ranks/", b"store/"))

    def _rounds(self, family: bytes, before: int | None = None) -> KeyRange:
        """The keys of all rounds in a family of keys, or of those before one.

        All but the last possible one, 10^9, whose number does not begin with 0: a job ``1`` of
        another team would be among them.
        """
        start = self.root + family
        return KeyRange(start + _round(0), start + (b"1" if before is None else _round(before)))

    # -- all of it ---------------------------------------------------------------------------------

    @property
    def below(self) -> KeyRange:
        """All keys below :attr:`root`: another job's prefix may be there."""
        return _range(self.root)


@dataclass(frozen=True, slots=True)
class CollectiveKeys:
    """The keys of one named barrier, or of a world's exchanges, all within ``range``.

    by/<rank>               that member's last write: its mark
    given/<turn>/<rank>     its contribution to that turn
    done                    the last turn in which all have given
    """

    range: KeyRange

    @classmethod
    def of_barrier(cls, keys: JobKeys, round_number: int, epoch: int, name: str) -> CollectiveKeys:
        """Return those of the barrier ``name`` in one world.

        The epoch is part of its path, because a run that begins again after a loss of the record
        counts its rounds again, while keys from before may still be there.
        """
        return cls(keys.barrier(round_number, f"{epoch} {name}"))

    @classmethod
    def of_exchange(cls, keys: JobKeys, round_number: int, epoch: int) -> CollectiveKeys:
        """Return those of the exchanges in one world. No barrier has such a name."""
        return cls(keys.barrier(round_number, f"exchange {epoch}"))

    @property
    def done(self) -> bytes:
        return self.range.start + b"done"

    def mark(self, rank: int) -> bytes:
        return self.range.start + b"by/" + _rank(rank)

    def all_given(self, turn: int) -> KeyRange:
        return _range(self.range.start + b"given/%d/" % turn)

    def given(self, turn: int, rank: int) -> bytes:
        return self.all_given(turn).start + _rank(rank)

    def rank(self, given: bytes) -> int:
        """Return the rank in a key of :meth:`given`."""
        return int(given[-_RANK_DIGITS:])


def _round(number: int) -> bytes:
    return b"%0*d" % (_ROUND_DIGITS, number)


def _rank(number: int) -> bytes:
    return b"%0*d" % (_RANK_DIGITS, number)


def _segment(name: str) -> bytes:
    return quote(name, safe="", errors="surrogatepass").encode()


def _next_key(key: bytes) -> bytes:
    return key + b"\x00"


def _range(prefix: bytes) -> KeyRange:
    return KeyRange(prefix, prefix_end(prefix))
