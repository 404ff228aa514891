"""docs/deploy.md leads to every file, and names nothing that does not exist."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from rdzv_etcd.settings.options import NAMES
from tests.deploy.examples import DOCUMENT, FILES, SCRIPTS
from tests.support.markdown import ROOT
from tests.support.servers import EtcdServer

_METRICS_OF_THE_RUNTIME = {"process_open_fds", "process_max_fds", "process_resident_memory_bytes"}


def test_every_example_is_linked() -> None:
    links = re.findall(r"\]\(\.\./examples/deploy/([\w.-]+)\)", DOCUMENT.text)
    assert sorted(set(links)) == [path.name for path in FILES]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_bash(path: os.PathLike[str]) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=60)


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", DOCUMENT.text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_options_exist() -> None:
    """Every `name=value` in running text is one of ours; flags of programs begin with dashes."""
    named = set(re.findall(r"`([a-z_]+)=[^`]*`", DOCUMENT.text))
    assert named
    assert named <= NAMES.keys()
    assert {"lease_ttl", "join_timeout", "last_call_timeout"} <= NAMES.keys()


@pytest.mark.every_etcd
def test_the_metrics_exist(etcd_server: EtcdServer) -> None:
    metrics = set(re.findall(r"`((?:etcd|process)_\w+)`", DOCUMENT.text)) - {"etcd_prefix"}
    assert len(metrics) > len(_METRICS_OF_THE_RUNTIME)
    published = {sample.name for sample in etcd_server.metrics().samples}
    histograms = {name.removesuffix("_bucket") for name in published}
    assert metrics <= published | histograms


@pytest.mark.every_etcd
def test_etcd_knows_the_flags(etcd_server: EtcdServer) -> None:
    """Those in the document; the manifest's are tried in test_etcd_manifest.py."""
    ours = {"--shutdown-timeout", "--max-restarts", "--signal", "--extra-index-url"}
    flags = set(re.findall(r"`(--[a-z][\w-]+)", DOCUMENT.text)) - ours
    flags = {flag for flag in flags if not flag.startswith(("--rdzv", "--nnodes", "--local"))}
    assert "--auth-token-ttl" in flags
    assert {flag for flag in flags if not etcd_server.binary.knows(flag)} == set()
