"""Ask what answers at an address. One question over plain HTTP; no policy.

Source: etcd serves ``/version`` on its client port without authentication in all 3.x versions.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import Enum

from rdzv_etcd.embedded.http import MalformedReplyError, ask, connect
from rdzv_etcd.settings import Endpoint


class Answer(Enum):
    """What was found at an endpoint."""

    ETCD = "an etcd"
    NOTHING = "nothing listens there"
    SILENCE = "something accepts connections but does not answer"
    STRANGER = "something that is not etcd listens there"
    TLS = "something that speaks only https listens there"


@dataclass(frozen=True, slots=True)
class Found:
    answer: Answer
    detail: str = ""
    """For NOTHING: why there was no connection, in the system's words."""


def probe(endpoint: Endpoint, timeout_s: float) -> Found:
    """Return what is at ``endpoint``; blocks for at most about ``timeout_s``; never raises.

    A machine that cannot be resolved or reached counts as ``NOTHING``: it may come up yet. (Only
    the resolver keeps its own time.)
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = connect(endpoint.host, endpoint.port, deadline)
    except UnicodeError:
        return Found(Answer.NOTHING, f"{endpoint.host} is not a host name")
    except OSError as error:
        return Found(Answer.NOTHING, (error.strerror or str(error)).lower())
    with connection:
        try:
            reply = ask(connection, "GET", "/version", deadline=deadline)
        except OSError:
            return Found(Answer.SILENCE)  # an etcd that starts or ends does that
        except MalformedReplyError:
            return Found(Answer.STRANGER)
    return Found(_judge(reply.body))


def _judge(body: bytes) -> Answer:
    if b"HTTPS server" in body:  # what Go's TLS listener answers to plain http
        return Answer.TLS
    try:
        page = json.loads(body)
    except ValueError:
        return Answer.STRANGER
    known = isinstance(page, dict) and "etcdserver" in page
    return Answer.ETCD if known else Answer.STRANGER
