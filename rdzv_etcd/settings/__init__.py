"""Frozen settings and the parsers that make them from what users type."""

from rdzv_etcd.settings.config import is_default_job_id, settings_from_config
from rdzv_etcd.settings.connection import Connection, Credentials, Endpoint, Tls
from rdzv_etcd.settings.definitions import AfterEnd, JobSettings, Log, Settings, Timing
from rdzv_etcd.settings.endpoints import parse_endpoints
from rdzv_etcd.settings.options import OPTIONS, options_table

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
