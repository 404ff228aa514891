"""Where metrics are shown: real files and ports, groups on a real etcd, and who does not ask."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import rdzv_etcd
from rdzv_etcd import Group
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics import outputs
from rdzv_etcd.metrics.outputs import Outputs, TextFile
from rdzv_etcd.metrics.prometheus import PrometheusRecorder
from rdzv_etcd.settings import Settings
from tests.library.nodes import ALONE, LIMIT_S, Job, RemoteNode, join_all, node_settings, wait_until
from tests.support.processes import free_port


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


def test_a_group_s_life_at_its_port_and_in_its_file(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rdzv.prom"
    settings = job.settings("1:2", metrics_file=file, metrics_port=0, **ALONE)
    with Group(settings) as group:
        port = told_port(caplog)
        assert value(scraped(port), "rounds_total") == value(file.read_text(), "rounds_total") == 0
        world = group.join()
        page = scraped(port)
        assert value(page, "epoch") == world.epoch
        assert values(page, "world_size") == {(("job_id", job.id),): 1}
        assert value(page, "join_seconds_count") == 1
        wait_until("an answer of etcd", lambda: value(scraped(port), "keep_alive_seconds_count"))
        wait_until("the file has it", lambda: value(file.read_text(), "keep_alive_seconds_count"))
        group.join()
        assert value(scraped(port), "reform_seconds_count") == 1
        group.finish("done")
    with pytest.raises(urllib.error.URLError):
        scraped(port)
    text = file.read_text()
    labels = (("cause", "finished"), ("file", "rdzv"), ("job_id", job.id))
    assert values(text, "worlds_over_total")[labels] == 1
    assert value(text, "rounds_total") == 2
    assert value(text, "world_size") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rdzv.prom"]


def test_groups_of_one_process_do_not_share_numbers_and_one_may_come_back(
    job: Job, tmp_path: Path
) -> None:
    files = [tmp_path / "a.prom", tmp_path / "b.prom"]
    for _ in range(2):
        with ExitStack() as stack:
            nodes = [stack.enter_context(job.group("2", metrics_file=file)) for file in files]
            join_all(nodes)
            nodes[0].fail("once more")
        assert sorted(tmp_path.iterdir()) == files
        assert [value(file.read_text(), "rounds_total") for file in files] == [1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics_file": "rdzv.txt"}, r"rdzv\.txt'; its name must end in \.prom"),
        ({"metrics_file": "/nowhere/rdzv.prom"}, "No such file or directory"),
        ({"metrics_file": 7}, "must be the path of a file"),
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


@pytest.mark.parametrize("there", ["a pipe", "a folder"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, there: str) -> None:
    path = tmp_path / "rdzv.prom"
    os.mkfifo(path) if there == "a pipe" else path.mkdir()
    before = path.stat()
    with pytest.raises(SettingsError, match="it exists and is not a file"):
        TextFile(PrometheusRecorder("job"), path, "")
    assert os.path.samestat(before, path.stat())


def test_a_file_that_cannot_be_written_any_more_is_told_once_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    recorder = PrometheusRecorder("job")
    file = TextFile(recorder, folder / "rdzv.prom", "[job job]")
    recorder.follow(file.changed)
    folder.rename(tmp_path / "gone")
    for _ in range(3):
        recorder.etcd_silent()
    wait_until("it is told", lambda: "No such file" in caplog.text)
    (tmp_path / "gone").rename(folder)
    recorder.etcd_silent()
    wait_until(
        "it is written again",
        lambda: value((folder / "rdzv.prom").read_text(), "keep_alive_failures_total") == 4,
    )
    asyncio.run(file.close())
    assert caplog.text.count("cannot update the metrics") == 1


def test_a_file_system_that_does_not_answer_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(outputs, "_START_LIMIT_S", 0.1)
    monkeypatch.setattr(outputs, "write_to_textfile", lambda *_: answers.wait(LIMIT_S))
    try:
        with pytest.raises(SettingsError, match="its file system has not answered"):
            TextFile(PrometheusRecorder("job"), tmp_path / "rdzv.prom", "")
    finally:
        answers.set()


def test_no_error_ends_the_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, path = PrometheusRecorder("job"), tmp_path / "rdzv.prom"
    file = TextFile(recorder, path, "[job job]")
    recorder.follow(file.changed)

    def fail(*_: object) -> None:
        raise RuntimeError("not of the system")

    with monkeypatch.context() as broken:
        broken.setattr(outputs, "write_to_textfile", fail)
        recorder.etcd_silent()
        wait_until("it is told", lambda: "not of the system" in caplog.text)
    recorder.etcd_silent()
    wait_until("again", lambda: value(path.read_text(), "keep_alive_failures_total") == 2)
    asyncio.run(file.close())


def test_the_last_change_is_in_the_file_whenever_it_comes(tmp_path: Path) -> None:
    for count in range(50):
        recorder = PrometheusRecorder("job")
        file = TextFile(recorder, tmp_path / "rdzv.prom", "")
        recorder.follow(file.changed)
        for _ in range(count):
            recorder.etcd_silent()
        asyncio.run(file.close())
        text = (tmp_path / "rdzv.prom").read_text()
        assert value(text, "keep_alive_failures_total") == count


def test_the_file_is_written_for_the_last_time_when_the_interpreter_exits(
    job: Job, tmp_path: Path
) -> None:
    file, log = tmp_path / "rdzv.prom", tmp_path / "log"
    options = job.options("1", metrics_file=str(file))
    with log.open("w") as told, RemoteNode(options, log=told.fileno()) as remote:
        remote.call("join")
        assert remote.finish() == 0
    assert "Traceback" not in log.read_text()
    assert value(file.read_text(), "world_size") == 0


def test_who_asks_for_nothing_or_nonsense_disturbs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for_port(0)
    with loopback() as beside:
        outputs = Outputs(PrometheusRecorder("job"), settings, beside)
        port = told_port(caplog)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
            assert rude.recv(100)
        assert value(scraped(port), "rounds_total") == 0
        asyncio.run(outputs.close())
        asyncio.run(outputs.close())
        for each in silent:
            each.close()
        with closing(socket.create_server(("127.0.0.1", port))):
            pass
    assert capfd.readouterr().err == ""


def settings_for_port(port: int) -> Settings:
    return node_settings(f"127.0.0.1:{free_port()}", "job", "1", metrics_port=port)


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
