"""The newest state of all members becomes everybody's.

Some members may have made a step that others have not, when a member died in the middle of it; and
a newcomer has made none.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rdzv_etcd import World
from rdzv_etcd.arguments import whole
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.text import shown

_GIVEN = "progress "
"""Before what is exchanged, so that nothing else is taken for it."""


class Stateful(Protocol):
    """What has a state: a module, an optimizer, a scheduler, or something of your own.

    The state may consist of tensors, numbers, strings and containers of these.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def newest_member(world: World, progress: int) -> int:
    """Return the rank of the member that has got farthest; of several the lowest.

    ``progress`` is how far this one is, such as the number of steps made. Every member calls this
    at the same place: it is an :meth:`~rdzv_etcd.World.exchange`, and blocks and raises as that.
    """
    return _newest(world, progress)[0]


def broadcast_newest(world: World, progress: int, *parts: Stateful) -> int:
    """Load the state of the member that has got farthest into every other; return its progress.

    Every member calls this, at the beginning of its work in a world and with the same parts, as the
    process group has been made: it is a :func:`newest_member`, and then a broadcast of all parts'
    states. A newcomer's progress is 0. Those that are as far as the newest load its state, too:
    only so it is the same for sure. Blocks and raises as these, and raises what
    ``load_state_dict`` raises.
    """
    newest, farthest = _newest(world, progress)
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    packed = _pack(parts) if world.rank == newest else b""
    size = torch.tensor([len(packed)], device=device)
    dist.broadcast(size, src=newest)
    if world.rank == newest:
        buffer = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=newest)
    if world.rank != newest:
        _unpack(buffer, parts)
    return farthest


def _newest(world: World, progress: int) -> tuple[int, int]:
    """The rank of the newest member, and how far it is."""
    number = whole("progress", progress)
    if number < 0:
        raise MisuseError(f"progress is {number}; it cannot be below 0")
    everybody = []
    for rank, text in enumerate(world.exchange(f"{_GIVEN}{number}".encode())):
        given = text.removeprefix(_GIVEN.encode())
        if given == text or not given.isdigit() or len(given) > 30:
            raise MisuseError(
                f"rank {rank} gave {shown(repr(text), 100)} instead of its progress: every member "
                "has to call this at the same place"
            )
        everybody.append(int(given))
    farthest = max(everybody)
    return everybody.index(farthest), farthest


def _pack(parts: tuple[Stateful, ...]) -> bytes:
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue()


def _unpack(buffer: torch.Tensor, parts: tuple[Stateful, ...]) -> None:
    file = io.BytesIO(buffer.cpu().numpy().tobytes())
    states = torch.load(file, map_location="cpu", weights_only=True)
    if len(states) != len(parts):
        raise MisuseError(
            f"this member has {len(parts)} parts, the newest one {len(states)}: all must give the "
            "same"
        )
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
