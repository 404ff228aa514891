"""The metrics of one node, and where they are shown: the options ``metrics_*``.

    prometheus.py    the table of all metrics, and what records them with prometheus_client
    outputs.py       the text file and the port

This module imports nothing of the extra ``metrics``: only a node with one of the options pays for
it. Knows nothing of etcd, of rounds or of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings

if TYPE_CHECKING:
    from socket import socket

    from rdzv_etcd.metrics.outputs import Outputs

_PACKAGE = "prometheus_client"

__all__ = ["Recorder", "open_outputs", "recorder_for"]


class Recorder:
    """What a node reports. This one ignores it: no option asks for metrics.

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
    """Return the recorder that the options ask for. Raises SettingsError without the extra."""
    options = {"metrics_file": settings.metrics_file, "metrics_port": settings.metrics_port}
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if not given:
        return Recorder()
    try:
        from rdzv_etcd.metrics.prometheus import PrometheusRecorder  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise SettingsError(
            f"{' and '.join(given)} needs the package {_PACKAGE}: pip install "
            "'rdzv-etcd[metrics]', or leave the option out"
        ) from None
    return PrometheusRecorder(settings.job_id)


def open_outputs(
    recorder: Recorder, settings: Settings, same_interface_as: socket
) -> Outputs | None:
    """Show what ``recorder`` keeps where the options say; ``None`` if there are none.

    The port listens at the address of the given socket. Blocks for some seconds if a file system
    does not answer. Raises SettingsError if the file cannot be written, or the port is taken.
    """
    if type(recorder) is Recorder:
        return None
    from rdzv_etcd.metrics.outputs import Outputs  # noqa: PLC0415
    from rdzv_etcd.metrics.prometheus import PrometheusRecorder  # noqa: PLC0415

    return Outputs(cast(PrometheusRecorder, recorder), settings, same_interface_as)
