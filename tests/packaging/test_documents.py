"""The documents match the code, their links lead somewhere, and their examples work."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from torch.distributed.run import get_args_parser

import rdzv_etcd
from rdzv_etcd import World
from rdzv_etcd.cli.app import app
from rdzv_etcd.protocol import keys
from rdzv_etcd.settings.options import options_table
from tests.packaging.generated import blocks, renewed
from tests.support.markdown import HOME, ROOT, Document, documents
from tests.support.processes import output
from tests.support.python_path import python_path
from tests.support.servers import EtcdServer

README = Document(ROOT / "README.md")
DOCUMENTS = documents()
RUN_THE_EXAMPLE = (
    "python3 -m venv .venv && .venv/bin/pip install '.[embedded,examples]' && "
    ".venv/bin/torchrun --nnodes=1 --nproc-per-node=2 --rdzv-backend=etcd3 "
    "--rdzv-endpoint=localhost:2379 --rdzv-id=digits --rdzv-conf=embed=1 examples/digits.py\n"
)
RUN_THE_TESTS = "./tools/test.sh\n"

PARSED = "test_commands_are_as_the_programs_take_them"
BLOCKS = {
    "README.md": {
        "pip install rdzv-etcd": "installs from a package index; test_distribution has the wheel",
        "torchrun --rdzv-backend": PARSED,
        "python3 -m venv .venv": "word for word in README; tests/torchrun/test_embedded.py runs it",
        "./tools/test.sh": "runs this test",
        "import rdzv_etcd": "test_the_library_s_example_works",
    },
    "CONTRIBUTING.md": {
        "./tools/test.sh": "runs this test",
        ".venv/bin/pip install build": "test_distribution.py builds; the rest is for a release",
    },
    "docs/cli.md": {
        "pip install": "installs from a package index",
        "rdzv-etcd status": "tests/cli/test_document.py",
    },
    "docs/deploy.md": {
        "printf trainer": "needs a Kubernetes",
        "docker compose build": "tests/integration, with images of its own",
        "PIP_ARGS": "fetches from PyTorch's index",
        ".venv/bin/python -m tests.integration.images": "tests/integration",
        "TRAINING": "tests/integration, with files of its own",
        "tests/integration/engine.sh": "is how CI runs the tests",
    },
    "docs/guide.md": {
        "torchrun --nnodes": PARSED,
        "torchrun …": "a part of a command; tests/torchrun/test_health.py",
        "export RDZV_ETCD_USER": "needs that user; tests/faults has one. " + PARSED,
        "rdzv-etcd status": PARSED,
        "export GLOO_SOCKET_IFNAME": "test_the_interface_s_address_is_found, and " + PARSED,
        "rdzv-etcd drain": PARSED,
    },
    "benchmarks/NOTES.md": {"pip install -e": "takes an hour; tests/benchmarks runs short ones"},
    "docs/tutorial.md": {
        "python3 -m venv": "installs from a package index",
        "": "test_tutorial.py",
    },
}
"""How a block begins that no comment marks as a test's, and what runs it, or why nothing does."""

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: document.path.name
)


@every_document
def test_every_link_and_anchor_leads_somewhere(document: Document) -> None:
    assert document.broken() == []
    assert document.undefined() == set()


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    """So that the test above means something."""
    home = "https://github.com/rdzv-etcd/rdzv-etcd/blob/main"
    (tmp_path / "there.md").write_text("# A heading, with `code`\n\n## Twice\n\n## Twice\n")
    broken = ["gone.md", "there.md#nowhere", "#nothing", f"{home}/docs/gone.md"]
    fine = ["there.md", "there.md#a-heading-with-code", "there.md#twice-1", "https://example.com"]
    fine += [f"{home}/docs/deploy.md#size"]
    text = "\n".join(f"[a]({link})" for link in broken + fine)
    (tmp_path / "page.md").write_text(f"{text}\n\n[b][missing]\n\n```\n[c](in-code.md)\n```\n")
    page = Document(tmp_path / "page.md")
    assert page.broken() == broken
    assert page.undefined() == {"missing"}


def test_the_readme_can_be_read_where_no_files_are_beside_it() -> None:
    """It is the page of a package index as well."""
    assert README.links()
    assert [link for link in README.links() if not link.startswith(("https://", "#"))] == []


def test_the_readme_is_one_page() -> None:
    assert len(README.text.splitlines()) <= 140
    rules = [line for line in README.text.splitlines() if line.startswith("| ---")]
    assert 1 <= len(rules) <= 3


@pytest.mark.parametrize("command", [RUN_THE_EXAMPLE, RUN_THE_TESTS])
def test_the_set_up_commands_are_in_the_readme_word_for_word(command: str) -> None:
    assert command in README.code("bash")


