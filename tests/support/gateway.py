"""etcd seen from outside: its grpc-gateway (HTTP JSON) and its Prometheus metrics.

On purpose independent of the library's own client, so that checks do not rest on what they check.
Source: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tenacity
from prometheus_client.parser import text_string_to_metric_families

_TOKENS = 20
"""How many tokens to try for one call: on a slow machine a short-lived one may be too old."""


class GatewayError(Exception):
    """The server answered with an HTTP error; ``status`` and ``body`` are its words."""

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__(f"{path}: HTTP {status}: {body[:400]}")
        self.status = status
        self.body = body


def _is_expired_token(error: BaseException) -> bool:
    return isinstance(error, GatewayError) and "invalid auth token" in error.body


@dataclass(frozen=True)
class StoredKey:
    """A key as the server holds it."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


class Metrics:
    """A ``/metrics`` page."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of that name whose labels include ``labels``."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def requests(self) -> dict[str, float]:
        """Return how many calls of each gRPC method the server has begun, as ``{"Txn": 3.0}``.

        A stream counts once however many messages it carries. The gateway's own calls count too.
        """
        counts: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == "grpc_server_started_total" and sample.value:
                method = sample.labels["grpc_method"]
                counts[method] = counts.get(method, 0.0) + sample.value
        return counts


class Gateway:
    """The JSON API of one server. Every call is one connection, closed when it returns."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self.host = host
        self.port = port
        self._context = context
        self._login: tuple[str, str] | None = None

    def log_in_as(self, user: str, password: str) -> None:
        """Authenticate every later call (a fresh token each time: they may be short-lived)."""
        self._login = (user, password)

    @tenacity.retry(
        retry=tenacity.retry_if_exception(_is_expired_token),
        stop=tenacity.stop_after_attempt(_TOKENS),
        reraise=True,
    )
    def call(self, path: str, body: Mapping[str, object], *, timeout_s: float = 30.0) -> Any:
        """POST and return the decoded reply; raises :class:`GatewayError` or :class:`OSError`."""
        headers = {"Content-Type": "application/json"}
        if self._login is not None and path != "/v3/auth/authenticate":
            user, password = self._login
            reply = self.call("/v3/auth/authenticate", {"name": user, "password": password})
            headers["Authorization"] = reply["token"]
        return json.loads(self._fetch("POST", path, json.dumps(body), headers, timeout_s))

    def get_text(self, path: str, *, timeout_s: float = 10.0) -> str:
        """GET, for ``/health`` and ``/metrics``."""
        return self._fetch("GET", path, None, {}, timeout_s)

    # -- what is stored ---------------------------------------------------------------------------

    def keys(self, prefix: bytes = b"") -> dict[bytes, StoredKey]:
        """Return everything stored under ``prefix`` (all keys without one)."""
        request = {"key": _b64(prefix or b"\x00"), "range_end": _b64(_prefix_end(prefix))}
        reply = self.call("/v3/kv/range", request)
        found = (_stored(kv) for kv in reply.get("kvs", ()))
        return {kv.key: kv for kv in found}

    def put(self, key: bytes, value: bytes, lease_id: int = 0) -> int:
        """Put a key and return the revision."""
        body = {"key": _b64(key), "value": _b64(value), "lease": str(lease_id)}
        return int(self.call("/v3/kv/put", body)["header"]["revision"])

    def delete_prefix(self, prefix: bytes) -> int:
        """Delete everything under ``prefix`` and return how many keys that were."""
        request = {"key": _b64(prefix), "range_end": _b64(_prefix_end(prefix))}
        return int(self.call("/v3/kv/deleterange", request).get("deleted", 0))

    def leases(self) -> set[int]:
        """Return the ids of all leases."""
        reply = self.call("/v3/lease/leases", {})
        return {int(lease["ID"]) for lease in reply.get("leases", ())}

    def revoke(self, lease_id: int) -> None:
        self.call("/v3/lease/revoke", {"ID": str(lease_id)})

    def revision(self) -> int:
        """Return the store's current revision."""
        reply = self.call("/v3/kv/range", {"key": _b64(b"\x00"), "count_only": True})
        return int(reply["header"]["revision"])

    def compact(self, revision: int) -> None:
        """Make every revision before this one unreadable."""
        self.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def grant_prefix(self, role: str, prefix: bytes, kind: str = "READWRITE") -> None:
        """Let a role read and write everything under ``prefix``, or do the one (``READ``)."""
        self.grant_range(role, prefix, _prefix_end(prefix), kind)

    def grant_range(self, role: str, key: bytes, range_end: bytes, kind: str) -> None:
        """Let a role do that (``READWRITE``, ``READ`` or ``WRITE``) with ``[key, range_end)``."""
        permission = {"permType": kind, "key": _b64(key), "range_end": _b64(range_end)}
        self.call("/v3/auth/role/grant", {"name": role, "perm": permission})

    def revoke_range(self, role: str, key: bytes, range_end: bytes) -> None:
        """Take back what :meth:`grant_range` granted of this very range."""
        body = {"role": role, "key": _b64(key), "range_end": _b64(range_end)}
        self.call("/v3/auth/role/revoke", body)

    def _fetch(
        self, verb: str, path: str, body: str | None, headers: Mapping[str, str], timeout_s: float
    ) -> str:
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=self._context
            )
        try:
            connection.request(verb, path, body, dict(headers))
            with connection.getresponse() as response:
                text = response.read().decode()
                if response.status != 200:
                    raise GatewayError(path, response.status, text)
                return text
        except http.client.HTTPException as error:  # a server that is going down
            raise ConnectionError(f"{path}: {error!r}") from error
        finally:
            connection.close()


def _stored(kv: Mapping[str, str]) -> StoredKey:
    return StoredKey(
        key=base64.b64decode(kv["key"]),
        value=base64.b64decode(kv.get("value", "")),
        create_revision=int(kv["create_revision"]),
        mod_revision=int(kv["mod_revision"]),
        version=int(kv["version"]),
        lease_id=int(kv.get("lease", 0)),
    )


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _prefix_end(prefix: bytes) -> bytes:
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\x00"
