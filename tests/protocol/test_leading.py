"""Who is unfit to lead: told as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.lead import is_unfit_to_lead
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Closure, Control, Round
from rdzv_etcd.settings import JobSettings

TTL_S = 10.0
NEW = Control(1)
HAD_A_ROUND = Control(3, Round(1, "run", ("x",), JobSettings(1, 4), "10.0.0.9", 2900, 70), 2)


def is_unfit(
    control: Control = NEW,
    *,
    has_worked: bool = False,
    has_claimed: bool = False,
    lasts_s: float = 0.0,
    member: Member | None = None,
) -> bool:
    return is_unfit_to_lead(
        member or Member("me"),
        control,
        has_worked=has_worked,
        has_claimed=has_claimed,
        lasts_s=lasts_s,
        lease_ttl_s=TTL_S,
    )


def test_a_newcomer_whose_lead_came_with_its_arrival_is_unfit_at_once() -> None:
    assert is_unfit()


@pytest.mark.parametrize(("lasts_s", "unfit"), [(0.0, False), (30.0, False), (30.1, True)])
def test_one_that_claimed_the_lead_only_after_three_ttls(lasts_s: float, unfit: bool) -> None:
    """It was fit to arrive: that role may just be edited."""
    assert is_unfit(has_claimed=True, lasts_s=lasts_s) is unfit


@pytest.mark.parametrize("has_claimed", [False, True])
@pytest.mark.parametrize("lasts_s", [0.0, 3600.0])
def test_never_where_the_role_was_right_before(has_claimed: bool, lasts_s: float) -> None:
    was_in_a_world = Member("me")
    was_in_a_world.epoch = 7
    assert not is_unfit(has_worked=True, has_claimed=has_claimed, lasts_s=lasts_s)
    assert not is_unfit(HAD_A_ROUND, has_claimed=has_claimed, lasts_s=lasts_s)
    assert not is_unfit(member=was_in_a_world, has_claimed=has_claimed, lasts_s=lasts_s)


def test_a_job_that_has_ended_has_no_round() -> None:
    """What is there is of the run before."""
    assert HAD_A_ROUND.round is not None
    ended = replace(HAD_A_ROUND.round, closure=Closure("x", "done", True, 0.0))
    assert is_unfit(replace(HAD_A_ROUND, round=ended))
