"""The metrics of real agents: scraped while they run, and in their files at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metrics.test_outputs import scraped, value, values
from tests.support.processes import free_port
from tests.torchrun.agents import QUICK
from tests.torchrun.training import Training


def lost(text: str) -> dict[tuple[tuple[str, str], ...], float]:
    return values(text, "lost_members_total")


@pytest.mark.torchrun
@pytest.mark.slow
def test_two_agents_of_a_host_tell_of_a_round_and_a_death(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    port = free_port()
    conf = f"{QUICK},metrics_file={folder}"
    job = train("1:2")
    job.start("stays", conf=f"{conf}/stays.prom,metrics_port={port}")
    (dies,) = job.start("dies", conf=f"{conf}/dies.prom")
    job.wait_for_world()
    page = scraped(port)
    assert value(page, "world_size") == 2
    assert value(page, "join_seconds_count") == value(page, "rounds_total") >= 1
    assert {path.name for path in folder.glob("*.prom")} == {"stays.prom", "dies.prom"}
    dies.kill()
    job.wait_until("one is alone", lambda: value(scraped(port), "world_size") == 1)
    page = scraped(port)
    (how,) = [dict(labels)["cause"] for labels, count in lost(page).items() if count]
    assert how in ("process_gone", "host_silent", "lease_expired"), "if the machine is very slow"
    noticed = sum(values(page, "loss_detection_seconds_count").values())
    assert noticed <= 1
    assert value(page, "reform_seconds_count") >= 1
    job.wait_for_world()
    job.end_workers()
    texts = {path.stem: path.read_text() for path in folder.glob("*.prom")}
    (text,) = [text for text in texts.values() if sum(lost(text).values())]
    ends = values(text, "worlds_over_total").items()
    counts = {dict(labels)["cause"]: count for labels, count in ends}
    assert counts["lost"] == counts["finished"] == 1
    assert value(text, "world_size") == value(text, "waiting") == 0
    assert set(texts) == {"stays", "dies"}
