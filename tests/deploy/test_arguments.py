"""torchrun and this library accept what the examples pass them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, get_args_parser

from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.parse import settings_from_config
from tests.deploy.examples import MOUNTED, TRAINING, Launch, launch

EMBEDDED = "slurm-embedded.sbatch"
NODES = {"pytorchjob.yaml": (2, 4), "statefulset.yaml": (2, 8), "indexed-job.yaml": (2, 2)}
NODES |= {"trainjob.yaml": (2, 2), "slurm.sbatch": (1, 4), EMBEDDED: (1, 4), "runai.sh": (2, 2)}
RANK_KEYS = {"statefulset.yaml": "digits-1", "pytorchjob.yaml": None}

_FILES = {"ca.crt": "PEM", "tls.crt": "PEM", "tls.key": "PEM"}
_FILES |= {"user": "trainer\n", "password": "hidden\n"}

every_example = pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    folder = tmp_path / "secret"
    folder.mkdir()
    for name, content in _FILES.items():
        (folder / name).write_text(content)
    return str(folder)


@every_example
def test_an_example_says_what_it_means(
    path: Path, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = launch(path, 1, tmp_path)
    if path.name != EMBEDDED:
        planned = planned.replaced((MOUNTED, secret))
    settings = _settings(planned, monkeypatch)
    assert (settings.job.min_nodes, settings.job.max_nodes) == NODES[path.name]
    assert settings.rank_key == RANK_KEYS.get(path.name, "1")
    assert settings.embed == (path.name == EMBEDDED)
    assert settings.timing.last_call_timeout_s < settings.timing.join_timeout_s
    connection = settings.connection
    if settings.embed:
        targets = [endpoint.target for endpoint in connection.endpoints]
        assert targets == ["gpu07:25133", "gpu08:25133", "gpu09:25133"]
        assert connection.secret is not None
        assert len(connection.secret) == 64
        return
    assert connection.tls is not None
    assert str(connection.tls.ca_cert) == f"{secret}/ca.crt"
    assert str(connection.tls.cert) == f"{secret}/tls.crt"
    assert str(connection.tls.key) == f"{secret}/tls.key"
    assert connection.credentials is not None
    assert connection.credentials.user == "trainer"
    assert all(endpoint.port == 2379 for endpoint in connection.endpoints)


@every_example
def test_every_pet_variable_is_an_option_of_torchrun(path: Path, tmp_path: Path) -> None:
    known = {f"PET_{action.dest.upper()}" for action in get_args_parser()._actions}
    given = {name for name in launch(path, 0, tmp_path).environment if name.startswith("PET_")}
    assert given <= known


def _settings(planned: Launch, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Go torchrun's way from the command and the environment to the rendezvous parameters."""
    for name, value in planned.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun warns and sets it otherwise
    arguments = get_args_parser().parse_args(planned.options)
    assert arguments.training_script == "examples/digits.py"
    assert arguments.training_script_args == ["--checkpoint-dir=/checkpoints"]
    assert arguments.max_restarts == 100
    config, _, _ = config_from_args(arguments)
    assert config.rdzv_backend == "etcd3"
    assert config.run_id not in ("", "none")
    return settings_from_config(
        endpoint=config.rdzv_endpoint,
        job_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        config={"timeout": 900, **config.rdzv_configs},  # torchrun's own default
        environ=planned.environment,
    )
