"""What a node tells of itself in numbers. This one listens to nothing: no option asks for it.

Times are seconds on the node's own clock, and arguments: a recorder has none. All methods are
called on the library's event loop, and must neither block nor raise.
"""

from __future__ import annotations


class Recorder:
    """Does nothing; :class:`rdzv_etcd.metrics.prometheus.PrometheusRecorder` does something."""

    def join_began(self, at_s: float) -> None:
        """This node waits for a world."""

    def joined(self, number: int, epoch: int, size: int, at_s: float) -> None:
        """This node has become a member of the world of round ``number``."""

    def join_failed(self, error: str) -> None:
        """The join under way has ended with an error of that class."""

    def world_over(self, cause: str, at_s: float) -> None:
        """The world that this node was in last is over; only the first word about it counts."""

    def declared_lost(self, cause: str, after_s: float | None) -> None:
        """This node, as the leader, has declared a member lost.

        ``after_s``: seconds since the end of its process, if anybody knows.
        """

    def etcd_answered(self, took_s: float, wall_s: float) -> None:
        """etcd has answered a keep-alive; ``wall_s``: seconds since 1970."""

    def etcd_silent(self) -> None:
        """A keep-alive was not answered, or refused."""

    def left(self, at_s: float) -> None:
        """This node has left the job."""
