"""Trainings on the emulated device: losses and checkpoints of one CPU rank, whenever streams run.

The other combinations, the bounds of 16 bits and the mutants' whole list: ``make prove-gpu-path``.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import runs
from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order, run
from tests.gpu_path.trainings import Training, WarmDevice, warm_device
from training.cli import parse
from training.prepare import prepare

LOSS_BOUND = 1e-5
WEIGHTS_BOUND = 1e-4


@pytest.fixture(scope="module")
def device() -> Iterator[WarmDevice]:
    with warm_device() as warm:
        yield warm


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of one CPU rank with a model; trained once."""

    @cache
    def trained(shape: str) -> Path:
        run_dir = tmp_path_factory.mktemp(shape)
        Training(shape=shape).write_recipe(run_dir / "recipe.toml")
        config = parse.parse_config([str(run_dir / "recipe.toml"), "--run_dir", str(run_dir)])
        runs.train(prepare(config, None), config, 1)
        return run_dir

    return trained


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("", "debug", "late"),
        ("dp2overlap", "debug", "late"),
        ("dp2overlap", "debug", "random"),
        ("tp2sp", "debug", "late"),
        ("pp2vpp2", "debug", "late"),
        ("tp2sppp2", "debug", "eager"),
        ("cp2", "debug", "late"),
        ("ep2", "mixtral_tiny", "late"),
        ("tp2sp", "deepseek_v3_tiny", "late"),
    ],
)
def test_a_gpu_trains_as_a_cpu_does(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order=order))
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape)) < LOSS_BOUND
    differences = trainings.checkpoint_differences(tmp_path, on_the_cpu(shape))
    assert {one.outcome for one in differences} <= {"equal", "differs"}
    worst = max(differences, key=lambda one: one.relative or 0)
    assert (worst.relative or 0) < WEIGHTS_BOUND, worst


def test_the_program_itself_starts_its_ranks(on_the_cpu: Any, tmp_path: Path) -> None:
    """As a user does: new processes, ProcessGroupNCCL, and checkpoints written in the background."""
    world_size = Training(layout="dp2overlap").write_recipe(tmp_path / "recipe.toml")
    flags = ["--run_dir", str(tmp_path), "--device", "cuda", "--nproc", str(world_size)]
    done = run(["pretrain_gpt.py", str(tmp_path / "recipe.toml"), *flags], Emulation(order="late"))
    assert done.returncode == 0, done.stderr
    assert "2 ranks (torchrun, cuda)" in done.stdout
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug")) < LOSS_BOUND


@pytest.mark.parametrize("mutant", ["overlap_not_awaited", "checkpoint_copy_not_awaited"])
def test_a_missing_wait_is_found(device: WarmDevice, on_the_cpu: Any, tmp_path: Path, mutant: str) -> None:
    """Else the harness has gone blind: the loss, or a tensor of the checkpoint, is wrong."""
    settings = {
        "EMULATED_CUDA_MUTANT": mutant,
        "EMULATED_CUDA_LULL_MS": "300",
    }  # nothing asks for the work: a lull does
    emulation = Emulation(order="late", hooks=("tests.gpu_path.mutants",), settings=settings)
    device.train(Training(layout="dp2overlap"), tmp_path, emulation)
    reference = on_the_cpu("debug")
    worst = max(one.relative or 0 for one in trainings.checkpoint_differences(tmp_path, reference))
    assert max(trainings.loss_difference(tmp_path, reference), worst) > 100 * WEIGHTS_BOUND
