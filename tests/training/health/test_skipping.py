"""Samples that are never taken and iterations without an update, in whole runs and over their resumes."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import runs
from data.prepared import Prepared
from data.source import build_source
from program.errors import UserError
from tests.faults.recorded_samples import CALLBACK, digest, recorded
from tests.training.health.injected import tensors
from tools.report.events import marks
from tools.report.run_data import read_run
from training.cli.dry_run import describe
from training.cli.parse import parse_config
from training.run_dir.history import read_history

PLAIN = ("--train.global_batch_size", "4", "--train.eval_interval", "None", "--log.report", "False",
         "--train.callbacks", CALLBACK)  # fmt: skip
TP2 = ("--parallel.tensor_model_parallel_size", "2")


def train(prepared: Prepared, run_dir: Path, world_size: int, *flags: str) -> list[dict[str, Any]]:
    return runs.train(prepared, runs.configuration(run_dir, *PLAIN, *flags), world_size)


def state(run_dir: Path, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / f"checkpoints/iter_{iteration:07}/state.json").read_text())
    return found


@pytest.mark.campaign  # every day: tests/oracle/test_stages.py
def test_samples_that_are_skipped_are_never_taken(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In two layouts, and with a range that a resume adds; one that was trained on by then stays trained on."""
    gaps = ("--data.samples_to_skip", "6-8", "17")
    train(prepared, tmp_path, 2, "--train.exit_interval", "4", *gaps)
    spoiled = {"what": "", "ranges": [[45, 46]]}  # of iteration 6, by its position
    (tmp_path / "skipped_samples.json").write_text(json.dumps(spoiled))
    metrics = train(prepared, tmp_path, 2, "--train.train_iters", "7", *gaps, "2-3", "22-41", *TP2)
    positions = [*range(6), *range(9, 17), *range(18, 22), *range(42, 52)]
    config = runs.configuration(tmp_path)
    source = build_source(prepared, config.data, config.model.seq_length, config.train.seed, "train")
    assert recorded(tmp_path) == [digest(window) for window in source.fetch(np.array(positions))]
    # what counts
    assert [line["samples_skipped"] for line in metrics] == [0, 3, 3, 4, 24, 24, 24]
    assert [line["skipped"] for line in metrics] == [0] * 5 + [1, 0]
    assert [line["consumed_samples"] for line in metrics] == [4, 8, 12, 16, 20, 24, 28]
    assert metrics[-1]["epoch"] == pytest.approx(52 / source.samples_per_epoch)  # type: ignore[attr-defined]
    order = state(tmp_path, 7)["entries"]["order"]
    assert order["skipped"] == [[6, 9], [17, 18], [22, 42]] and [read[1] for read in order["now"].values()] == [52]
    # what is said
    assert "data.samples_to_skip: 2-3: trained on before this checkpoint, and not skipped" in capfd.readouterr().out
    events = [one for one in read_history(tmp_path) if one.event == "samples_skipped"]
    assert [one.iteration for one in events] == [2, 4, 5] and "samples 22-41 are skipped" in events[-1].text("text")
    shown = [mark.title for mark in marks(read_run(tmp_path)) if "samples_to_skip" in mark.title]
    assert shown == [one.text("text") for one in events]


@pytest.mark.campaign  # every day: tests/oracle/test_stages.py
def test_iterations_are_computed_without_an_update(prepared: Prepared, tmp_path: Path) -> None:
    """The schedules wait, as Megatron's scheduler does, which is stepped after updates only; over a resume, too."""
    flags = ("--train.iterations_to_skip", "3", "5-6", "--train.train_iters", "8", "--checkpoint.save_interval", "1",
             "--checkpoint.keep", "9", "--optimizer.lr_warmup_iters", "2", "--optimizer.min_lr", "1e-4")  # fmt: skip
    train(prepared, tmp_path, 1, *flags, "--train.exit_interval", "5")
    metrics = train(prepared, tmp_path, 1, *flags)
    assert [line["skipped"] for line in metrics] == [0, 0, 1, 0, 1, 1, 0, 0]
    assert [line["iterations_skipped"] for line in metrics] == [0, 0, 1, 1, 2, 3, 3, 3]
    assert [line["samples_skipped"] for line in metrics] == [0] * 8
    assert len(recorded(tmp_path)) == metrics[-1]["consumed_samples"] == 32
    group: dict[str, float] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), 0.0, 3e-3, 1e-4, 8, 32, "cosine", 0.1, 0.1, 32, "constant"
    )
    rates = []
    for iteration in range(1, 9):
        rates.append(group["lr"])
        if iteration not in (3, 5, 6):
            scheduler.step(increment=4)
    assert [line["learning_rate"] for line in metrics] == pytest.approx(rates, rel=1e-12)
    written = [tensors(tmp_path, iteration) for iteration in (2, 3, 4, 5, 6)]
    unchanged = [
        all(now[name] == before[name] for name in now if not name.startswith("rng"))
        for before, now in pairwise(written)
    ]
    assert unchanged == [True, False, True, True]
    assert state(tmp_path, 6)["optimizer"]["step"] == 3
    events = [one.text("text") for one in read_history(tmp_path) if one.event == "skipped"]
    assert events == [f"iteration {n}: its update is skipped, as train.iterations_to_skip says" for n in (3, 5, 6)]


def test_a_dry_run_says_what_is_skipped() -> None:
    given = [str(runs.DEBUG), "--dry_run", "--train.iterations_to_skip", "7", "3-5", "--data.samples_to_skip", "10-19"]
    text = describe(parse_config(given))
    assert "#   samples_to_skip: 10-19" in text
    assert "#   iterations_to_skip: 3-5, 7" in text
    with pytest.raises(UserError, match=r"data.samples_to_skip: data.order = .megatron. has no samples to take"):
        describe(parse_config([*given, "--data.order", "megatron"]))
    with pytest.raises(UserError) as caught:
        describe(parse_config([*given, "9-2", "--train.iterations_to_skip", "0"]))
    assert 'data.samples_to_skip: expected numbers as 7 or "100-120", found "9-2"' in str(caught.value)
    assert "train.iterations_to_skip: expected numbers from 1 to" in str(caught.value)
