"""First-in, first-out queues in the round's store.

An item is a key of its own; etcd's creation revisions are the order. Knows nothing of torch.
"""

from __future__ import annotations

from rdzv_etcd.arguments import named_key
from rdzv_etcd.etcd.api import Etcd, KeyValue
from rdzv_etcd.kv.reads import Reader
from rdzv_etcd.kv.writes import Deadline, OnceWriter, named_if_too_large
from rdzv_etcd.schema import store_requests as requests
from rdzv_etcd.schema.store_values import StoreKeys, content_of, encode_value


class Queues:
    """All queues of one round's store."""

    def __init__(
        self, etcd: Etcd, keys: StoreKeys, writes: OnceWriter, reads: Reader, lease_id: int
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._writes = writes
        self._reads = reads
        self._lease_id = lease_id

    async def push(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Put an item at the end: one request."""
        item = self._keys.queue_item(key, self._writes.unique())
        body = requests.put_all([(item, encode_value(value))], self._lease_id)
        with named_if_too_large("queue_push to", key, len(value)):
            await self._writes.apply(body, deadline)

    async def pop(self, key: str, deadline: Deadline, *, block: bool) -> bytes | None:
        """Take the oldest item: three requests, more if others take at the same time.

        Without an item: with ``block`` wait for one, else return ``None``. Raises
        :class:`~rdzv_etcd.errors.StoreTimeoutError`.
        """
        queue = self._keys.queue(key)
        while True:
            if block:
                items = await self._reads.until_any(queue, deadline, key)
            else:
                listing = requests.read_keys(queue)
                items = (await self._etcd.get(listing, timeout_s=deadline.request_s())).kvs
            if not items:
                return None
            oldest = min(items, key=lambda kv: (kv.create_revision, kv.key))
            taken = await self._take(oldest, deadline)
            if taken is not None:
                return taken
            deadline.require(f"queue_pop of {named_key(key)}")

    async def length(self, key: str, deadline: Deadline) -> int:
        counting = requests.count(self._keys.queue(key))
        return (await self._etcd.get(counting, timeout_s=deadline.request_s())).count

    async def _take(self, item: KeyValue, deadline: Deadline) -> bytes | None:
        """Read the item, then delete it; ``None`` if somebody else took it."""
        # In this order: once it is deleted, a lost reply could not be asked for again.
        read = requests.read(item.key)
        found = (await self._etcd.get(read, timeout_s=deadline.request_s())).kvs
        if not found:
            return None
        written = await self._writes.apply(requests.take(found[0]), deadline)
        return content_of(found[0]) if written.wrote else None
