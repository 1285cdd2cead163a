"""The planner against the published runs that it ships with."""

import csv
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from models.costs.predict import SAFE_SHARE
from program.errors import UserError
from tests.planner import refit
from tests.planner.fit import fit
from tests.planner.metrics import errors, memory_errors, order
from tests.planner.peaks import as_given, peak_bytes
from tests.planner.recipes import recipe
from tests.planner.rows import PUBLISHED, PublishedRun, read
from tests.planner.validation import by_layout, predicted_s
from tools.plan.__main__ import main
from tools.plan.cost.constants import fitted, interval
from tools.plan.report import accuracy


@pytest.fixture(scope="module")
def rows() -> list[PublishedRun]:
    return read(PUBLISHED)


def test_errors_and_order_on_the_shipped_runs(rows: list[PublishedRun]) -> None:
    dense, experts = ([row for row in rows if row.experts is kind and row.measured_s] for kind in (False, True))
    assert len(dense) > 390 and len(experts) > 110
    found = errors(dense, predicted_s(dense, fitted()))
    assert found.mean < 0.051 and found.median < 0.038 and abs(found.bias) < 0.02
    assert errors(experts, predicted_s(experts, fitted())).mean < 0.13
    sweeps = {word: [row for row in dense if word in row.source] for word in ("BigScience", "vTrain")}
    orders = {word: order(own, predicted_s(own, fitted())) for word, own in sweeps.items()}
    assert orders["BigScience"].right > 0.84 and orders["BigScience"].top1 < 0.025
    assert orders["vTrain"].right > 0.79 and orders["vTrain"].top1 < 0.02


def test_the_pages_points_are_todays_prices(rows: list[PublishedRun]) -> None:
    """Where prices change, ``tools.plan backtest --refit`` writes both."""
    kept, priced = accuracy.points(), refit.points_of(rows)
    assert [point._replace(predicted_s=0) for point in kept] == [point._replace(predicted_s=0) for point in priced]
    assert [point.predicted_s for point in kept] == pytest.approx([point.predicted_s for point in priced], rel=2e-3)
    assert len(kept) == 520 and len(accuracy.unseen()) == 4


def test_it_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An installation has tools alone on its path."""
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".", root)])
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["--backtest", str(PUBLISHED)]) == 0
    assert "520 with a measured time" in capsys.readouterr().out


def test_what_failed_for_memory_is_flagged_and_little_else(rows: list[PublishedRun]) -> None:
    """Of those that ran and tell their peak, what is flagged was above the line, but for one that was on it."""
    found = memory_errors(rows, peak_bytes(rows), SAFE_SHARE)
    assert found.failed == found.flagged_failed == 4
    assert found.flagged_succeeded <= 41 and found.mean < 0.082 and found.median < 0.045
    held = peak_bytes(rows) / [row.case.machine.memory_bytes for row in rows]
    stated = [(row, share) for row, share in zip(rows, held, strict=True) if row.memory_bytes and not row.out_of_memory]
    below = [
        row.id
        for row, share in stated
        if share > SAFE_SHARE and (row.memory_bytes or 0) < 0.79 * row.case.machine.memory_bytes
    ]
    assert len(stated) > 70 and not below
    assert sum(share > 1 for row, share in zip(rows, held, strict=True) if row.measured_s) <= 1


def test_mixtures_that_ran_fit_with_what_their_recipes_recompute(rows: list[PublishedRun]) -> None:
    """All but 3 of 116; 49 were above their card when experts' outputs, and 16 bits of fp8 inputs, were counted."""
    stated = [row for row in rows if row.experts and row.measured_s and recipe(row.text) is not None]
    held = as_given(stated) / [row.case.machine.memory_bytes for row in stated]
    assert len(stated) > 100 and sum(share > 1 for share in held) <= 3


def test_the_shipped_constants_are_the_fit(rows: list[PublishedRun]) -> None:
    again = asdict(fit([row for row in rows if row.measured_s]))
    for name, value in asdict(fitted()).items():
        assert again[name] == pytest.approx(value, rel=0.02), name


@pytest.mark.campaign
def test_unseen_layouts_are_met_as_the_file_says(rows: list[PublishedRun]) -> None:
    """On dense runs alone, which the experts' constants do not touch."""
    dense = [row for row in rows if row.measured_s and not row.experts]
    predicted = by_layout(dense)
    found = errors(dense, predicted)
    assert found.mean < 0.059 and found.median < 0.045
    known, ratio = interval("dense"), np.array([row.measured_s for row in dense]) / predicted
    assert 0.75 < np.mean((ratio >= known.low) & (ratio <= known.high)) < 0.85


def test_every_row_gets_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "predictions.csv"
    assert main(["--backtest", str(PUBLISHED), "--output", str(output)]) == 0
    with PUBLISHED.open() as asked, output.open() as answered:
        ids, stated = [row["id"] for row in csv.DictReader(asked)], list(csv.DictReader(answered))
    assert [row["id"] for row in stated] == ids
    for row in stated:
        assert float(row["predicted_step_s"]) > 0 and float(row["predicted_memory_gb"]) > 0
        assert float(row["low_s"]) < float(row["predicted_step_s"]) < float(row["high_s"])
    printed = capsys.readouterr().out
    for word in (
        "all dense",
        "top-1",
        "out of memory",
        "4 of 4 failed runs",
        "each cluster by constants fitted without it",
    ):
        assert word in printed


HEADER = "id,source,model,seq_len,gpu,n_gpus,tp,pp,dp,mbs,gbs,step_s,precision\n"


def test_missing_dimensions_come_from_the_name(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(
        HEADER + "a,mine,Llama3-70B,8192,H100,64,4,4,4,1,128,10.9,fp8\n"
        "b,mine,Unheard-13B,4096,A100-80GB,64,,,,,128,,\n"
        "c,mine,GPT OSS 120B,4096,GB300,64,1,1,64,4,1280,,mxfp8\n"
    )
    known, unheard, oss = read(path)
    assert (known.shape.hidden_size, known.case.layout.microbatches) == (8192, 32)
    assert known.measured_s == 10.9 and unheard.measured_s is None
    assert 10e9 < unheard.case.model.parameters < 16e9
    assert oss.shape.num_moe_experts == 128
    assert np.all(predicted_s([known, unheard, oss], fitted()) > 0)


@pytest.mark.parametrize(
    "text, words",
    [
        ("id,model,gpu\n", ["seq_len, n_gpus, gbs", "is missing"]),
        (HEADER.replace("step_s", "step_ms"), ["step_ms", "convert it", "seconds"]),
        (HEADER + "a,s,Llama3-70B,8192,H100,many,4,4,4,1,128,10.9,fp8\n", ["line 2", "many"]),
        (HEADER, ["no rows"]),
    ],
)
def test_a_table_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert main(["backtest", str(path)]) == 2
    stated = capsys.readouterr().err
    assert all(word in stated for word in [*words, "bad.csv"]), stated


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.csv")
