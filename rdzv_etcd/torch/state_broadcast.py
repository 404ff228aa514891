"""The newest state of all members becomes everybody's.

Some members may have made a step that others have not, when a member died in the middle of it; and
a newcomer has made none.
"""

from __future__ import annotations

import functools
import io
import re
from collections import OrderedDict
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

    The state may consist of tensors, numbers, strings, NumPy's numbers and arrays of numbers,
    containers of these, and what ``torch.serialization.add_safe_globals`` was told of on every
    member.
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
    only so it is the same for sure. Blocks and raises as these, and raises what ``state_dict`` and
    ``load_state_dict`` raise. A state that the others could not load is a
    :class:`~rdzv_etcd.errors.MisuseError` on the newest, before anything is sent.
    """
    newest, farthest = _newest(world, progress)
    states = [part.state_dict() for part in parts] if world.rank == newest else []
    if world.size > 1:
        _check(states, parts[: len(states)])
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    file = _packed(states) if world.rank == newest else None
    del states
    size = torch.tensor([len(file.getbuffer()) if file else 0], device=device)
    dist.broadcast(size, src=newest)
    if file is None:
        file = io.BytesIO(bytes(int(size)))
    in_file = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    on_device = in_file.to(device)  # the same one, where that is the CPU
    dist.broadcast(on_device, src=newest)
    if world.rank != newest:
        in_file.copy_(on_device)
        del in_file, on_device
        received = _unpack(file, parts)
        del file
        while received:  # each is let go of before the next
            part, state = received.pop()
            part.load_state_dict(state)
            del state
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


def _check(states: list[dict[str, Any]], parts: tuple[Stateful, ...]) -> None:
    """Raise MisuseError for a state that another member could not load. Copies no tensor."""
    for place, (state, part) in enumerate(zip(states, parts, strict=True), 1):
        try:
            try:
                light = _without_tensors(state)
            except RecursionError:  # it contains itself, which torch can save and load
                light = state
            _load(_packed(light))
        except Exception as error:
            raise MisuseError(
                f"part {place} of {len(parts)} ({type(part).__name__}): other members could not "
                f"load its state ({_why(error)}); it may consist of tensors, numbers, strings and "
                "containers of these"
            ) from error


def _without_tensors(value: Any) -> Any:
    """The same with an empty tensor for each, as far as it is made of torch's and Python's own."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value if vars(value) else torch.empty(0)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_tensors(one)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(one) for one in value)
    return value


def _packed(states: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return file


def _unpack(file: io.BytesIO, parts: tuple[Stateful, ...]) -> list[tuple[Stateful, dict[str, Any]]]:
    """All parts with their states, the last one first."""
    try:
        states = _load(file)
    except Exception as error:
        raise MisuseError(
            f"broadcast_newest: this member cannot load the newest one's state ({_why(error)}); "
            "all must have the same program and the same packages"
        ) from error
    if len(states) != len(parts):
        raise MisuseError(
            f"this member has {len(parts)} parts, the newest one {len(states)}: all must give the "
            "same"
        )
    return list(zip(parts, states, strict=True))[::-1]


def _load(file: io.BytesIO) -> Any:
    """Load what is only data: nothing in it runs code.

    What is allowed here stays so: torch has one list for all threads, and what is removed from it
    may by then be the program's.
    """
    torch.serialization.add_safe_globals(_of_numpy())
    return torch.load(file, map_location="cpu", weights_only=True)


@functools.cache
def _of_numpy() -> list[Any]:
    """What NumPy's numbers and arrays of numbers are made of. Not of objects."""
    try:
        import numpy as np  # noqa: PLC0415 - torch does without it, too
    except ImportError:
        return []
    kinds = set(np.typecodes["All"]) - {"O", "V"}
    makers = [type(np.dtype(kind)) for kind in kinds]
    made = np.float64().__reduce__()[0], np.empty(0).__reduce__()[0]
    return [np.dtype, np.ndarray, *made, *makers]


def _why(error: Exception) -> str:
    """What is wrong with a state. What torch advises would be wrong here."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    if found := re.search(r"GLOBAL (\S+)", said):
        return f"it has a {shown(found[1])}"
    return shown(said.partition("\n")[0])
