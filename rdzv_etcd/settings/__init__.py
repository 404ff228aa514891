"""Frozen settings and the parsers that make them from what users type."""

from rdzv_etcd.settings.model import (
    Connection,
    Credentials,
    Endpoint,
    JobSettings,
    Settings,
    Timing,
    Tls,
)

__all__ = [
    "Connection",
    "Credentials",
    "Endpoint",
    "JobSettings",
    "Settings",
    "Timing",
    "Tls",
]
