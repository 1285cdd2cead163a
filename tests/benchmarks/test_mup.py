"""What docs/optimizers.md shows of muP's transfer is what was measured, and says what it shows."""

import json
from pathlib import Path

import pytest

from program.untrusted import read_json
from tests.benchmarks.circumstances import ROOT
from tests.benchmarks.mup import command as benchmark

MEASURED = ROOT / "docs/benchmarks/mup.json"


def test_the_picture_and_the_table_are_of_what_was_measured() -> None:
    found = read_json(MEASURED)["losses"]
    assert benchmark.PICTURE.read_text() == benchmark.drawn(found)
    lines = (ROOT / "docs/optimizers.md").read_text().splitlines()
    for side, losses in found.items():
        cells = [
            f"**{loss:.2f}**" if rate == benchmark.best(losses) else f"{loss:.2f}" for rate, loss in losses.items()
        ]
        assert f"| {side} | {' | '.join(cells)} |" in lines


@pytest.mark.campaign
def test_every_side_is_trained(tmp_path: Path) -> None:
    output, picture = tmp_path / "found.json", tmp_path / "picture.svg"
    assert benchmark.main(["--iterations", "2", "--output", str(output), "--picture", str(picture)]) == 0
    found = json.loads(output.read_text())["losses"]
    assert [len(losses) for losses in found.values()] == [7, 7, 7]
    assert picture.read_text().startswith("<svg ")
