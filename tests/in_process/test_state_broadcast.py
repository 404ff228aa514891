"""What of a state reaches the other members, and what is refused on the member that has it."""

from __future__ import annotations

import datetime
import io
import threading
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import rdzv_etcd
import rdzv_etcd.torch
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.torch.state_broadcast import _check, _packed, _unpack
from tests.support.servers import EtcdServer


class Part:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def given(value: object) -> object:
    """What another member gets."""
    sent, received = Part(value), Part()
    states = [sent.state_dict()]
    _check(states, (sent,))
    ((_, state),) = _unpack(arrived(states), (received,))
    received.load_state_dict(state)
    return received.value


def annotated(tensor: torch.Tensor, note: object) -> torch.Tensor:
    tensor.note = note  # type: ignore[attr-defined]
    return tensor


def arrived(states: list[dict[str, Any]]) -> io.BytesIO:
    return _packed(states)


def taken(work: Callable[[], object]) -> int:
    """How much memory of Python's it takes at most; torch's is not counted."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        *(1, 0.5, "text", b"bytes", None, [1, (2, {3: "x"})], OrderedDict(a=1), {1, 2}),
        *(np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("text")),
        *(np.datetime64("2020-01-01"), np.mean([1.0, 2.0])),
    ],
    ids=repr,
)
def test_numbers_and_texts_reach_the_others(value: object) -> None:
    received = given(value)
    assert received == value
    assert type(received) is type(value)


def test_arrays_and_tensors_reach_the_others() -> None:
    random: Any = np.random.RandomState(1).get_state()
    state: Any = given(
        {
            "array": np.arange(12.0).reshape(3, 4).T,
            "random": random,
            "tensor": torch.arange(12).reshape(3, 4).t(),
            "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
            "sparse": torch.eye(3).to_sparse(),
        }
    )
    assert np.array_equal(state["array"], np.arange(12.0).reshape(3, 4).T)
    assert np.array_equal(state["random"][1], random[1])
    assert torch.equal(state["tensor"], torch.arange(12).reshape(3, 4).t())
    assert torch.equal(state["parameter"], torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(state["sparse"].to_dense(), torch.eye(3))


def test_what_contains_itself_reaches_the_others() -> None:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    received: Any = given(value)
    assert received[1] is received


class OwnParameter(torch.nn.Parameter):
    pass


def test_subclasses_and_tensors_of_tensors_reach_the_others() -> None:
    jagged: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    received: Any = given(jagged)
    assert [part.tolist() for part in received.unbind()] == [[1.0] * 2, [1.0] * 3]
    with torch.serialization.safe_globals([OwnParameter]):
        received = given(OwnParameter(torch.ones(2)))
    assert received.tolist() == [1.0, 1.0]


def test_what_the_program_has_allowed_torch_to_load_stays_allowed() -> None:
    with torch.serialization.safe_globals([np.dtype, datetime.date]):
        allowed = set(torch.serialization.get_safe_globals())
        assert given(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 1)
        assert given(np.float64(0.5)) == 0.5
        assert allowed <= set(torch.serialization.get_safe_globals())
    assert given(np.float64(0.5)) == 0.5  # torch has just disallowed a part of that


def test_all_of_an_optimizer_and_its_schedulers_reaches_the_others() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    for part in [model, optimizer, *schedulers]:
        state: Any = given(part.state_dict())
        assert state.keys() == part.state_dict().keys()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Part(), r"it has a tests\.in_process\.test_state_broadcast\.Part"),
        (defaultdict(int), r"it has a collections\.defaultdict"),
        ([torch.ones(1), datetime.date(2020, 1, 1)], r"it has a datetime\.date"),
        (np.array([None]), "ObjectDType"),
        (threading.Lock(), "cannot pickle"),
        (lambda: None, "pickle"),
        (
            annotated(torch.ones(1), Part()),
            r"it has a tests\.in_process\.test_state_broadcast\.Part",
        ),
    ],
    ids=["class", "defaultdict", "date", "objects of NumPy", "lock", "lambda", "attribute"],
)
def test_what_others_could_not_load_is_refused_where_it_is(value: object, message: str) -> None:
    parts = (Part(1), Part(value))
    with pytest.raises(MisuseError, match=rf"part 2 of 2 \(Part\): .*{message}"):
        _check([part.state_dict() for part in parts], parts)


def test_who_is_alone_sends_nothing(etcd_server: EtcdServer, job_id: str) -> None:
    with rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=1) as group:
        world = group.join()
        rdzv_etcd.torch.init_process_group(world, "gloo")
        assert rdzv_etcd.torch.broadcast_newest(world, 3, Part(Part())) == 3
        rdzv_etcd.torch.destroy_process_group()


def test_who_cannot_load_what_came_says_so() -> None:
    """The one that has sent it may have other packages."""
    with pytest.raises(MisuseError, match=r"broadcast_newest: .*it has a tests\."):
        _unpack(arrived([{"value": Part()}]), (Part(),))
    with pytest.raises(MisuseError, match="has 2 parts, the newest one 1"):
        _unpack(arrived([{}]), (Part(), Part()))


def test_the_look_at_a_state_copies_no_tensor() -> None:
    tensor = torch.zeros(1 << 24)
    part = Part([tensor, torch.nn.Parameter(tensor)])
    assert taken(lambda: _check([part.state_dict()], (part,))) < tensor.nbytes / 10


def test_the_newest_member_has_one_copy_of_its_state(etcd_server: EtcdServer, job_id: str) -> None:
    part = Part(torch.zeros(1 << 22))
    with rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=1) as group:
        world = group.join()
        rdzv_etcd.torch.init_process_group(world, "gloo")
        most = taken(lambda: rdzv_etcd.torch.broadcast_newest(world, 1, part))
        rdzv_etcd.torch.destroy_process_group()
    assert most < part.value.nbytes * 1.5


def test_the_others_load_it_from_where_it_has_arrived() -> None:
    part = Part(torch.zeros(1 << 22))
    file = arrived([part.state_dict()])
    assert taken(lambda: _unpack(file, (part,))) < part.value.nbytes / 10
