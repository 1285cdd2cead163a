"""One rank of many, played on one emulated device: it holds what the same rank of a real job holds, and what is
predicted.

Emulated kernels' own tensors are left out of the peak (kernel_peaks.py); what they return is not.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.layout_rows import ROWS
from tests.gpu_path.emulator import ROOT, Emulation, run
from tests.gpu_path.trainings import EXTENSION

EMULATION = Emulation(hooks=(EXTENSION, "tests.gpu_path.kernel_peaks"))
HELD = ("weights", "gradients", "optimizer", "activations")
BOUND = 0.03
"""Of a toy, whose allocations are rounded up to 512 bytes."""
SHARDED_BOUND = 0.30
"""A toy's block weighs more than it keeps: whole gradients, and all that was kept, are never there together."""
ROUTED_BOUND = 0.10
"""Random routing of 256 tokens: the experts of a rank get 192 of them and 7 % more or fewer, as they are drawn."""


def check(*arguments: str, devices: int = 1) -> list[dict[str, Any]]:
    done = run(["-m", "tests.gpu_path.checks.played_ranks", *arguments], EMULATION, 400, devices=devices)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def off(found: dict[str, Any]) -> float:
    """Measured bytes against predicted ones."""
    return float(found["measured"]["total"] / found["predicted"]["tensors"] - 1)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".te"))  # whose version counts as installed


@pytest.mark.campaign
@pytest.mark.parametrize("name", ROWS)
def test_a_rank_of_many_holds_what_is_predicted(name: str) -> None:
    """Updated by a real step of 64 or 256 ranks' groups: no value that arrives ends or replays it."""
    (found,) = check("row", name)
    assert found["updated"] and found["measured"]["activations"] > 0
    for kind in HELD[:3]:
        assert found["measured"][kind] == found["predicted"][kind], kind
    most = ROUTED_BOUND if "ep" in ROWS[name].layout else BOUND
    least = SHARDED_BOUND if "zero" in ROWS[name].layout else most
    assert -least < off(found) < most, found


@pytest.mark.campaign
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "model, layout",
    [
        ("llama3_8b", "tp2sppp2overlap"),
        ("llama3_8b", "tp2spcp2overlap"),
        ("llama3_8b", "pp2vpp2dp2overlap"),
        ("llama3_8b", "dp2zero3"),
        ("llama3_8b", "dp2zero2"),
        ("mixtral_8x7b", "pp2ep2etp1overlap"),
    ],
)
def test_it_holds_what_the_same_rank_of_a_real_job_holds(model: str, layout: str) -> None:
    """To the byte; a mixture's routing draws from the rank's own numbers, and its experts get what others sent."""
    for found in check("beside", model, layout, devices=4):
        real, played = found["real"]["measured"], found["played"]["measured"]
        bound = ROUTED_BOUND if "ep" in layout else 0.0
        assert abs(played["total"] / real["total"] - 1) <= bound, found["stage"]
        assert off(found["real"]) < (bound or BOUND)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_every_row_runs(tmp_path: Path) -> None:
    """The subject itself, without a card."""
    command = ["-m", "tests.gpu", "--size", "tiny", "--output", str(tmp_path), "--minutes", "20"]
    done = run([*command, "--subjects", "planned_layouts"], EMULATION, 1200)
    assert re.search(r"planned_layouts: PASSED", done.stdout), done.stdout
    for name in ROWS:
        assert re.search(rf"{name} +\d of \d", done.stdout), done.stdout
