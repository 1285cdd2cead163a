"""What docs/optimizers.md shows of Muon beside AdamW is what was measured."""

import json
from pathlib import Path

import pytest

from program.errors import UserError
from program.untrusted import read_json
from tests.benchmarks.circumstances import ROOT
from tests.benchmarks.optimizers import command as benchmark

MEASURED = ROOT / "docs/benchmarks/optimizers.json"


def test_the_picture_and_the_table_are_of_what_was_measured() -> None:
    found = read_json(MEASURED)["validation_losses"]
    assert benchmark.PICTURE.read_text() == benchmark.drawn(found)
    lines = (ROOT / "docs/optimizers.md").read_text().splitlines()
    for side, runs in found.items():
        (row,) = [line for line in lines if line.startswith(f"| {side}") and "**" in line]
        assert row.replace("*", "").split("|")[2:-1] == [f" {benchmark.last(runs[rate]):.3f} " for rate in runs]


def test_a_run_that_fails_is_named() -> None:
    with pytest.raises(UserError, match=r"--optimizer.lr nan .* ended with 2"):
        benchmark.trained((), float("nan"), 20)


@pytest.mark.campaign
def test_both_sides_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "RATES", (3e-3,))
    output, picture = tmp_path / "found.json", tmp_path / "picture.svg"
    assert benchmark.main(["--iterations", "20", "--output", str(output), "--picture", str(picture)]) == 0
    found = json.loads(output.read_text())["validation_losses"]
    assert {side: len(runs) for side, runs in found.items()} == {"AdamW": 1, "Muon": 1}
    assert all(losses["20"] < losses["1"] for runs in found.values() for losses in runs.values())
    assert picture.read_text().startswith("<svg ")
