"""What one node is told in numbers, and where they are shown: the options ``metrics_*``.

    definitions.py   the table of all metrics, which docs/metrics.md shows
    prometheus.py    records them with prometheus_client, the only package of the extra
    outputs.py       the text file and the port

This module imports nothing of the extra: only who gives one of the options pays for it. Knows
nothing of etcd, of rounds or of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings

if TYPE_CHECKING:
    from socket import socket

    from rdzv_etcd.metrics.outputs import Outputs

PACKAGE = "prometheus_client"

__all__ = ["Recorder", "open_outputs", "recorder_for"]


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


def recorder_for(settings: Settings) -> Recorder:
    """The recorder that the options ask for. Raises SettingsError if the extra is missing."""
    given = [name for name in ("metrics_file", "metrics_port") if _is_given(settings, name)]
    if not given:
        return Recorder()
    try:
        from rdzv_etcd.metrics.prometheus import (  # noqa: PLC0415 - only who asks for it pays
            PrometheusRecorder,
        )
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise SettingsError(
            f"{' and '.join(f'{name}=' for name in given)} needs the package {PACKAGE}: "
            "pip install 'rdzv-etcd[metrics]', or leave the option out"
        ) from None
    return PrometheusRecorder(settings.job_id)


def open_outputs(
    recorder: Recorder, settings: Settings, same_interface_as: socket
) -> Outputs | None:
    """Show what was recorded where the options say; ``None`` if they say nothing.

    The port listens at the address at which ``same_interface_as`` does. Blocks for some seconds if
    a file system does not answer. Raises SettingsError if the file cannot be written, or the port
    is taken.
    """
    if type(recorder) is Recorder:
        return None
    from rdzv_etcd.metrics.outputs import Outputs  # noqa: PLC0415 - see above
    from rdzv_etcd.metrics.prometheus import PrometheusRecorder  # noqa: PLC0415

    return Outputs(cast(PrometheusRecorder, recorder), settings, same_interface_as)


def _is_given(settings: Settings, name: str) -> bool:
    return getattr(settings, name) is not None
