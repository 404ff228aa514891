"""Every exception of this library that its users can meet.

One base, data on the instance, one message: what happened, to which node or key, and what to do.
Nothing here knows gRPC or torch: the etcd layer translates gRPC's errors into these, the torch
plugin translates these into torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rdzv_etcd.text import LINE, shown
from rdzv_etcd.world_change import WorldChange

E = TypeVar("E", bound="RdzvEtcdError")


class RdzvEtcdError(Exception):
    """Base of every error raised by this library.

    Its message is one printable line of bounded length, whatever others wrote in it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(message, LINE))

    def copy(self: E) -> E:
        """Return an equal error; what its traceback gets from now on, this one's does not."""
        other = _made_again(type(self), self.args, self.__dict__)
        other.__cause__, other.__context__ = self.__cause__, self.__context__
        other.__suppress_context__ = self.__suppress_context__
        return other.with_traceback(self.__traceback__)

    def __reduce__(self: E) -> tuple[Callable[..., E], tuple[object, ...]]:
        """Let it be pickled and copied, whatever its constructor takes."""
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[E], args: tuple[object, ...], attributes: Mapping[str, object]) -> E:
    error = kind.__new__(kind)
    super(RdzvEtcdError, error).__init__(*args)
    error.__dict__.update(attributes)
    return error


class SettingsError(RdzvEtcdError, ValueError):
    """A setting is unknown, malformed, out of range, or contradicts another one."""


class StubsError(RdzvEtcdError, ImportError):
    """The package etcd3 is missing, or is not laid out as etcd3 0.12 is."""


class ForkedProcessError(RdzvEtcdError, RuntimeError):
    """This process is a forked child, and what it tried to use lives only in its parent."""

    def __init__(self, parent: int) -> None:
        super().__init__(
            f"this is a forked child of process {parent}, which has used rdzv_etcd: neither its "
            "nodes and stores nor gRPC's connections and threads can be used in a fork. Start the "
            "process with the start method 'spawn' or 'forkserver' instead (multiprocessing's "
            "get_context, torch.multiprocessing's start_processes), or fork before the first use"
        )
        self.parent = parent


# --- etcd ---------------------------------------------------------------------------------------


class EtcdError(RdzvEtcdError):
    """A request to etcd failed.

    ``maybe_applied``: whether it may have been applied nevertheless: an earlier attempt of the
    same call had no reply.
    """

    maybe_applied = False


