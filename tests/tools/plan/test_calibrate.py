"""--calibrate writes a cluster file of this machine that the planner reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import clusters
from tools.plan.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


def test_this_machine_becomes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    command = [sys.executable, "-m", "tools.plan", "--calibrate", str(path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=None)
    assert first.returncode == 0, first.stderr
    assert "torch" in path.read_text().splitlines()[0]
    cluster = clusters.load(str(path))
    assert 0.001 < cluster.gpu.peak_tflops["fp32"] < 100 and cluster.gpu.memory_gb_per_s > 0.5
    flags = f"--model gpt2 --cluster {path} --num_gpus 1 --global_batch_size 4 --seq_length 512".split()
    assert main(flags) == 0
    assert "gpt2 on 1 x" in capsys.readouterr().out
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
