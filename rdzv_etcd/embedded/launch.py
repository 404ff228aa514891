"""Starts the supervisor, detached, and waits for its report. Knows its command line."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from rdzv_etcd.embedded.addresses import listen_urls
from rdzv_etcd.embedded.binary import BINARY_VARIABLE, Binary
from rdzv_etcd.embedded.child import Login
from rdzv_etcd.embedded.waiting import WARN_AFTER_S, WARN_AGAIN_S
from rdzv_etcd.errors import EmbeddedEtcdError
from rdzv_etcd.settings import Endpoint, Settings

log = logging.getLogger(__name__)

_START_GRACE_S = 30.0
"""What the first node has at least between the start and its first lease."""
STALE_AFTER_S = 600.0
"""A lease that nobody has renewed for so long keeps no etcd, unless nodes' last as long."""
_NOT_FOR_ETCD = ("RDZV_ETCD_USER", "RDZV_ETCD_PASSWORD", "RDZV_ETCD_NODE_ID")
"""Secrets, and what a guard knows an agent's workers by: etcd is none of them."""
# -I and -S: no site packages, no PYTHON* variables; it needs this package and the standard library.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from rdzv_etcd.embedded.supervisor import main; sys.exit(main())"
)


def launch(
    settings: Settings,
    binary: Binary,
    addresses: tuple[str, ...],
    environ: Mapping[str, str],
    deadline: float,
    *,
    stale_after_s: float = STALE_AFTER_S,
) -> dict[str, str]:
    """Start it and return its report: ``outcome`` (started, taken, failed) and ``detail``.

    Blocks until etcd serves, or to ``deadline`` (monotonic seconds). Raises
    :class:`EmbeddedEtcdError` if there is no report.
    """
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as status:
        try:
            subprocess.run(
                _command(settings, binary, addresses, stale_after_s, write_fd),
                input=_login(settings),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env={k: v for k, v in environ.items() if k not in _NOT_FOR_ETCD},
                start_new_session=True,  # a Ctrl-C for the agent is not for etcd
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedEtcdError(
                f"the supervisor of an embedded etcd could not be started: {error}"
            ) from error
        finally:
            os.close(write_fd)
        line = _line(status, binary, deadline)
    report: dict[str, str] = json.loads(line)
    return report


def _line(status: IO[bytes], binary: Binary, deadline: float) -> bytes:
    """Wait for the report; after some seconds, and now and then, say that it takes long."""
    waiter = select.poll()
    waiter.register(status, select.POLLIN)
    began = time.monotonic()
    due = began + WARN_AFTER_S
    while not waiter.poll(max(0.0, min(due, deadline) - time.monotonic()) * 1000):
        now = time.monotonic()
        if now >= deadline:
            raise EmbeddedEtcdError(
                f"the embedded etcd that was started ({binary.path}) did not answer in time"
            )
        if now >= due:
            due = now + WARN_AGAIN_S
            log.warning(
                "waiting %.0f s (of %.0f) for the embedded etcd that this node has started (%s); "
                "if it never comes up, name another in %s",
                now - began,
                deadline - began,
                binary.path,
                BINARY_VARIABLE,
            )
    line = status.readline()
    if not line:
        raise EmbeddedEtcdError(
            f"the supervisor of an embedded etcd ({binary.path}) ended without a report"
        )
    return line


def _command(
    settings: Settings,
    binary: Binary,
    addresses: tuple[str, ...],
    stale_after_s: float,
    status_fd: int,
) -> list[str]:
    endpoint: Endpoint = settings.connection.endpoints[0]
    grace_s, stale_s = settings.embed_grace_s, max(stale_after_s, settings.timing.lease_ttl_s)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(root), "--binary", str(binary.path)]
    command += ["--port", str(endpoint.port)]
    for url in listen_urls(endpoint, addresses):
        command += ["--listen", url]
    command += ["--advertise", f"http://{endpoint.target}", "--grace", str(grace_s)]
    command += ["--start-grace", str(max(grace_s, _START_GRACE_S))]
    return [*command, "--stale-after", str(stale_s), "--status-fd", str(status_fd)]


def _login(settings: Settings) -> bytes:
    credentials = settings.connection.credentials
    if credentials is None:
        return b""
    return json.dumps(asdict(Login(credentials.user, credentials.password))).encode()
