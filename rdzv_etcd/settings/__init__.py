"""Frozen settings and the parsers that make them from what users type."""

from rdzv_etcd.settings.connection import Connection, Credentials, Endpoint, Tls, parse_endpoints
from rdzv_etcd.settings.options import (
    OPTIONS,
    AfterEnd,
    JobSettings,
    Log,
    Settings,
    Timing,
    options_table,
)
from rdzv_etcd.settings.parse import is_default_job_id, settings_from_config

__all__ = [
    "OPTIONS",
    "AfterEnd",
    "Connection",
    "Credentials",
    "Endpoint",
    "JobSettings",
    "Log",
    "Settings",
    "Timing",
    "Tls",
    "is_default_job_id",
    "options_table",
    "parse_endpoints",
    "settings_from_config",
]
