"""The check of layouts on one GPU, which runs here through Gloo."""

import subprocess
import sys

import pytest

from testing.rank_pool import ROOT

ROWS = ["ddp x2", "context x2", "fsdp x2 (ZeRO-3) to tensor x2"]


@pytest.mark.slow
def test_check_of_layouts_passes_on_a_cpu() -> None:
    command = [sys.executable, "-m", "benchmarks.ranks_on_one_gpu", "--device", "cpu", "--rows", *ROWS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = [line.split(" | ") for line in ended.stdout.splitlines()[2:]]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {row[1] for row in rows} == set(ROWS)
    assert {row[2] for row in rows} == {"passed"}