def test_the_readme_names_every_document() -> None:
    """But the notes on the benchmarks, which the comparison does."""
    named = {ROOT / link.removeprefix(HOME).partition("#")[0] for link in README.links()}
    notes = ROOT / "benchmarks" / "NOTES.md"
    assert {document.path for document in DOCUMENTS} - named == {README.path, notes}


def test_documents_that_code_names_exist() -> None:
    code = [
        path for folder in ("rdzv_etcd", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        name
        for path in [*code, ROOT / "docker-compose.yml"]
        for name in re.findall(r"(?<!\.io/)\bdocs/[\w-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_help_texts_errors_and_options_are_the_code_s() -> None:
    """If this fails, run ``python -m tests.packaging.generated``."""
    stale = [
        document.path.name for document in DOCUMENTS if renewed(document.text) != document.text
    ]
    assert stale == []
    commands = {f"help:{name}" for name in app.list_commands(click.Context(app))}
    found = {name for document in DOCUMENTS for name in blocks(document.text)}
    assert found == commands | {"help:common", "errors", "options"}
    headings = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert [
        name for name in commands if f"\n## {name.removeprefix('help:')}\n" not in headings
    ] == []


def test_the_keys_of_the_protocol_are_the_code_s() -> None:
    table = (ROOT / "docs/protocol.md").read_text(encoding="utf-8").partition("\n## Keys\n")[2]
    written = re.findall(r"^\| `([a-z][^`<]*/[^`<]*)", table.partition("\n## ")[0], re.MULTILINE)
    described = re.findall(r"<prefix>/<job>/([^\s<]+)", keys.__doc__ or "")
    assert sorted(written) == sorted(described)
    job = keys.JobKeys("/prefix", "job")
    for name in (name for name, kind in vars(keys.JobKeys).items() if isinstance(kind, property)):
        value = getattr(job, name)
        for each in value if isinstance(value, tuple) else (value,):
            key = (each.start if isinstance(each, keys.KeyRange) else each).removeprefix(job.root)
            assert any(
                key.startswith(one) or one.startswith(key) for one in map(str.encode, written)
            )


def alone(code: str, server: EtcdServer, job_id: str) -> str:
    """The same for one node on a real etcd: replaced are the endpoint, the job's name and the
    number of nodes."""
    for shown, here in (
        ("etcd-host:2379", server.endpoint),
        ("my-job", job_id),
        ("nodes=(2, 4)", "nodes=1"),
    ):
        assert shown in code
        code = code.replace(shown, here)
    return code


@pytest.mark.parametrize("name", ["README.md", "docs/library.md"])
def test_the_library_s_example_works(
    name: str, etcd_server: EtcdServer, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, *_ = Document(ROOT / name).code("python")
    code = alone(code, etcd_server, job_id)
    steps = [1, 2, 3]

    def train_one_step(_world: World) -> str:
        steps.pop()
        return "" if steps else "done"

    given = {"train_one_step": train_one_step}
    environ = dict(os.environ)
    exec(compile(code, name, "exec"), given)
    assert capsys.readouterr().out.startswith("0 1 ")
    assert not steps
    assert dict(os.environ) == environ  # the library changes nobody's environment


def example_with(word: str) -> str:
    """The library's one example in which that is."""
    (code,) = [code for code in Document(ROOT / "docs/library.md").code("python") if word in code]
    return code


def test_the_library_s_example_of_an_observer_works(
    etcd_server: EtcdServer, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = example_with("rdzv_etcd.observe")
    code = code.replace("etcd-host:2379", etcd_server.endpoint).replace("my-job", job_id)
    seen = threading.Event()

    def see(line: object) -> None:
        told.append(str(line))
        seen.set()

    told: list[str] = []
    watching = threading.Thread(target=exec, args=(code, {"print": lambda *a: see(a)}))
    watching.start()
    assert seen.wait(60)
    with rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=1) as group:
        group.join()
        group.finish("done")
        watching.join(60)
    assert not watching.is_alive()
    assert "JobEnded" in told[-1]
    capsys.readouterr()


def test_the_example_of_a_drain_works(etcd_server: EtcdServer, job_id: str) -> None:
    code = example_with("signal.signal")
    before = signal.getsignal(signal.SIGUSR1)
    steps = []

    def train_one_step(_world: World) -> str:
        steps.append("")
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return ""

    try:
        code = alone(code, etcd_server, job_id)
        exec(compile(code, "docs/library.md", "exec"), {"train_one_step": train_one_step})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(steps) >= 3


def test_the_example_of_training_in_process_works(etcd_server: EtcdServer, job_id: str) -> None:
    code = example_with("broadcast_newest")
    given: dict[str, Any] = {}
    exec(compile(alone(code, etcd_server, job_id), "docs/library.md", "exec"), given)
    assert given["counter"].step == 1000


def test_the_library_s_example_on_asyncio_works(etcd_server: EtcdServer, job_id: str) -> None:
    code = example_with("rdzv_etcd.aio")
    exec(compile(alone(code, etcd_server, job_id), "docs/library.md", "exec"), {})


def test_the_launchers_loops_work(etcd_server: EtcdServer, job_id: str, tmp_path: Path) -> None:
    workers, service, steps = (
        alone(code, etcd_server, f"{job_id}-{number}")
        for number, code in enumerate(Document(ROOT / "docs/launchers.md").code("python"))
    )
    program = tmp_path / "launcher.py"
    program.write_text(workers)
    path = python_path(ROOT, ROOT / "examples" / "launchers")
    how = {"PYTHONPATH": path, "PYTHONUNBUFFERED": ""}  # a line is one write
    printed = output([sys.executable, program], env=how)
    places = [line.split()[:2] for line in printed.splitlines() if line[0].isdigit()]
    assert sorted(places) == [["0", "2"], ["1", "2"]]

    used: list[dict[str, str]] = []

    def use(urls: dict[str, str]) -> None:
        used.append(urls)
        given["group"].finish("enough")

    given: dict[str, Any] = {"my_url": "http://here", "use": use}
    exec(compile(service, "docs/launchers.md", "exec"), given)
    assert [list(urls.values()) for urls in used] == [["http://here"]]

    given = {"gradient": lambda weight, rank, size: (weight - 10.0) / 2}
    exec(compile(steps, "docs/launchers.md", "exec"), given)
    assert given["state"] == {"step": 100, "weight": pytest.approx(10.0)}


def test_every_block_is_run_or_has_a_reason_why_not() -> None:
    """A new one is run by a test, and marked or named in ``BLOCKS``."""
    unknown = []
    used = set()
    for document in DOCUMENTS:
        name = document.path.relative_to(ROOT).as_posix()
        for code in document.unmarked():
            beginning = next((word for word in BLOCKS.get(name, {}) if code.startswith(word)), None)
            used.add((name, beginning))
            if beginning is None:
                unknown.append(f"{name}: {code}")
    assert unknown == []
    assert used == {(name, beginning) for name, blocks in BLOCKS.items() for beginning in blocks}


def commands(program: str) -> list[list[str]]:
    """Every whole command of that program in the documents that is alone on its line."""
    text = "\n".join(code for document in DOCUMENTS for code in document.unmarked())
    lines = text.replace("\\\n", " ").splitlines()
    whole = [line for line in lines if re.match(rf"{program} [^…>]*$", line)]
    return [shlex.split(line) for line in whole]


def test_commands_are_as_the_programs_take_them() -> None:
    known = set(re.findall(r"`(\w+)`", options_table()))
    for _, *words in commands("torchrun"):
        parsed = get_args_parser().parse_args(words)
        assert parsed.rdzv_backend == "etcd3"
        assert {pair.partition("=")[0] for pair in parsed.rdzv_conf.split(",") if pair} <= known
    for _, name, *words in commands("rdzv-etcd"):
        command = app.get_command(click.Context(app), name)
        assert command is not None, name
        command.make_context(name, words, **app.context_settings)


def test_workflows_and_hooks_run_what_contributing_names() -> None:
    """Word for word, but for what a run brings, which is called N there."""
    contributing = Document(ROOT / "CONTRIBUTING.md")
    named = re.findall(r"`([^`\n]+)`", contributing.text)
    named += "".join(contributing.code("bash")).splitlines()
    known = {command for line in named for command in line.split(" && ")}
    ran: list[str] = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            ran += [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in ran
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    ran += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    lines = [re.sub(r"\$\{\{.*?\}\}", "N", line) for each in ran for line in each.splitlines()]
    assert [line for line in lines if line not in known] == []


def test_the_interface_s_address_is_found() -> None:
    """What docs/guide.md does to get one, for the interface that every host has."""
    (code,) = [code for code in Document(ROOT / "docs/guide.md").code("bash") if "GLOO" in code]
    (pipe,) = re.findall(r'--local-addr="\$\((.*)\)"', code)
    pipe = pipe.replace("eth1 scope global", "lo")
    assert output(["bash", "-c", pipe]) == "127.0.0.1\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    output(command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    for document in DOCUMENTS:
        if document.path.parent.name == "docs":
            assert (tmp_path / "site" / document.path.stem / "index.html").exists()
    for page in (tmp_path / "site").glob("**/*.html"):
        assert not re.search(r'<(?:script|link|img)\b[^>]*="(?:https?:)?//', page.read_text()), page
        assert 'data-md-component="source"' not in page.read_text(), page  # it asks GitHub
    front = (tmp_path / "site" / "index.html").read_text()
    for door in ("tutorial/", "deploy/", "library/"):
        assert f'<a href="{door}">' in front
    assert 'src="benchmarks/results/recovery-beside-c10d.svg"' in front
    options = (tmp_path / "site" / "options" / "index.html").read_text()
    assert '<td data-heading="meaning">A node that is silent this long' in options
