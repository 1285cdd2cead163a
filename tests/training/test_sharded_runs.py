"""Whole runs with gradients and weights in shards: what they log is what a run of ZeRO-1 logs."""

from pathlib import Path

import pytest

import runs
from data.prepared import Prepared

LAYOUT = "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2"
RECOMPUTED = "--train.recompute full:uniform:1"
FLAGS = f"{LAYOUT} {RECOMPUTED} --model.hidden_dropout 0.1 --train.train_iters 2 --train.eval_interval 2"


def logged(prepared: Prepared, run_dir: Path, strategy: str) -> list[float]:
    flags = f"{FLAGS} --parallel.data_parallel_sharding_strategy {strategy}"
    config = runs.configuration(run_dir, *flags.split())
    rows = runs.train(prepared, config, 4)
    return [value for row in rows for key, value in row.items() if key in ("loss", "grad_norm", "validation_loss")]


def test_dropout_recomputation_and_evaluations_are_those_of_zero_1(prepared: Prepared, tmp_path: Path) -> None:
    expected = logged(prepared, tmp_path / "zero1", "zero1")
    assert len(expected) == 2 * 2 + 1
    for strategy in ("zero2", "zero3"):
        assert logged(prepared, tmp_path / strategy, strategy) == pytest.approx(expected, rel=1e-5)
