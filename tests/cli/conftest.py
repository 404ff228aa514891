"""The command line in this process; no test sees an endpoint that the machine has set."""

from __future__ import annotations

import pytest

from tests.cli.tools import Done, Run, run_here
from tests.support.servers import EtcdServer


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "CONF", "ID"):
        monkeypatch.delenv(f"PET_RDZV_{name}", raising=False)
    monkeypatch.delenv("PET_NNODES", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``rdzv-etcd`` with these words."""

    def run(*words: str) -> Done:
        return run_here(capsys, words)

    return run


@pytest.fixture
def act(cli: Run, etcd_server: EtcdServer) -> Run:
    """Run it with the shared etcd."""

    def run(*words: str) -> Done:
        return cli(*words, "--endpoint", etcd_server.endpoint)

    return run
