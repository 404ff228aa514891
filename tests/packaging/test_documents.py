"""The documents say what the code says, their links lead somewhere, and their examples work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdzv_etcd import World
from rdzv_etcd.settings.options import options_table
from tests.support.markdown import ROOT, Document, documents
from tests.support.servers import EtcdServer

README = Document(ROOT / "README.md")
DOCUMENTS = documents()
RUN_THE_EXAMPLE = (
    "python3 -m venv .venv && .venv/bin/pip install '.[embedded,examples]' && "
    ".venv/bin/torchrun --nnodes=1 --nproc-per-node=2 --rdzv-backend=etcd3 "
    "--rdzv-endpoint=localhost:2379 --rdzv-id=digits --rdzv-conf=embed=1 examples/digits.py\n"
)
RUN_THE_TESTS = "./tools/test.sh\n"

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


def test_the_index_names_every_document() -> None:
    index = Document(ROOT / "docs/README.md")
    named = {(index.path.parent / link).resolve() for link in index.links()}
    assert {document.path for document in DOCUMENTS} - named == {README.path, index.path}


def test_the_option_table_is_the_code_s() -> None:
    """If this fails, put the output of ``options_table()`` between the markers."""
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- options:begin -->\n")
    shown, end, _ = rest.partition("<!-- options:end -->")
    assert end, "docs/options.md has lost its markers"
    assert shown.strip() == options_table().strip()


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
    code, *others = Document(ROOT / name).code("python")
    assert all("rdzv_etcd.aio" in other for other in others)
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


def test_the_library_s_example_on_asyncio_works(etcd_server: EtcdServer, job_id: str) -> None:
    _, code = Document(ROOT / "docs/library.md").code("python")
    exec(compile(alone(code, etcd_server, job_id), "docs/library.md", "exec"), {})
