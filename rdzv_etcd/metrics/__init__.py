"""The metrics of one node: the option ``metrics_port``.

    prometheus.py    the table of all metrics, and what records and serves them

This module imports nothing of the extra ``metrics``: only a node with the option pays for it. Knows
nothing of etcd, of rounds or of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings

if TYPE_CHECKING:
    from socket import socket

    from rdzv_etcd.metrics.prometheus import Server

_PACKAGE = "prometheus_client"

__all__ = ["Recorder", "recorder_for", "serve"]


class Recorder:
    """What a node reports. This one ignores it: the option is not given.

    Times are seconds on the node's own clock, and arguments: a recorder has none. All methods are
    called on the library's event loop, and must neither block nor raise.
    """

    def join_began(self, at_s: float) -> None:
        """This node waits for a world."""

    def joined(self, number: int, epoch: int, size: int, at_s: float) -> None:
        """This node has become a member of the world of round ``number``."""

    def join_failed(self, error: str) -> None:
        """The join under way has ended with an error of that class."""

    def world_over(self, cause: str, at_s: float) -> None:
        """This node's last world is over; only the first call for it counts."""

    def declared_lost(self, cause: str, after_s: float | None) -> None:
        """This node, as the leader, has declared a member lost, ``after_s`` seconds after the end
        of its process if that is known."""

    def etcd_answered(self, took_s: float, wall_s: float) -> None:
        """etcd has answered a keep-alive; ``wall_s``: seconds since 1970."""

    def etcd_silent(self) -> None:
        """A keep-alive was not answered, or refused."""

    def left(self, at_s: float) -> None:
        """This node has left the job."""


def recorder_for(settings: Settings) -> Recorder:
    """Return the recorder that the option asks for. Raises SettingsError without the extra."""
    if settings.metrics_port is None:
        return Recorder()
    try:
        from rdzv_etcd.metrics.prometheus import PrometheusRecorder  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise SettingsError(
            f"metrics_port= needs the package {_PACKAGE}: pip install "
            "'rdzv-etcd[metrics]', or leave the option out"
        ) from None
    return PrometheusRecorder(settings.job_id)


def serve(recorder: Recorder, settings: Settings, same_interface_as: socket) -> Server | None:
    """Serve what ``recorder`` keeps, if the option asks for it, at the address of the given socket.
    Raises SettingsError if the port is taken."""
    if settings.metrics_port is None:
        return None
    from rdzv_etcd.metrics.prometheus import PrometheusRecorder, Server  # noqa: PLC0415

    made = cast(PrometheusRecorder, recorder)
    return Server(made, settings.metrics_port, settings.job_id, same_interface_as)
