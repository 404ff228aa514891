"""The look for threads of gloo's finds them, and only them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gloo_threads import none_left_behind

BEGIN = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.barrier()  # made by one of the threads, which has its name by then
"""


def run(program: str, meeting: Path) -> int:
    return subprocess.run([sys.executable, "-c", program, meeting], check=False).returncode


def test_a_process_group_that_is_kept_is_found(tmp_path: Path) -> None:
    (tmp_path / "exits").mkdir()
    with (
        pytest.raises(AssertionError, match=r"meeting : .*gloo_runloop"),
        none_left_behind(tmp_path / "exits"),
    ):
        assert run(BEGIN, tmp_path / "meeting") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [("dist.destroy_process_group()", 0), ("raise ValueError", 1), ("sys.exit(3)", 3)],
)
def test_one_that_is_destroyed_is_not_nor_a_program_that_fails(
    tmp_path: Path, end: str, code: int
) -> None:
    (tmp_path / "exits").mkdir()
    with none_left_behind(tmp_path / "exits"):
        assert run(BEGIN + end, tmp_path / "meeting") == code
