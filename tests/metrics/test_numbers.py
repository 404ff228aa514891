"""What is counted, in virtual time on the etcd in memory; and the table that the document shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml

from rdzv_etcd.metrics.prometheus import (
    CHANGES,
    JOB,
    LOSSES,
    METRICS,
    Page,
    PrometheusRecorder,
)
from rdzv_etcd.protocol.model import Accusation, Accused, Change, Nodes
from rdzv_etcd.protocol.world_end import cause_of_end, losses
from rdzv_etcd.world_change import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
    cause_of_loss,
    how_evicted,
    how_gone,
    how_silent,
    left_because,
)
from tests.sim.world import TIMING, SimJob, SimNode, simulate, simulated
from tests.support.markdown import ROOT, Document


class Numbers:
    """What one node's recorder holds."""

    def __init__(self, job: str) -> None:
        self.recorder = PrometheusRecorder(job)
        self._job = job

    def __call__(self, name: str, **labels: str) -> float:
        value = self.recorder.registry.get_sample_value(
            f"rdzv_etcd_{name}", {JOB: self._job, **labels}
        )
        assert value is not None, (name, labels)
        return value


def measured(job: SimJob, name: str) -> tuple[SimNode, Numbers]:
    """Start a node that is measured."""
    numbers = Numbers(job.settings.job_id)
    node = job.start(name, recorder=numbers.recorder)
    return node, numbers


@pytest.mark.parametrize("peer_links", [False, True], ids=["", "links"])
def test_rounds_a_loss_and_the_end_are_counted_once(peer_links: bool) -> None:
    async def scenario(job: SimJob) -> None:
        nodes = dict(measured(job, name) for name in "abc")
        await job.until_works("abc")
        await job.pass_time(30.0)
        for numbers in nodes.values():
            assert (numbers("world_size"), numbers("round")) == (3, 1)
            assert numbers("keep_alive_seconds_count") >= 8
            assert numbers("last_contact_timestamp_seconds") > 0
            assert numbers("waiting") == 0
        victim = job.loop.rng.choice(list(nodes))
        rest = [numbers for node, numbers in nodes.items() if node is not victim]
        job.kill(victim.name)
        await job.until_works([node.name for node in nodes if node is not victim])
        cause = "process_gone" if peer_links else "lease_expired"
        assert sum(numbers("lost_members_total", cause=cause) for numbers in rest) == 1
        assert (
            sum(numbers("lost_members_total", cause=one) for one in LOSSES for numbers in rest) == 1
        )
        for node, numbers in nodes.items():
            if node is victim:
                continue
            assert numbers("rounds_total") == numbers("join_seconds_count") == 2
            assert numbers("worlds_over_total", cause="lost") == 1
            assert numbers("world_seconds_sum") == pytest.approx(30.0, abs=2 * TIMING.lease_ttl_s)
            assert numbers("reform_seconds_count") == 1
            assert numbers("reform_seconds_sum") < 2.0
            assert (numbers("world_size"), numbers("round")) == (2, 2)
            assert node.world is not None
            assert numbers("epoch") == node.world.epoch
        if peer_links:
            told = [
                numbers.recorder.registry.get_sample_value(
                    "rdzv_etcd_loss_detection_seconds_sum",
                    {JOB: job.settings.job_id, "cause": cause},
                )
                for numbers in rest
            ]
            (after_s,) = [each for each in told if each is not None]
            assert 0 < after_s < 1.5
        gone, stays = rest
        (leaving,) = [node for node, numbers in nodes.items() if numbers is gone]
        await job.leave(leaving.name)
        await job.pass_time(5.0)
        assert gone("worlds_over_total", cause="moved_on") == 1
        assert gone("world_size") == gone("waiting") == 0
        assert stays("worlds_over_total", cause="left") == 1
        assert stays("waiting") == 1, "it is one node of two"
        assert (
            sum(numbers("lost_members_total", cause=one) for one in LOSSES for numbers in rest) == 1
        )

    simulate(scenario, range(5), min_nodes=2, max_nodes=3, peer_links=peer_links)


@simulated(range(2), min_nodes=2, max_nodes=3)
async def test_a_join_that_fails_is_counted_by_its_error(job: SimJob) -> None:
    numbers = Numbers(job.settings.job_id)
    node = job.start("a", recorder=numbers.recorder, join_timeout_s=20.0)
    await job.pass_time(10.0)
    assert numbers("waiting") == 1
    await job.pass_time(30.0)
    assert node.error is not None
    assert numbers("failed_joins_total", error="JoinTimeoutError") == 1
    assert numbers("waiting") == numbers("join_seconds_count") == 0


