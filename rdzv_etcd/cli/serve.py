"""``rdzv-etcd serve``: the embedded etcd in the foreground, until a signal stops it.

Started before anything that has threads: it forks.
"""

from __future__ import annotations

import os
import signal

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.options import JobTarget, common
from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.child import (
    START_LIMIT_S,
    EtcdProcess,
    Plan,
    StartError,
    StopRequestedError,
)
from rdzv_etcd.embedded.launch import warn_of_strangers
from rdzv_etcd.embedded.port import certificates_at, listen_addresses, listen_urls
from rdzv_etcd.embedded.program import UNBLOCKED, asks_to_stop, take_lock, wait_for_signal
from rdzv_etcd.embedded.start import check_embeddable
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Connection

_LOOK_EVERY_S = 60.0
"""The end of etcd, or a signal to stop, interrupts this."""


@click.command()
@common
def serve(*, target: JobTarget) -> int:
    """Run a throw-away etcd in the foreground; its data is deleted when it stops.

    The same etcd that embed=1 starts, except that it keeps running. With a secret
    (RDZV_ETCD_EMBED_SECRET, or embed_secret_file=) only clients with the same one get in. For a
    laptop and for tests: jobs should depend on an etcd cluster of their own.

    \b
    Exit code: 0 stopped by a signal, 1 it did not start or stopped by itself.
    """
    connection = target.settings().connection
    plan, version = _plan(connection)
    warn_of_strangers(connection, [connection.endpoints[0].port])
    port = connection.endpoints[0].port
    try:
        held = take_lock(port)
    except OSError:
        raise EmbeddedEtcdError(f"an embedded etcd already runs at port {port}") from None
    signal.pthread_sigmask(signal.SIG_BLOCK, UNBLOCKED)  # they are waited for
    with held:
        return _serve(plan, version, target.as_json)


def _plan(connection: Connection) -> tuple[Plan, str]:
    """Return what to run, and the version of that etcd."""
    check_embeddable(connection)
    if len(connection.endpoints) != 1:
        raise SettingsError(
            f"serve runs one etcd, at one endpoint of this machine; got {connection}"
        )
    endpoint = connection.endpoints[0]
    addresses = listen_addresses(endpoint.host)
    if not addresses:
        raise SettingsError(f"--rdzv-endpoint: {endpoint.host} is not an address of this machine")
    binary = find_binary(os.environ)
    listen = listen_urls(addresses, endpoint.port, connection.scheme)
    certificates = certificates_at(connection, addresses)
    return Plan(str(binary.path), listen, str(connection), certificates), binary.version


def _serve(plan: Plan, version: str, as_json: bool) -> int:
    etcd, where = EtcdProcess(plan), plan.advertise
    try:
        output.warn(f"starting {plan.binary}: waiting up to {START_LIMIT_S:g} s for its answer")
        etcd.start()
        output.show_result(
            "serving",
            {"endpoint": where, "etcd": version},
            f"etcd {version} serves {where}; Ctrl-C stops it and deletes its data",
            as_json=as_json,
        )
        while etcd.running:
            if asks_to_stop(wait_for_signal(_LOOK_EVERY_S)):
                return output.DONE
            etcd.tidy()
    except StopRequestedError:
        return output.DONE
    except StartError as error:
        raise EmbeddedEtcdError(f"no etcd at {where}: {error}") from error
    finally:
        etcd.remove()
    raise EmbeddedEtcdError(f"the etcd at {where} stopped by itself")
