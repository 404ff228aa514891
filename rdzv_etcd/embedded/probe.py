"""Ask what answers at an address. One question over plain HTTP; no policy.

Source: etcd serves ``/version`` on its client port without authentication in all 3.x versions.
"""

from __future__ import annotations

import http.client
import json
from enum import Enum

from rdzv_etcd.settings import Endpoint


class Answer(Enum):
    """What was found at an endpoint."""

    ETCD = "an etcd"
    NOTHING = "nothing listens there"
    SILENCE = "something accepts connections but does not answer"
    STRANGER = "something that is not etcd listens there"
    TLS = "something that wants https listens there"


def probe(endpoint: Endpoint, timeout_s: float) -> Answer:
    """Return what is at ``endpoint``; blocks for at most about ``timeout_s``; never raises.

    A machine that cannot be resolved or reached counts as ``NOTHING``: it may come up yet.
    """
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    try:
        connection.connect()
    except (OSError, UnicodeError):
        connection.close()
        return Answer.NOTHING
    try:
        connection.request("GET", "/version", headers={"Connection": "close"})
        with connection.getresponse() as response:
            return _judge(response.read(4096))
    except (OSError, http.client.RemoteDisconnected):
        return Answer.SILENCE  # timed out or cut off: an etcd that starts or ends does that
    except http.client.HTTPException:
        return Answer.STRANGER
    finally:
        connection.close()


def _judge(body: bytes) -> Answer:
    if b"HTTPS server" in body:  # what Go's TLS listener answers to plain http
        return Answer.TLS
    try:
        page = json.loads(body)
    except ValueError:
        return Answer.STRANGER
    known = isinstance(page, dict) and "etcdserver" in page
    return Answer.ETCD if known else Answer.STRANGER
