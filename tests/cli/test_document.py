"""docs/cli.md is what the program does."""

from __future__ import annotations

import shlex

import click
import pytest

from rdzv_etcd.cli.app import app
from tests.cli.document import DOCUMENT, documented, renewed
from tests.cli.tools import Run
from tests.library.nodes import groups, join_all, node_settings
from tests.support.markdown import Document
from tests.support.servers import EtcdServer

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_the_help_is_the_program_s() -> None:
    """If this fails, run ``python -m tests.cli.document``."""
    assert renewed(TEXT) == TEXT


@pytest.mark.parametrize("name", app.list_commands(click.Context(app)))
def test_every_command_is_described(name: str) -> None:
    assert name in documented(TEXT)
    assert f"\n## {name}\n" in TEXT


@pytest.mark.slow
def test_the_examples_work(etcd_server: EtcdServer, job_id: str, cli: Run) -> None:
    _, examples = Document(DOCUMENT).code("bash")
    with groups(node_settings(etcd_server, job_id, "2:4"), 2) as nodes:
        join_all(nodes)
        for example in examples.splitlines():
            text = example.replace("etcd-host:2379", etcd_server.target).replace("my-job", job_id)
            program, *words = shlex.split(text)
            assert program == "rdzv-etcd"
            done = cli(*words)
            assert (done.code, done.err) == (0, ""), (example, done)
