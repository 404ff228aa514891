"""What one node is told in numbers, and where they are shown: the options ``metrics_*``.

    recorder.py      what a node tells; the one that does nothing is used without these options
    definitions.py   the table of all metrics, which docs/metrics.md shows
    prometheus.py    records them with prometheus_client, the only package of the extra
    outputs.py       the text file and the port

This module imports nothing of the extra: only who gives one of the options pays for it. Knows
nothing of etcd, of rounds or of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics.recorder import Recorder
from rdzv_etcd.settings import Settings

if TYPE_CHECKING:
    from socket import socket

    from rdzv_etcd.metrics.outputs import Outputs

PACKAGE = "prometheus_client"

__all__ = ["Recorder", "open_outputs", "recorder_for"]


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
