"""The examples of docs/cli.md; tests/packaging compares its help texts."""

from __future__ import annotations

import shlex

from tests.cli.tools import Run
from tests.library.nodes import ALONE, groups, join_all, node_settings
from tests.support.markdown import ROOT, Document
from tests.support.servers import EtcdServer


def test_the_examples_work(etcd_server: EtcdServer, job_id: str, cli: Run) -> None:
    _, examples = Document(ROOT / "docs" / "cli.md").code("bash")
    with groups(node_settings(etcd_server, job_id, "2:4", **ALONE), 2) as nodes:
        join_all(nodes)
        for example in examples.splitlines():
            text = example.replace("etcd-host:2379", etcd_server.target).replace("my-job", job_id)
            program, *words = shlex.split(text)
            assert program == "rdzv-etcd"
            done = cli(*words)
            assert (done.code, done.err) == (0, ""), (example, done)
