"""The slices of a first run on a GPU, rehearsed on the emulated device as they will be run: from copied files alone,
without git, a virtual environment or plugins of pytest. With torch's oldest version, as containers have it:

    make versions; .venv-oldest/bin/python -m pytest --campaign tests/gpu_path/test_slices.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.slices import SLICES
from tests.gpu_path.emulator import ROOT, Emulation, process_environment
from tests.gpu_path.test_prove_gpu import WITH_TE

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]
DRIVER = '#!/bin/sh\ncase "$*" in *driver_version*) echo 580.95;; *) exit 1;; esac\n'


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What would be carried to the machine."""
    folder = tmp_path_factory.mktemp("carried")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (folder / ".te").symlink_to(ROOT / ".te")  # which the emulation needs, not the program
    yield folder
    shutil.rmtree(folder)


def prove(copied: Path, *flags: str, path: str = "") -> str:
    """What is printed; every subject passes, or is not run."""
    environ = process_environment(devices=1)
    inherited = {name: value for name, value in environ.items() if not name.startswith(("PYTEST", "VIRTUAL_ENV"))}
    roots = environ["PYTHONPATH"].replace(str(ROOT), str(copied))
    own = {
        "PYTHONPATH": f"{roots}:{ROOT / '.te'}",
        "TRIPLANE_COMMIT": "abc1234",
        "PATH": f"{path}:{os.environ['PATH']}",
    }
    with Emulation(hooks=WITH_TE).variables() as variables:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu", "--size", "tiny", *flags],
            cwd=copied, env=inherited | own | variables, capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_passes(copied: Path, tmp_path: Path, name: str) -> None:
    """On one device, as on a machine with one card; what needs two is not run."""
    printed = prove(copied, "--slices", name, "--minutes", "45", "--output", str(tmp_path))
    verdicts = dict(re.findall(r"^  (\w+): (PASSED|FAILED|NOT RUN) \(", printed, re.MULTILINE))
    expected = dict.fromkeys(("environment", *SLICES[name].subjects), "PASSED")  # type: ignore[index]
    assert verdicts == expected | ({"layouts": "NOT RUN"} if "layouts" in verdicts else {}), printed
    assert "commit abc1234" in printed and "processes are started one by one" not in printed


def test_a_later_call_continues_what_an_earlier_one_brought_back(copied: Path, tmp_path: Path) -> None:
    """With a driver that answers, so that a report is written; into a folder, as it is copied between calls."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(DRIVER)
    smi.chmod(0o755)
    for subjects in (("layers",), ("layers", "fp8")):
        flags = ("--subjects", *subjects, "--resume", "--output", str(tmp_path / "out"))
        printed = prove(copied, *flags, path=str(smi.parent))
    assert "layers: passed before" in printed
    (path,) = (tmp_path / "out").glob("*.json")
    report = json.loads(path.read_text())
    assert report["commit"] == "abc1234" and set(report["subjects"]) == {"environment", "layers", "fp8"}
    assert "NVIDIA" not in report["gpus"][0] and path.with_suffix(".html").exists()
