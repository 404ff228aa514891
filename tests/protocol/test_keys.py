"""Key paths: no job reaches another's keys, and ranges order as they should."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.protocol.keys import JobKeys, KeyRange

AWKWARD = [
    "a",
    "a/b",
    "a%2Fb",
    "a%252Fb",
    "a ",
    " a",
    "a/",
    "/a",
    "a//b",
    "..",
    "ä",
    "a\x00b",
    "aa",
]
JOB_IDS = st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=12))


def ranges(keys: JobKeys) -> list[KeyRange]:
    return [
        keys.control,
        keys.nodes,
        keys.audits,
        keys.drains,
        keys.store(3, "run"),
        keys.stores,
        keys.ranks,
        keys.editions(3),
        keys.edition(3, "run.1.2"),
        keys.barrier(3, "a/b"),
        keys.barriers,
        *keys.rounds(before=7),
        keys.below,
    ]


def singles(keys: JobKeys) -> list[bytes]:
    return [
        keys.round,
        keys.leader,
        keys.change,
        keys.node("host~1~x"),
        keys.audit(7, "run"),
        keys.drain("host~1~x"),
        keys.refused,
    ]


def overlap(one: KeyRange, other: KeyRange) -> bool:
    return one.start < other.end and other.start < one.end


@given(JOB_IDS, JOB_IDS)
def test_no_two_jobs_share_a_key(one: str, other: str) -> None:
    assume(one != other)
    mine, theirs = JobKeys("/p", one), JobKeys("/p", other)
    assert not overlap(mine.below, theirs.below)
    for each in ranges(theirs):
        assert not overlap(mine.below, each)
    assert not any(key in mine.below for key in singles(theirs))


@given(JOB_IDS)
def test_everything_is_under_the_jobs_root_which_is_one_segment(job_id: str) -> None:
    keys = JobKeys("/p/", job_id)
    for each in ranges(keys):
        assert keys.below.start <= each.start < each.end <= keys.below.end
    assert all(key in keys.below for key in singles(keys))
    assert keys.root.count(b"/") == 3
    assert keys.root.startswith(b"/p/")


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_the_job_id_can_be_read_back(job_id: str) -> None:
    keys = JobKeys("/p", job_id)
    assert unquote(keys.root.decode().split("/")[2]) == job_id


def test_a_job_id_that_is_not_valid_text_works_too() -> None:
    odd = JobKeys("/p", "job\udcff")  # what the command line makes of the byte ff
    assert not overlap(odd.below, JobKeys("/p", "jobÿ").below)


def test_an_empty_job_id_is_refused() -> None:
    with pytest.raises(SettingsError, match="job id"):
        JobKeys("/p", "")


def test_the_kinds_of_keys_do_not_overlap() -> None:
    keys = JobKeys("/p", "job")
    kinds = [keys.control, keys.nodes, keys.audits, keys.stores, keys.barriers]
    for index, one in enumerate(kinds):
        for other in kinds[index + 1 :]:
            assert not overlap(one, other)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_rounds_order_as_numbers(one: int, other: int) -> None:
    keys = JobKeys("/p", "job")
    assert (keys.audit(one, "b") < keys.audit(other, "a")) == (one < other)
    assert (keys.store(one, "b").start < keys.store(other, "a").start) == (one < other)
    assert (keys.store(one, "b").start + b"k" in keys.rounds(other)[2]) == (one < other)
    arrival = keys.barrier(one, "b").start + b"arrived/x"
    assert (arrival in keys.rounds(other)[0]) == (one < other)


@given(st.text(), st.text())
def test_barriers_of_different_names_do_not_overlap(one: str, other: str) -> None:
    assume(one != other)
    keys = JobKeys("/p", "job")
    assert not overlap(keys.barrier(1, one), keys.barrier(1, other))


@given(st.text(), st.text())
def test_stores_of_different_runs_do_not_overlap(one: str, other: str) -> None:
    assume(one != other)
    keys = JobKeys("/p", "job")
    assert not overlap(keys.store(1, one), keys.store(1, other))


def test_a_node_id_is_read_from_its_key() -> None:
    keys = JobKeys("/p", "job")
    assert keys.node_id(keys.node("gpu-7~12~ab")) == "gpu-7~12~ab"


@given(JOB_IDS, st.sampled_from(["", "/store", "/barrier", "/nodes", "/ctl"]))
def test_a_job_below_another_one_s_path_shares_no_key_that_is_deleted(
    job_id: str, below: str
) -> None:
    """A Slurm job id beside rounds' numbers: those have ten digits."""
    mine = JobKeys("/p", "team")
    for each in (job_id, "store", "audit", "ctl", "nodes", "12345678"):
        theirs = JobKeys(f"/p/team{below}", each)
        parts = (theirs.audits, *theirs.rounds(), theirs.control, theirs.nodes)
        for part in (mine.audits, *mine.rounds()):
            assert not any(key in part for key in singles(theirs)), each
            assert not any(overlap(part, other) for other in parts), each