class EtcdUnavailableError(EtcdError):
    """No endpoint answered within the deadline, and nothing was applied.

    A read that failed, or a write that is known not to have reached a server. ``endpoints`` are
    those that were tried, with what the last attempt at each failed with.
    """

    def __init__(self, message: str = "", *, endpoints: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.endpoints: Mapping[str, str] = dict(endpoints or {})


class OutcomeUnknownError(EtcdError):
    """A write may or may not have been applied: read before acting, never just retry."""

    maybe_applied = True


class EtcdRefusedError(EtcdError):
    """etcd answered, and refused: only an operator can change that, but often one will.

    A node that is just joining raises it at once; a node that belongs to a job waits, and logs
    that.
    """


class EtcdAuthError(EtcdRefusedError):
    """etcd refused the user, the password or the client certificate, or asks for one."""


class EtcdPermissionError(EtcdRefusedError):
    """The authenticated user may not touch this key range."""


class EtcdTlsError(EtcdRefusedError):
    """The TLS handshake failed, or a certificate or key file is unusable."""


class EtcdNoSpaceError(EtcdRefusedError):
    """etcd's database is over its quota (NOSPACE alarm); only an operator can clear it."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            "etcd's database is over its quota: an operator must compact it, defragment each of "
            f"its members, and then run `etcdctl alarm disarm` ({detail})"
        )
        self.detail = detail


class RequestTooLargeError(EtcdError):
    """The request exceeds what the server accepts (1.5 MiB by default)."""


class InvalidRequestError(EtcdError):
    """The server refused the request as malformed: a defect in this library or an old server."""


class LeaseNotFoundError(EtcdError):
    """The lease does not exist, or no longer does."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"etcd lease {lease_id:016x} does not exist, or no longer does")
        self.lease_id = lease_id


class LeaseExistsError(EtcdError):
    """A lease with the requested id already exists."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"etcd lease {lease_id:016x} already exists")
        self.lease_id = lease_id


class WatchLostError(EtcdError):
    """The watch has a gap: read a fresh snapshot and watch from its revision."""


class CompactedError(WatchLostError):
    """The revision asked for has been compacted away."""

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"the requested revision was compacted; the oldest is {compact_revision}")
        self.compact_revision = compact_revision


class RevisionRegressedError(WatchLostError):
    """The cluster's revision is older than one seen before: its data was wiped or restored."""

    def __init__(self, seen: int, current: int) -> None:
        super().__init__(
            f"etcd's revision went back from {seen} to {current}: its data were wiped or restored"
        )
        self.seen = seen
        self.current = current


# --- rendezvous ---------------------------------------------------------------------------------


class RendezvousFailedError(RdzvEtcdError):
    """The node could not take part in a round."""


class MisuseError(RendezvousFailedError):
    """The program used a group in a way that is not possible; the message explains what is."""


class JobClosedError(RendezvousFailedError):
    """The job was closed; the message names the node that closed it, when, and its reason.

    ``closed_by`` is the id of the node that closed it, ``reason`` what it gave as its reason;
    ``succeeded`` is whether it was closed because its work was done; ``was_member`` whether
    this node belonged to the last round.
    """

    def __init__(
        self,
        message: str,
        *,
        closed_by: str = "",
        reason: str = "",
        succeeded: bool,
        was_member: bool,
    ) -> None:
        super().__init__(message)
        self.closed_by = closed_by
        self.reason = reason
        self.succeeded = succeeded
        self.was_member = was_member


class JoinTimeoutError(RendezvousFailedError):
    """The join timeout passed before the round was formed; the message names the nodes that
    arrived, and the members of the round before that did not.

    ``arrived`` are the ids of those that did, ``None`` if etcd did not answer.
    """

    def __init__(self, message: str, *, arrived: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.arrived = None if arrived is None else tuple(arrived)


class GateError(RendezvousFailedError):
    """This node did not pass its gate, so it does not join; the message explains why.

    ``node`` is its id; ``exit_code`` that of the gate's command, negative for a signal, ``None`` if
    it could not be started, or was not done in time. ``output`` are the last lines that it wrote.
    """

    def __init__(
        self, message: str, *, node: str = "", exit_code: int | None = None, output: str = ""
    ) -> None:
        super().__init__(message)
        self.node = node
        self.exit_code = exit_code
        self.output = output


class DrainedError(RendezvousFailedError):
    """This node was drained: it has left, and does not join again.

    ``by`` is the origin of the request: this node's own id, or what an operator gave. ``reason`` is
    why.
    """

    def __init__(self, message: str, *, by: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.by = by
        self.reason = reason


class JobSettingsMismatchError(RendezvousFailedError):
    """This node's min/max/node_unit differ from the job's; the message has both."""


class StateCorruptError(RendezvousFailedError):
    """A key of the job holds something this library did not write; the message names the key."""

    _cure = "Delete the key"

    def __init__(self, key: str, problem: str, writer: str = "") -> None:
        """``writer`` is what etcd knows about the writer."""
        by_whom = f" ({writer})" if writer else ""
        super().__init__(
            f"etcd key {shown(key, 500)!r} is not as this library writes it: {shown(problem)}"
            f"{by_whom}. {self._cure}, or use another job id or prefix"
        )
        self.key = key
        self.problem = problem


class StateVersionError(StateCorruptError):
    """A key of the job has a format of another version of this library: it may well be in use."""

    _cure = "Start all nodes of a job with one version of rdzv-etcd"


class UnwritableValueError(RendezvousFailedError):
    """What this node was about to write is outside the limits of what the others would read."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the other nodes could not read what this node is about to write: {shown(problem)}"
        )


class TaskFailedError(RendezvousFailedError):
    """A background task of this node failed unexpectedly; the message and the cause show how.

    The node no longer takes part. Its log has the traceback.
    """

    def __init__(self, task: str, error: BaseException) -> None:
        super().__init__(
            f"this node cannot continue, because its background task {task!r} failed with "
            f"{type(error).__name__}: {shown(error)}"
        )
        self.task = task


class WorldOverError(RendezvousFailedError):
    """The world is over, and what was waited for will not come: join the next one.

    ``change`` is the reason, as :attr:`rdzv_etcd.World.change` does.
    """

    def __init__(self, message: str = "", *, change: WorldChange | None = None) -> None:
        super().__init__(message)
        self.change = change


class WorldClosedError(JobClosedError, WorldOverError):
    """The world is over because its job was closed: what a wait in it raises then.

    So ``except WorldOverError`` around the work in a world catches every end of it; the next join
    ends the loop, or raises why the job has failed.
    """

    def __init__(
        self,
        message: str,
        *,
        closed_by: str = "",
        reason: str = "",
        succeeded: bool,
        change: WorldChange | None = None,
    ) -> None:
        super().__init__(
            message, closed_by=closed_by, reason=reason, succeeded=succeeded, was_member=True
        )
        self.change = change


class BarrierBrokenError(WorldOverError):
    """The round changed while nodes were waiting at a barrier."""


class BarrierTimeoutError(RendezvousFailedError):
    """Not every member reached the barrier, or gave its part, in time; the message names those that
    are missing.

    ``missing`` are their ids, ``None`` if etcd did not answer.
    """

    def __init__(self, message: str, *, missing: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.missing = None if missing is None else tuple(missing)


# --- the round's store ---------------------------------------------------------------------------


class StoreTimeoutError(RdzvEtcdError):
    """A store operation was not done in time; the message names the keys it waited for.

    ``keys`` are all of them that were not there; empty for a write that others were quicker than.
    """

    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class StoreLostError(RdzvEtcdError):
    """A world's store has lost data that was in it, so what it returns may be wrong: a counter may
    have begun from zero again. It stays unusable; the next world has a new one."""


class NotANumberError(RdzvEtcdError, ValueError):
    """What a store's key holds is no number, so nothing was added to it; the message shows it."""


# --- embedded etcd ------------------------------------------------------------------------------


class EmbeddedEtcdError(RdzvEtcdError):
    """The embedded etcd could not be started; the message names the binary and the cause."""
