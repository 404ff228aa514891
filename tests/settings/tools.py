"""Settings from a few words, and the message if they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings, settings_from_config


def settings(
    *,
    endpoint: Any = "h1",
    job_id: Any = "job",
    nodes: tuple[Any, Any] = (1, 4),
    local_addr: Any = None,
    environ: dict[str, str] | None = None,
    **config: object,
) -> Settings:
    least, most = nodes
    return settings_from_config(
        endpoint=endpoint,
        job_id=job_id,
        min_nodes=least,
        max_nodes=most,
        local_addr=local_addr,
        config=config,
        environ=environ or {},
    )


def refused(message: str, **arguments: Any) -> str:
    with pytest.raises(SettingsError, match=message) as caught:
        settings(**arguments)
    return str(caught.value)
