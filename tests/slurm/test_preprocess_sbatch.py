"""slurm/preprocess.sbatch: the units shared by an array, on a real SLURM; its shell without one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.private_cluster import PrivateCluster
from tools.preprocess.__main__ import main

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "slurm/preprocess.sbatch"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents for a dozen units."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} " * 50}) + "\n" for number in range(200)))
    return path


def flags(text: Path, output: Path) -> list[str]:
    return [str(text), "--output", str(output), "--tokenizer", "byte", "--unit_mb", "0.01", "--merge"]


def results(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def task(number: int, count: int, **more: str) -> dict[str, str]:
    """What SLURM tells a task of an array."""
    printed = {"ID": str(number), "COUNT": str(count), "MIN": "0", "MAX": str(count - 1), "STEP": "1"}
    environ = {f"SLURM_ARRAY_TASK_{name}": value for name, value in printed.items()}
    return os.environ | environ | {"REPO": str(REPO), "PYTHON": sys.executable} | more


@pytest.mark.campaign
def test_tasks_of_an_array_make_what_one_run_makes(text: Path, tmp_path: Path) -> None:
    for name in ("one", "array"):
        (tmp_path / name).mkdir()
    assert main(flags(text, tmp_path / "one" / "x")) == 0
    command = ["bash", str(SCRIPT), *flags(text, tmp_path / "array" / "x")]
    tasks = [subprocess.Popen(command, env=task(number, 3)) for number in range(3)]
    assert [one.wait(timeout=120) for one in tasks] == [0, 0, 0]
    assert results(tmp_path / "array") == results(tmp_path / "one")


def test_an_array_that_does_not_begin_at_0_is_refused(text: Path, tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), *flags(text, tmp_path / "x")]
    ran = subprocess.run(command, env=task(1, 3, SLURM_ARRAY_TASK_MIN="1"), capture_output=True, text=True)
    assert ran.returncode == 2
    assert "expected --array 0-N" in ran.stderr


@pytest.mark.campaign
def test_the_signal_before_the_time_limit_stops_it_with_75(tmp_path: Path) -> None:
    text = tmp_path / "in.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {number} " * 5000}) + "\n" for number in range(600)))
    command = ["bash", str(SCRIPT), *flags(text, tmp_path / "x")]
    started = subprocess.Popen(command, env=task(0, 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("x.preprocess/unit-*.idx")):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    assert "the same command continues" in started.communicate(timeout=60)[1]
    assert started.returncode == 75
    assert not list(tmp_path.glob("x_text_document*"))


@pytest.mark.slurm
def test_an_array_on_slurm(cluster: PrivateCluster, text: Path, tmp_path: Path) -> None:
    for name in ("one", "array"):
        (tmp_path / name).mkdir()
    assert main(flags(text, tmp_path / "one" / "x")) == 0
    job = cluster.submit(
        "--array", "0-1", str(SCRIPT), *flags(text, tmp_path / "array" / "x"), cwd=tmp_path,
        variables={"REPO": str(REPO), "PYTHON": sys.executable},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "array/x_text_document.idx").is_file() and time.monotonic() < deadline:
        time.sleep(0.5)
    said = "".join(path.read_text() for path in tmp_path.glob("slurm-preprocess-*.out"))
    assert results(tmp_path / "array") == results(tmp_path / "one"), (job, said)
