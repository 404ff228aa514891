"""What a member of a world does again whenever etcd may have lost data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rdzv_etcd.core.member import Seat
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.group.backoff import RETRY_S, Backoff
from rdzv_etcd.group.node import Node


async def after_losses(node: Node, seat: Seat, act: Callable[[int], Awaitable[bool]]) -> None:
    """Call ``act`` whenever etcd may have gone back, until the world is over; for a task.

    ``act`` puts what is missing while the round's record is that of the revision it is given, so
    that nothing comes into a round that has ended, and tells whether it was. It is called again
    after an EtcdError.
    """
    context = node.context
    backoff = Backoff(context.session.renewal_period_s)

    def seen() -> tuple[int, int]:
        return context.control.breaks, node.control.round_revision

    def is_over() -> bool:
        return node.is_gone or node.change_of(seat) is not None

    def is_to_act() -> bool:
        return is_over() or seen() != sure

    sure = seen()
    while True:
        await context.wakeup.wait(when=is_to_act)
        if is_over():
            return
        doubt = seen()
        record = node.control.round_revision
        try:
            # Without a record it is too early: that is put back first.
            if not record or await act(record):
                sure = doubt
                backoff.reset()
            else:  # the record is another one, of which this node is about to hear
                await context.clock.sleep(RETRY_S)
        except EtcdError as error:
            await context.clock.sleep(backoff.after(error))
