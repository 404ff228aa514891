"""The newest member's state is broadcast to all.

Some members may have made a step that others have not, when a member died during it; and a newcomer
has made none.
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

_GIVEN = b"progress "
"""Begins what members exchange, so that nothing else is taken for it."""


class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, or something of your own.

    The state may consist of tensors, numbers, strings, NumPy's numbers and arrays of numbers,
    containers of these, and classes that ``torch.serialization.add_safe_globals`` was given on
    every member.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def newest_member(world: World, progress: int) -> int:
    """Return the rank of the member with the most progress; of several the lowest.

    ``progress`` is this member's, such as the number of steps made. Every member calls this at the
    same point: it is an :meth:`~rdzv_etcd.World.exchange`, and blocks and raises like that.
    """
    return _newest(world, progress)[0]


def broadcast_newest(world: World, progress: int, *parts: Stateful) -> int:
    """Load the state of the member with the most progress into every other; return that progress.

    Every member calls this with the same parts at the beginning of its work in a world, when the
    process group has been made: it is a :func:`newest_member`, then a broadcast of all parts'
    states. A newcomer's progress is 0. Members with the same progress also load the state: only
    then is it certainly the same. Blocks and raises like these, and raises what ``state_dict`` and
    ``load_state_dict`` raise. A state that other members could not load is a
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
        while received:  # each is released before the next
            part, state = received.pop()
            part.load_state_dict(state)
            del state
    return farthest


def _newest(world: World, progress: int) -> tuple[int, int]:
    """Return the rank of the newest member, and its progress."""
    number = whole("progress", progress)
    if number < 0:
        raise MisuseError(f"progress is {number}; it cannot be below 0")
    progresses = []
    for rank, text in enumerate(world.exchange(_GIVEN + str(number).encode())):
        given = text.removeprefix(_GIVEN)
        if given == text or not given.isdigit() or len(given) > 30:
            raise MisuseError(
                f"rank {rank} gave {shown(repr(text), 100)} instead of its progress: every member "
                "must call this at the same point"
            )
        progresses.append(int(given))
    farthest = max(progresses)
    return progresses.index(farthest), farthest


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
    """Return it with empty tensors, as far as it is made of torch's and Python's types."""
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
    """Return all parts with their states, the last one first."""
    try:
        states = _load(file)
    except Exception as error:
        raise MisuseError(
            f"broadcast_newest: this member cannot load the newest one's state ({_why(error)}); "
            "all must have the same program and the same packages"
        ) from error
    if len(states) != len(parts):
        raise MisuseError(
            f"this member has {len(parts)} parts, the newest one {len(states)}: all must pass the "
            "same"
        )
    return list(zip(parts, states, strict=True))[::-1]


def _load(file: io.BytesIO) -> Any:
    """Load only data: nothing in it runs code.

    What is allowed here stays allowed: torch has one list for all threads, and an entry that is
    removed from it may by then be the program's.
    """
    torch.serialization.add_safe_globals(_of_numpy())
    return torch.load(file, map_location="cpu", weights_only=True)


@functools.cache
def _of_numpy() -> list[Any]:
    """Return the types of NumPy's numbers and of its arrays of numbers, not of objects."""
    try:
        import numpy as np  # noqa: PLC0415 - torch does not need it either
    except ImportError:
        return []
    kinds = set(np.typecodes["All"]) - {"O", "V"}
    makers = [type(np.dtype(kind)) for kind in kinds]
    made = np.float64().__reduce__()[0], np.empty(0).__reduce__()[0]
    return [np.dtype, np.ndarray, *made, *makers]


def _why(error: Exception) -> str:
    """Return what is wrong with a state. torch's advice would be wrong here."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it has a {shown(found[1])}"
    return shown(text.partition("\n")[0])
