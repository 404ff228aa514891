"""Frozen settings and the parsers that make them from what users type."""

from rdzv_etcd.settings.connection import Connection, Credentials, Endpoint, Tls, parse_endpoints
from rdzv_etcd.settings.fields import DEFAULT_JOB_ID
from rdzv_etcd.settings.options import (
    OPTIONS,
    AfterEnd,
    JobSettings,
    Settings,
    Timing,
    options_table,
)
from rdzv_etcd.settings.parse import settings_from_config

__all__ = [
    "DEFAULT_JOB_ID",
    "OPTIONS",
    "AfterEnd",
    "Connection",
    "Credentials",
    "Endpoint",
    "JobSettings",
    "Settings",
    "Timing",
    "Tls",
    "options_table",
    "parse_endpoints",
    "settings_from_config",
]