@simulated(range(2), min_nodes=1, max_nodes=3, timing=replace(TIMING, settle_s=0.1))
async def test_a_silence_of_etcd_is_counted(job: SimJob) -> None:
    node, numbers = measured(job, "a")
    await job.until_works("a")
    await job.pass_time(10.0)
    assert numbers("keep_alive_failures_total") == 0
    seen = numbers("last_contact_timestamp_seconds")
    node.connection.link.partition(silent=True)
    await job.pass_time(30.0)
    assert numbers("keep_alive_failures_total") > 0
    assert numbers("last_contact_timestamp_seconds") - seen < TIMING.lease_ttl_s
    node.connection.link.heal()
    await job.pass_time(30.0)
    assert numbers("last_contact_timestamp_seconds") - seen > 30
    assert numbers("rounds_total") == 1


def test_what_was_seen_of_a_loss_has_a_cause() -> None:
    """The words are those that the code says, so that a change of them is noticed here."""
    by = "b~1~x"
    assert cause_of_loss(how_gone(by, "refused", 0.01)) == "process_gone"
    assert cause_of_loss(how_silent(by, "timed out")) == "host_silent"
    assert cause_of_loss(how_evicted("root@vm", "lease expired")) == "evicted"
    assert cause_of_loss("lease expired") == "lease_expired"
    assert cause_of_loss("whatever a stranger wrote") == "other"
    lost = {"a": how_gone(by, "refused", 0.01), "c": left_because("done"), "d": "lease expired"}
    accused = Accused(Accusation(by, lost["a"], True, after_ms=40), 7, seen_s=100.0)
    found = losses(Change("run", 1, (), lost), Nodes(9, accused={"a": accused}), 100.5)
    assert found == {"a": pytest.approx(0.54), "d": None}
    assert cause_of_loss(lost["a"]) == "process_gone"


def test_every_end_of_a_world_has_a_name_that_is_there_from_the_beginning() -> None:
    ends: list[WorldChange] = [
        Lost({}),
        Left({}),
        Waiting(()),
        Expelled(),
        Finished("a", ""),
        Failed("a", ""),
        MovedOn(),
    ]
    assert {cause_of_end(end) for end in ends} == set(CHANGES)
    numbers = Numbers("job")
    assert {numbers("worlds_over_total", cause=cause) for cause in CHANGES} == {0}


def test_the_page_has_what_the_table_says_and_nothing_else() -> None:
    recorder = PrometheusRecorder("job")
    recorder.join_began(1.0)
    recorder.join_failed("EtcdError")
    recorder.declared_lost("evicted", 1.0)
    families = list(Page(recorder).registry().collect())
    assert {(family.name, family.type, family.documentation) for family in families} == {
        (name.removesuffix("_total"), metric.type, metric.help) for name, metric in METRICS.items()
    }
    for family in families:
        assert family.samples
        (metric,) = [
            METRICS[name] for name in METRICS if name.removesuffix("_total") == family.name
        ]
        labels = {JOB, *([metric.label] if metric.label else [])}
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels
            assert not sample.name.endswith("_created")


def test_the_document_s_queries_and_alerts_name_what_there_is() -> None:
    recorder = PrometheusRecorder("job")
    recorder.join_began(1.0)
    recorder.join_failed("EtcdError")
    recorder.declared_lost("evicted", 1.0)
    families = list(Page(recorder).registry().collect())
    samples = {sample.name for family in families for sample in family.samples}
    document = Document(ROOT / "docs/metrics.md")
    named = set(re.findall(r"rdzv_etcd_\w+", document.text))
    assert named - samples == {
        name for name, metric in METRICS.items() if metric.type == "histogram"
    }
    blocks = document.code("yaml")
    assert blocks
    for text in blocks:
        assert yaml.safe_load(text)


def test_the_document_has_the_table_of_the_code() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- metrics:begin -->\n")
    shown, end, _ = rest.partition("<!-- metrics:end -->")
    assert end, "docs/metrics.md has lost its markers"
    lines = ["| metric | type | labels besides `job_id` | meaning |", "| --- | --- | --- | --- |"]
    for name, metric in METRICS.items():
        label = "" if metric.label is None else f"`{metric.label}`"
        lines.append(f"| `{name}` | {metric.type} | {label} | {metric.help} |")
    assert shown.strip().splitlines() == lines
