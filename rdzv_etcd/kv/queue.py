"""First-in, first-out queues in the round's store.

An item is a key of its own; etcd's creation revisions are the order. Knows nothing of torch.

To take an item is to delete it. A call that is cancelled while it does so, or that etcd does not
answer in time, has nobody to give the item to and puts it back: under another key, which tells its
place in the order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from rdzv_etcd.arguments import KEY_SHOWN, named_key
from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError, StateCorruptError
from rdzv_etcd.etcd.api import Etcd, KeyValue
from rdzv_etcd.kv.reads import Reader
from rdzv_etcd.kv.writes import Deadline, OnceWrite, OnceWriter, Written, named_if_too_large
from rdzv_etcd.log_errors import errors_only_told
from rdzv_etcd.schema import store_requests as requests
from rdzv_etcd.schema.keys import KeyRange
from rdzv_etcd.schema.store_values import StoreKeys, content_of, encode_value
from rdzv_etcd.text import LINE, shown

_log = logging.getLogger(__name__)

_PUT_BACK_S = 1.0
"""How long a cancelled call, and a call after it, wait until an item is back; it may take longer,
for instance while etcd is away …"""
_PUT_BACK_LIMIT_S = 600.0
"""… for so long, or until the node leaves: it has no connection then."""

_SHORTEST_PAUSE_S = 0.005
"""How long a call pauses at most that has lost an item to another: twice as long after each loss of
this process, half as long after each item taken …"""
_LONGEST_PAUSE_S = 0.25
"""… up to this. If each call counted its own losses, who has just taken an item would be ahead of
who has long waited."""


@dataclass(slots=True)
class Taken:
    """What a call has taken. For the event loop."""

    item: KeyValue | None = None
    is_not_wanted: bool = False
    """Whether nobody waits for it any more: it is to be put back."""


class Queues:
    """All queues of one round's store."""

    def __init__(
        self,
        etcd: Etcd,
        keys: StoreKeys,
        writes: OnceWriter,
        reads: Reader,
        *,
        lease_id: int,
        clock: Clock,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._writes = writes
        self._reads = reads
        self._lease_id = lease_id
        self._clock = clock
        self._putting_back: dict[asyncio.Future[None], bytes | None] = {}
        """Their items' keys; ``None``: it was waited for."""
        self._pauses_s: dict[bytes, float] = {}
        """How long who loses an item pauses at most, by the queue's first key."""

    async def push(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Put an item at the end: one request."""
        item = self._keys.queue_item(key, self._writes.unique())
        body = requests.put_all([(item, encode_value(value))], self._lease_id)
        with named_if_too_large("queue_push to", key, len(value)):
            await self._writes.apply(body, deadline)

    async def pop(self, key: str, deadline: Deadline, *, block: bool) -> KeyValue | None:
        """Take the oldest item: three requests, more if others take at the same time.

        Without an item: with ``block`` wait for one, else return ``None``. A call that is cancelled
        or fails takes none. Raises :class:`~rdzv_etcd.errors.StoreTimeoutError`, EtcdError.
        """
        queue = self._keys.queue(key)
        await self._until_put_back(queue, deadline)
        while True:
            if block:
                items = await self._reads.until_any(queue, deadline, key)
            else:
                listing = requests.read_keys(queue)
                items = (await self._etcd.get(listing, timeout_s=deadline.request_s())).kvs
            if not items:
                return None
            oldest = min(items, key=self._keys.place_in_queue)
            taken = await self._take(oldest, deadline)
            if taken is not None:
                pause_s = self._pauses_s.pop(queue.start, 0.0)
                if pause_s > _SHORTEST_PAUSE_S:
                    self._pauses_s[queue.start] = pause_s / 2
                return taken
            deadline.require(f"queue_pop of {named_key(key)}")
            await self._pause(queue)

    async def _pause(self, queue: KeyRange) -> None:
        """Of many who try again at once all but one lose again, and some of them each time."""
        pause_s = max(2 * self._pauses_s.get(queue.start, 0.0), _SHORTEST_PAUSE_S)
        self._pauses_s[queue.start] = pause_s = min(pause_s, _LONGEST_PAUSE_S)
        await self._clock.sleep(self._clock.jitter(pause_s))

    async def length(self, key: str, deadline: Deadline) -> int:
        queue = self._keys.queue(key)
        await self._until_put_back(queue, deadline)
        counting = requests.count(queue)
        return (await self._etcd.get(counting, timeout_s=deadline.request_s())).count

    async def put_back(self, item: KeyValue) -> None:
        """Put an item that was taken back where it was, and wait for that a moment."""
        await self._in_background(item, self._put_back(item))

    async def _take(self, item: KeyValue, deadline: Deadline) -> KeyValue | None:
        """Read the item, then delete it; ``None`` if somebody else took it.

        Raises :class:`~rdzv_etcd.errors.StateCorruptError` for a value that this library did not
        write, and leaves it.
        """
        # In this order: once it is deleted, a lost reply could not be asked for again.
        read = requests.read(item.key)
        found = (await self._etcd.get(read, timeout_s=deadline.request_s())).kvs
        if not found:
            return None
        content_of(found[0])  # what this library has not written stays there
        write = self._writes.begin(requests.take(found[0]))
        taking = asyncio.ensure_future(write.apply(deadline))
        try:
            written = await asyncio.shield(taking)
        except (asyncio.CancelledError, EtcdError) as error:
            # If etcd may have the request, what it does is to be undone.
            if not isinstance(error, EtcdError) or error.maybe_applied:
                await self._in_background(found[0], self._undo(found[0], write, taking))
            raise
        return found[0] if written.wrote else None

    # -- putting back -----------------------------------------------------------------------------

    async def _undo(
        self, item: KeyValue, write: OnceWrite, taking: asyncio.Future[Written]
    ) -> None:
        """Put the item back if it was taken, which etcd is asked for until it tells."""
        await asyncio.wait({taking})
        if taking.cancelled():  # the loop is being stopped
            return
        error = taking.exception()
        if error is None:
            has_taken = taking.result().wrote
        elif isinstance(error, EtcdError) and error.maybe_applied:
            try:
                has_taken = await write.settle(Deadline(self._clock, _PUT_BACK_LIMIT_S))
            except (EtcdError, StateCorruptError) as unknown:  # gone with the world, perhaps
                _warn(f"a queue_pop that failed may have taken the item {_named(item)}: {unknown}")
                return
        else:
            has_taken = False
        if has_taken:
            await self._put_back(item)

    async def _put_back(self, item: KeyValue) -> None:
        body = requests.put_all([(self._keys.put_back(item), item.value)], self._lease_id)
        try:
            limit = Deadline(self._clock, _PUT_BACK_LIMIT_S)
            await self._writes.begin(body).apply(limit, persist=True)
        except (EtcdError, StateCorruptError) as error:  # gone with the world, perhaps
            _warn(f"the item {_named(item)} of a queue could not be put back: {error}")

    async def _in_background(self, item: KeyValue, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._putting_back[task] = item.key
        task.add_done_callback(self._putting_back.pop)
        await asyncio.wait({task}, timeout=_PUT_BACK_S)

    async def _until_put_back(self, queue: KeyRange, deadline: Deadline) -> None:
        """Wait a moment for what is to be in this queue again; for each item once."""
        tasks = [task for task, key in self._putting_back.items() if key and key in queue]
        if tasks:
            left_s = deadline.left_s()
            limit_s = _PUT_BACK_S if left_s is None else min(left_s, _PUT_BACK_S)
            await asyncio.wait(tasks, timeout=limit_s)
            for task in tasks:
                if task in self._putting_back:
                    self._putting_back[task] = None


def _named(item: KeyValue) -> str:
    return repr(shown(item.key.decode(errors="replace"), KEY_SHOWN))


def _warn(text: str) -> None:
    with errors_only_told:
        _log.warning("%s", shown(text, LINE))
