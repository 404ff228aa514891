"""Errors of calls without a reply: a write may have been applied."""

from __future__ import annotations

import pytest

from rdzv_etcd.errors import EtcdUnavailableError, OutcomeUnknownError
from rdzv_etcd.etcd.port import Get, Put, Txn
from tests.contract.lab import Lab

pytestmark = pytest.mark.usefixtures("own_server")

_BRIEF_S = 0.5


async def test_no_reply_to_a_write_may_mean_that_it_was_applied(lab: Lab) -> None:
    """Whether or not it may be sent again: the caller of one that may be can find out."""
    put = Txn((), (Put(lab.root + b"key", b"value"),))
    await lab.etcd.txn(Txn((), (Put(lab.root + b"first", b"1"),)))
    lab.operator.fall_silent()
    for repeatable in (False, True):
        with pytest.raises(OutcomeUnknownError):
            await lab.etcd.txn(put, timeout_s=_BRIEF_S, repeatable=repeatable)
    with pytest.raises(OutcomeUnknownError):
        await lab.etcd.grant(60, lease_id=4711, timeout_s=_BRIEF_S)
    lab.operator.speak()
    await lab.etcd.txn(put, repeatable=True)


async def test_no_reply_to_what_leaves_nothing_that_counts_means_nothing(lab: Lab) -> None:
    get = Get(lab.root + b"key")
    reads = Txn((), (get, Txn((), (get,), (get, get))))
    await lab.etcd.get(get)
    lab.operator.fall_silent()
    for repeatable in (False, True):
        with pytest.raises(EtcdUnavailableError):
            await lab.etcd.txn(reads, timeout_s=_BRIEF_S, repeatable=repeatable)
    with pytest.raises(EtcdUnavailableError):
        await lab.etcd.get(get, timeout_s=_BRIEF_S)
    with pytest.raises(EtcdUnavailableError):
        await lab.etcd.grant(60, timeout_s=_BRIEF_S)  # its id is unknown to all
    lab.operator.speak()
    assert not (await lab.etcd.get(get)).kvs
