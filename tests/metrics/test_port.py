"""Metrics on a real port: groups on a real etcd, and nodes that do not ask for them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import rdzv_etcd
from rdzv_etcd import Group
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics.prometheus import PrometheusRecorder, Server
from tests.library.nodes import ALONE, LIMIT_S, Job, join_all, wait_until


def values(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of that name, by their labels."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"rdzv_etcd_{name}"
    }


def value(text: str, name: str) -> float:
    (one,) = values(text, name).values()
    return one


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as page:
        text: str = page.read().decode()
    return text


@contextmanager
def loopback() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening


def told_port(caplog: pytest.LogCaptureFixture) -> int:
    (found,) = re.findall(r"metrics at port (\d+)", caplog.text)
    return int(found)


def test_a_group_s_life_at_its_port(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    settings = job.settings("1:2", metrics_port=0, **ALONE)
    with Group(settings) as group:
        port = told_port(caplog)
        assert value(scraped(port), "rounds_total") == 0
        world = group.join()
        page = scraped(port)
        assert value(page, "epoch") == world.epoch
        assert values(page, "world_size") == {(("job_id", job.id),): 1}
        assert value(page, "join_seconds_count") == 1
        wait_until("an answer of etcd", lambda: value(scraped(port), "keep_alive_seconds_count"))
        group.join()
        assert value(scraped(port), "reform_seconds_count") == 1
        group.finish("done")
        labels = (("cause", "finished"), ("job_id", job.id))
        wait_until("it is over", lambda: values(scraped(port), "worlds_over_total")[labels] == 1)
        assert value(scraped(port), "world_size") == 0
    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_groups_of_one_process_do_not_share_numbers_and_one_may_come_back(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        with job.groups(2, metrics_port=0) as nodes:
            join_all(nodes)
            ports = map(int, re.findall(r"metrics at port (\d+)", caplog.text))
            assert [value(scraped(port), "rounds_total") for port in ports] == [1, 1]
            nodes[0].fail("once more")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics_port": 65536}, "from 0 to 65535"),
        ({"metrics_port": -1}, "from 0 to 65535"),
        ({"metrics_port": "http"}, "must be a whole number"),
    ],
    ids=lambda each: next(iter(each.values())) if isinstance(each, dict) else "",
)
def test_what_cannot_be_is_said_before_the_job_starts(
    job: Job, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        rdzv_etcd.connect(
            job.server.endpoint, job=job.id, nodes=1, local_addr="127.0.0.1", **options
        )


def test_a_port_that_is_in_use_is_said_before_the_job_starts(job: Job) -> None:
    with loopback() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SettingsError, match=rf"cannot listen on \S+:{port} \(metrics_port\): .*in use"
        ):
            job.group("1", metrics_port=port)
    with job.group("1", metrics_port=port):
        assert value(scraped(port), "rounds_total") == 0


def test_who_asks_for_nothing_or_nonsense_disturbs_no_other(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with loopback() as beside:
        server = Server(PrometheusRecorder("job"), 0, "job", beside)
        port = told_port(caplog)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
            assert rude.recv(100)
        assert value(scraped(port), "rounds_total") == 0
        server.close()
        server.close()
        for each in silent:
            each.close()
        with closing(socket.create_server(("127.0.0.1", port))):
            pass
    assert capfd.readouterr().err == ""


_WITHOUT = """
import sys
import rdzv_etcd
endpoint, job_id, *option = sys.argv[1:]
options = {"metrics_port": 0} if option else {}
options |= {"local_addr": "127.0.0.1", "closed_ttl": 1}
with rdzv_etcd.connect(endpoint, job=job_id, nodes=1, **options) as group:
    group.join()
    group.finish()
print([name for name in sys.modules if name.startswith("prometheus_client")])
"""


def test_where_the_package_is_not_installed_it_is_named(job: Job, tmp_path: Path) -> None:
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("prometheus", "rdzv", "__editable__")):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "rdzv_etcd").symlink_to(Path(rdzv_etcd.__file__).parent)
    start = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + _WITHOUT, job.server.endpoint, job.id, "on"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert last == (
        "rdzv_etcd.errors.SettingsError: metrics_port= needs the package prometheus_client: "
        "pip install 'rdzv-etcd[metrics]', or leave the option out"
    )


def test_without_the_options_it_is_not_imported_where_it_is_installed(job: Job) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, job.server.endpoint, job.id],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "[]\n"
