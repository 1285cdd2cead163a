"""Whole runs with gradients and weights in shards: what they log is what a run of ZeRO-1 logs."""

from pathlib import Path

import pytest

import runs
from campaign import some
from data.prepared import Prepared

LAYOUT = "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2"
FLAGS = """--train.recompute full:uniform:1 --model.hidden_dropout 0.1 --train.train_iters 2 --train.eval_interval 2
    --train.eval_iters 1 --log.report False"""
ZERO3, IN_STAGES = ("zero3", "", 2), ("zero2 zero3", LAYOUT, 4)


def logged(prepared: Prepared, run_dir: Path, strategy: str, layout: str, world_size: int) -> list[float]:
    flags = f"{FLAGS} {layout} --parallel.data_parallel_sharding_strategy {strategy}"
    rows = runs.train(prepared, runs.configuration(run_dir, *flags.split()), world_size)
    return [value for row in rows for key, value in row.items() if key in ("loss", "grad_norm", "validation_loss")]


# In stages, without dropout: tests/test_layouts.py
@pytest.mark.parametrize("strategies, layout, world_size", some([ZERO3, IN_STAGES], [ZERO3]))
@pytest.mark.campaign
def test_dropout_recomputation_and_evaluations_are_those_of_zero_1(
    strategies: str, layout: str, world_size: int, prepared: Prepared, tmp_path: Path
) -> None:
    expected = logged(prepared, tmp_path / "zero1", "zero1", layout, world_size)
    assert len(expected) == 2 * 2 + 1
    for strategy in strategies.split():
        assert logged(prepared, tmp_path / strategy, strategy, layout, world_size) == pytest.approx(expected, rel=1e-5)
