"""The data benchmark's rows: what is missing is no pass, and what was measured is kept with its circumstances."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.data import command as benchmark
from tests.benchmarks.data.table import MeasuredRow


def test_a_missing_peer_is_no_pass_and_a_low_ratio_a_no() -> None:
    assert MeasuredRow(name="a", ours=2.0, unit="CPU s", at_least=10, note="peer missing").verdict == "not measured"
    assert MeasuredRow(name="a", ours=2.0, theirs=19.0, unit="CPU s", at_least=10).verdict == "NO"
    assert MeasuredRow(name="a", ours=2.0, theirs=20.0, unit="CPU s", at_least=10).verdict == "yes"
    assert (
        MeasuredRow(name="a", ours=30.0, theirs=10.0, unit="samples/CPU s", at_least=3, is_rate=True).verdict == "yes"
    )
    assert MeasuredRow(name="a", ours=1.5, unit="wall s", at_most=1).verdict == "NO"


def test_one_part_is_measured_and_the_other_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "data.json"
    kept.write_text('{"tokenising": {"commit": "before", "load_average_1min": 1.0}}\n')
    slow = MeasuredRow(name="loader", ours=1.0, theirs=2.0, unit="samples/CPU s", at_least=8, is_rate=True)
    monkeypatch.setattr(benchmark.loading, "rows", lambda _: iter([slow]))
    assert benchmark.main(["--only", "loading", "--output", str(kept)]) == 1
    assert "0 of 1 goals reached" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert found["tokenising"] == {"commit": "before", "load_average_1min": 1.0}
    assert found["loading"]["results"][0] | {"ratio": 0.5, "reached": "NO"} == found["loading"]["results"][0]
    assert found["loading"]["versions"]["megatron-core"] and found["loading"]["commit"]
