"""Sends on a stream from code that does not wait, and whose end must not end the stream.

Knows the stream's write. Must not know what is sent, nor judge why it failed: whoever reads the
stream learns that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rdzv_etcd.etcd.quiet import grpc
from rdzv_etcd.etcd.server import ClosedError, Stream


class Outbox:
    """Messages of one stream, sent in order by a task of its own while there are any.

    gRPC cancels a stream whose writer is cancelled, as who asks for something may be at any time.
    """

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._messages: deque[Any] = deque()
        self._writer: asyncio.Task[None] | None = None

    def send(self, message: Any) -> None:
        self._messages.append(message)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name=self._name)

    def stop(self) -> asyncio.Task[None] | None:
        """Send no more, and let go of the task; it is returned if it has yet to end."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.cancel()
        return writer

    async def _write(self) -> None:
        try:
            while self._messages:
                await self._stream.write(self._messages.popleft())
        except (grpc.RpcError, ClosedError):
            self._stream.cancel()  # the reader learns why, and tells all who wait
        finally:
            self._writer = None
