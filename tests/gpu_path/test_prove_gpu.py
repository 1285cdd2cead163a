"""``make prove-gpu`` and the tests that need a GPU, on the emulated device: that they run, not what a card shows."""

from pathlib import Path

import pytest

from tests.gpu_path.emulator import Emulation, run


def prove(subjects: list[str], output: Path) -> str:
    done = run(["-m", "tests.gpu", "--subjects", *subjects, "--output", str(output)], timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_of_an_emulated_device_is_written(tmp_path: Path) -> None:
    printed = prove(["fp8"], tmp_path / "benchmarks")
    assert "8 x emulated device (no GPU), 80 GiB, driver None" in printed
    assert "nothing was written: emulated device (no GPU) has no NVIDIA driver" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_layouts_are_proved(tmp_path: Path) -> None:
    assert "layouts: PASSED" in prove(["layouts"], tmp_path)


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_the_tests_that_need_a_gpu_pass() -> None:
    found = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_gpu.py"], Emulation(), 480, devices=2)
    assert found.returncode == 0, found.stdout[-3000:]
    assert "deselected" not in found.stdout
