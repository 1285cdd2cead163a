"""precision.fp8_param_gather: weights kept in fp8, and gathered so, train what those in 16 bits train.

Bit for bit: Transformer Engine rounds an fp32 weight to bf16 before it quantizes it (quantize_master_weights), as a
weight in bf16 is when it is multiplied. Only the order may differ in which the squares of a gradient norm are added up,
for weights in fp8 have buffers of their own.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.test_transformer_engine import BF16, BLACKWELL, HOPPER, SHORT, WIDE, WIDE_LATENT, fp8
from tests.gpu_path.trainings import Training, TrainingError, WarmDevice

NORM_BOUND = 2e-6
"""Of weights and moments, relative, after steps whose gradients were clipped by a norm of another last bit."""
MEMORY_BOUND = 0.1
"""Of bytes, relative: predicted is 2 for each weight, which leaves out scales, 1/32 byte a value and copy at most."""
IN_FP8 = ("--precision.fp8_param_gather", "True")
EVALUATED = ("--train.eval_interval", "1", "--train.eval_iters", "1")

Reference = Callable[[str, str, str], Path]


def flags_of(recipe: str, shape: str) -> tuple[str, ...]:
    return (*BF16, "--train.train_iters", "3", *(WIDE_LATENT if shape == "deepseek_v3_tiny" else WIDE), *fp8(recipe))


def device_of(recipe: str, order: Order = "eager") -> Emulation:
    return Emulation(order=order, capability=BLACKWELL if recipe == "mxfp8" else HOPPER)


@pytest.fixture(scope="module")
def in_16_bits(te_device: WarmDevice, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The folder of a run with weights in bf16; trained once."""

    @cache
    def trained(recipe: str, layout: str, shape: str) -> Path:
        run_dir = tmp_path_factory.mktemp(f"{recipe}-{layout}-{shape}")
        te_device.train(Training(layout=layout, shape=shape), run_dir, device_of(recipe), flags_of(recipe, shape))
        return run_dir

    return trained


def compare(run_dir: Path, reference: Path) -> None:
    """Losses, and the optimizer's fp32 weights and moments. Of the recipe "delayed" not the history of largest values:
    that of a weight enters it with the update, or with the next forward pass, and moves on after that."""
    assert trainings.loss_difference(run_dir, reference) == 0
    found = trainings.checkpoint_differences(run_dir, reference)
    differences = [one for one in found if not one.name.endswith(".amax_history")]
    assert {one.outcome for one in differences} <= {"equal", "differs"}
    worst = max(differences, key=lambda one: one.relative or 0)
    assert (worst.relative or 0) < NORM_BOUND, worst


@pytest.mark.campaign
def test_on_a_cpu_they_are_in_16_bits(on_the_cpu: Any) -> None:
    """And updated: a CPU has no fp8, and with mxfp8 Megatron would leave the gathering of weights to its own loop."""
    overlapped = ("--parallel.overlap_grad_reduce", "True", "--parallel.overlap_param_gather", "True")
    flags = (*BF16, *SHORT, *WIDE, "--parallel.use_distributed_optimizer", "True", *overlapped)
    kept = on_the_cpu("debug", *flags, *fp8("mxfp8"), *IN_FP8)
    assert trainings.loss_difference(kept, on_the_cpu("debug", *flags)) == 0


@pytest.mark.parametrize(
    "recipe, layout, shape, order",
    [
        ("tensorwise", "dp2overlap", "debug", "late"),
        *(pytest.param(*values, marks=pytest.mark.campaign) for values in [
            ("delayed", "ep2", "mixtral_tiny", "random"),
            ("blockwise", "tp2sp", "debug", "eager"),
            ("mxfp8", "pp2", "debug", "random"),
            ("tensorwise", "", "deepseek_v3_tiny", "eager"),
        ]),
    ],
)  # fmt: skip
@pytest.mark.campaign
def test_it_trains_as_with_weights_in_16_bits(
    te_device: WarmDevice, in_16_bits: Reference, tmp_path: Path, recipe: str, layout: str, shape: str, order: Order
) -> None:
    flags = (*flags_of(recipe, shape), *IN_FP8)
    printed = te_device.train(Training(layout=layout, shape=shape), tmp_path, device_of(recipe, order), flags)
    assert "weights kept in fp8" in printed
    found = re.findall(r"weights ([\d.]+) MiB, gradients ([\d.]+) MiB", printed)
    (weights, gradients), (measured_weights, measured_gradients) = (map(float, pair) for pair in found)
    assert abs(measured_weights / weights - 1) < MEMORY_BOUND
    assert abs(measured_gradients / gradients - 1) < MEMORY_BOUND
    compare(tmp_path, in_16_bits(recipe, layout, shape))


@pytest.mark.campaign
def test_its_checkpoints_are_those_of_weights_in_16_bits(
    te_device: WarmDevice, in_16_bits: Reference, tmp_path: Path
) -> None:
    """Written with weights in fp8, continued in 16 bits, and back: no step differs, nor do scales."""
    plain = flags_of("delayed", "debug")
    for more in ((*IN_FP8, "--train.exit_interval", "1"), ("--train.exit_interval", "2"), IN_FP8):
        te_device.train(Training(layout="dp2overlap"), tmp_path, device_of("delayed"), (*plain, *more))
    compare(tmp_path, in_16_bits("delayed", "dp2overlap", "debug"))


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_whatever_else_uses_weights_leaves_them_as_they_are(
    te_device: WarmDevice, in_16_bits: Reference, tmp_path: Path, recipe: str
) -> None:
    """A replay, a window in bf16 and an evaluation after every step; checkpoints, whose replicas are compared."""
    flags = ("--checkpoint.save_interval", "1", "--precision.fp8_shadow", "warn:1", *EVALUATED, *IN_FP8)
    emulation = replace(device_of(recipe, "late"), hooks=("tests.gpu_path.passing_fault",))
    printed = te_device.train(Training(layout="dp2overlap"), tmp_path, emulation, (*flags_of(recipe, "debug"), *flags))
    assert "a passing fault of the hardware" in printed and "fp8 against bf16" in printed
    compare(tmp_path, in_16_bits(recipe, "dp2overlap", "debug"))


@pytest.mark.campaign
def test_an_infinite_weight_is_named(te_device: WarmDevice, tmp_path: Path) -> None:
    """The optimizer's, from which the weight in fp8 is made."""
    settings = {"EMULATED_CUDA_FAULT": "InfiniteWeight"}
    emulation = replace(device_of("delayed"), hooks=("tests.gpu_path.faults",), settings=settings)
    with pytest.raises(TrainingError, match=r"first in the weight layers\.\d\.mlp\.linear_fc1\.weight"):
        te_device.train(Training(layout="dp2overlap"), tmp_path, emulation, (*flags_of("delayed", "debug"), *IN_FP8))


@pytest.mark.campaign
def test_weights_alone_start_a_run_as_they_do_in_16_bits(
    te_device: WarmDevice, in_16_bits: Reference, tmp_path: Path
) -> None:
    """The optimizer's weights start from 16 bits, not from 8."""
    load = ("--checkpoint.load", str(in_16_bits("tensorwise", "dp2overlap", "debug")), "--checkpoint.finetune", "True")
    flags = (*flags_of("tensorwise", "debug"), *load)
    for name, more in (("fp8", IN_FP8), ("bf16", ())):
        te_device.train(Training(layout="dp2overlap"), tmp_path / name, device_of("tensorwise"), (*flags, *more))
    compare(tmp_path / "fp8", tmp_path / "bf16")
