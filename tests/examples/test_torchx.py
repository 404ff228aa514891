"""torchx: its own component with this backend's name, and ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.examples.programs import LAUNCHERS, Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORK = "torchx"
SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([float(dist.get_rank())])
dist.all_reduce(ranks)
print(f"of {dist.get_world_size()}: {ranks.item():g}, epoch {os.environ['RDZV_ETCD_EPOCH']}.")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("component", ["torchx's own", "ours"])
def test_two_nodes_of_a_local_scheduler_meet(
    component: str, etcd_server: EtcdServer, programs: Programs, framework: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    host, _, port = etcd_server.target.rpartition(":")
    assert host == "127.0.0.1"
    run: list[str | Path] = [
        framework,
        Path(framework).with_name("torchx"),
        "run",
        "--scheduler=local_cwd",
    ]
    if component == "ours":
        run += [f"{LAUNCHERS / 'torchx_component.py'}:ddp", "--etcd", etcd_server.endpoint]
        run += ["--conf", "lease_ttl=3"]
    else:
        run += ["dist.ddp", "--rdzv_backend", "etcd3", "--rdzv_port", port, "--tee", "3"]
    # What it starts is "python" and "torchrun", wherever those are.
    folders = [str(Path(python).parent) for python in (framework, sys.executable)]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    program = programs.run(*run, "-j", "2x1", "--script", tmp_path / "train.py", PATH=path)
    for _ in range(2):
        program.wait_for(r"of 2: 1, epoch [1-9]\d*\.")
    assert program.end() == 0
