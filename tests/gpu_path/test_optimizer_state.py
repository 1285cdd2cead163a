"""Where and how the optimizer's state is kept, on the emulated device: the losses and checkpoints of one CPU rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.trainings import Training, WarmDevice

LOSS_BOUND = 1e-5
WEIGHTS_BOUND = 1e-4
BF16 = ("--precision.dtype", "bf16")
BF16_BOUND = 2e-3
OFFLOADED = ("--optimizer.optimizer_cpu_offload", "true")
OVERLAPPED = (*OFFLOADED, "--optimizer.overlap_cpu_optimizer_d2h_h2d", "true")
HALF = (*OFFLOADED, "--optimizer.optimizer_offload_fraction", "0.5")
HALF_OVERLAPPED = (*OVERLAPPED, "--optimizer.optimizer_offload_fraction", "0.5")


def compare(run_dir: Path, reference: Path) -> None:
    """Losses, and weights and moments of the newest checkpoint by their places in the whole model."""
    assert trainings.loss_difference(run_dir, reference) < LOSS_BOUND
    differences = trainings.checkpoint_differences(run_dir, reference)
    assert {one.outcome for one in differences} <= {"equal", "differs"}
    worst = max(differences, key=lambda one: one.relative or 0)
    assert (worst.relative or 0) < WEIGHTS_BOUND, worst


@pytest.mark.parametrize(
    "layout, shape, order, flags",
    [
        ("dp2overlap", "debug", "late", OFFLOADED),
        ("", "debug", "late", HALF),
        ("tp2sp", "debug", "random", HALF_OVERLAPPED),
        ("ep2", "mixtral_tiny", "late", OVERLAPPED),
    ],
)  # fmt: skip
def test_state_on_the_host_is_updated_as_on_the_device(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order, flags: tuple[str, ...]
) -> None:
    device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order=order), flags)
    compare(tmp_path, on_the_cpu(shape))


@pytest.mark.parametrize("order", ["late", "random"])
@pytest.mark.parametrize("flags", [OFFLOADED, OVERLAPPED, HALF, HALF_OVERLAPPED])
def test_bf16_state_on_the_host(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, order: Order, flags: tuple[str, ...]
) -> None:
    for name, more in (("here", ()), ("host", flags)):
        device.train(Training(layout="dp2overlap"), tmp_path / name, Emulation(order=order), (*BF16, *more))
    compare(tmp_path / "host", tmp_path / "here")
