"""The metrics of real agents: scraped while they run, and in their files at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.metrics.test_outputs import scraped, value, values
from tests.support.processes import free_port
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agents, Job

pytestmark = pytest.mark.torchrun


def lost(text: str) -> dict[tuple[tuple[str, str], ...], float]:
    return values(text, "lost_members_total")


@pytest.mark.slow
def test_two_agents_of_a_host_tell_of_a_round_and_a_death(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    port = free_port()
    conf = f"{QUICK},metrics_file={folder}"
    stays_in = Job(etcd.target, tmp_path, "1:2", conf=f"{conf}/stays.prom,metrics_port={port}")
    dies_in = Job(etcd.target, tmp_path, "1:2", conf=f"{conf}/dies.prom", run_id=stays_in.run_id)
    (stays,) = agents.start(stays_in, "stays")
    (dies,) = agents.start(dies_in, "dies")
    agents.wait_for_world([stays, dies], size=2)
    page = scraped(port)
    assert value(page, "world_size") == 2
    assert value(page, "join_seconds_count") == value(page, "rounds_total") >= 1
    before = {path.name: path for path in folder.glob("*.prom")}
    assert set(before) == {"stays.prom", "dies.prom"}
    dies.kill()
    agents.wait_until("one is alone", lambda: value(scraped(port), "world_size") == 1)
    page = scraped(port)
    (how,) = [dict(labels)["cause"] for labels, count in lost(page).items() if count]
    assert how in ("process_gone", "host_silent", "lease_expired"), "if the machine is very slow"
    noticed = sum(values(page, "loss_detection_seconds_count").values())
    assert noticed <= 1
    assert value(page, "reform_seconds_count") >= 1
    agents.wait_for_world([stays], size=1)
    stays_in.stop_file.touch()
    assert stays.wait() == 0
    texts = {path.stem: path.read_text() for path in folder.glob("*.prom")}
    (text,) = [text for text in texts.values() if sum(lost(text).values())]
    ends = values(text, "worlds_over_total").items()
    counts = {dict(labels)["cause"]: count for labels, count in ends}
    assert counts["lost"] == counts["finished"] == 1
    assert value(text, "world_size") == value(text, "waiting") == 0
    assert set(texts) == {"stays", "dies"}
