"""Say why no etcd answers at an endpoint, as far as this machine can tell. Changes nothing."""

from __future__ import annotations

import socket

from rdzv_etcd.embedded import lock
from rdzv_etcd.embedded.addresses import own_addresses
from rdzv_etcd.embedded.probe import Answer, Found
from rdzv_etcd.embedded.trust import listeners, reached_by
from rdzv_etcd.settings import Endpoint
from rdzv_etcd.settings.hosts import resolve

WARN_AFTER_S = 5.0
"""So long a wait is silent."""
WARN_AGAIN_S = 60.0


def why_nobody_answers(endpoint: Endpoint, found: Found) -> str:
    """Return the cause, and what to do. Blocks for a name look-up."""
    own = own_addresses(endpoint.host)
    if own:
        return _here(endpoint, found, own)
    addresses = resolve(endpoint.host)
    if not addresses:
        return (
            f"{found.answer.value}: {endpoint.host} cannot be resolved on this machine; is it "
            "spelt right in --rdzv-endpoint?"
        )
    detail = f" ({found.detail})" if found.detail else ""
    if endpoint.host not in addresses:
        detail = f" at {', '.join(addresses)}{detail}"
    return (
        f"{found.answer.value}{detail}. {endpoint.host} is not this machine "
        f"({socket.gethostname()}); is that right, and is a node running there with embed=1?"
    )


def _here(endpoint: Endpoint, found: Found, own: tuple[str, ...]) -> str:
    keeper = lock.holder(endpoint.port)
    if keeper is None:
        return f"{found.answer.value}. {endpoint.host} is this machine; it will be tried again"
    whose = "another node of this machine" if keeper.pid is None else f"process {keeper.pid}"
    elsewhere = [
        listener.address
        for listener in listeners(endpoint.port)
        if not any(reached_by(listener, address) for address in own)
    ]
    if elsewhere and found.answer is Answer.NOTHING:
        return (
            f"{whose} keeps an embedded etcd on this port that listens only on "
            f"{', '.join(elsewhere)}; give every node the same --rdzv-endpoint"
        )
    return f"{found.answer.value}; {whose} of this machine is starting it"
