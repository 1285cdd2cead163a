"""Trainings on the emulated device: losses and checkpoints of one CPU rank, whenever streams run.

The other combinations, the bounds of 16 bits and the mutants' whole list: ``make prove-gpu-path``.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order, run
from tests.gpu_path.trainings import (
    LOSS_BOUND,
    WEIGHTS_BOUND,
    Training,
    TrainingError,
    WarmDevice,
    assert_same,
    train_on_the_cpu,
)

HALF_BOUND = {"bf16": 2e-3, "fp16": 2e-5}


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("cp2", "debug", "late"),
        ("dp4zero3hsdp2", "debug", "late"),
        pytest.param("tp2sppp2", "debug", "eager", marks=pytest.mark.campaign),
        *(pytest.param(*case, order, marks=pytest.mark.campaign)
          for case in [("", "debug"), ("dp2overlap", "debug"), ("ep2", "mixtral_tiny"), ("tp2sp", "deepseek_v3_tiny")]
          for order in ("random", "late")),
    ],
)  # fmt: skip
def test_a_gpu_trains_as_a_cpu_does(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order=order))
    assert_same(tmp_path, on_the_cpu(shape))


@pytest.mark.campaign
@pytest.mark.parametrize("order", ["random", "late"])
@pytest.mark.parametrize(
    "layout", ["tp2sp", "pp2", "pp2vpp2", "tp2sppp2", "cp2", "dp2zero0", "pp2dp2overlap", "dp2zero3", "dp2zero2"]
)
def test_layouts_train_whenever_streams_run(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, order: Order
) -> None:
    for seed in (1, 2) if order == "random" else (1,):
        run_dir = tmp_path / str(seed)
        device.train(Training(layout=layout), run_dir, Emulation(order=order, seed=seed))
        assert_same(run_dir, on_the_cpu("debug"))


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["dp2overlap", "tp2sp", "pp2vpp2"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ["late", "random"])
def test_16_bits_train_as_on_a_cpu(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, precision: str, order: Order
) -> None:
    flags = ("--precision.dtype", precision)
    device.train(Training(layout=layout), tmp_path, Emulation(order=order), flags)
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug", *flags)) < HALF_BOUND[precision]


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("tp2spdp2overlap", "debug", "late"),
        *(pytest.param(*case, marks=pytest.mark.campaign)
          for case in [("dp2zero3", "debug", "late"), ("pp2vpp2", "debug", "random"), ("ep2", "mixtral_tiny", "late")]),
    ],
)  # fmt: skip
def test_muon_collects_what_is_there(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    """Its exchanges wait for gradients, and weights are gathered after its update."""
    flags = ("--optimizer.optimizer", "muon", "--optimizer.muon_fp32_matmul_prec", "highest")
    device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order=order), flags)
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape, *flags)) < LOSS_BOUND


@pytest.mark.campaign
@pytest.mark.parametrize("order", ["eager", "late", "random"])
def test_where_memory_runs_out_a_rank_says_what_would_fit(device: WarmDevice, tmp_path: Path, order: Order) -> None:
    with pytest.raises(TrainingError) as failed:
        device.train(Training(layout="dp2overlap"), tmp_path, Emulation(memory_mib=4, order=order))
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in str(failed.value)
    assert "out of memory: predicted are" in str(failed.value) and "of the card's 4.00 MiB" in str(failed.value)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape",
    [("dp2overlap", "debug"), ("tp2sp", "debug"), ("pp2vpp2", "debug"), ("tp2sppp2", "debug"), ("cp2", "debug"),
     ("ep2", "mixtral_tiny"), ("", "deepseek_v3_tiny")],
)  # fmt: skip
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_a_run_continues_on_the_other_device(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, first: str
) -> None:
    """Two iterations and a checkpoint on one, two more on the other: as one CPU rank without a break."""
    stop = ["--train.exit_interval", "2"]
    for kind in (first, "cpu" if first == "cuda" else "cuda"):
        if kind == "cuda":
            device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order="late"), stop)
        else:
            train_on_the_cpu(tmp_path, shape, stop)
        stop = []
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape)) < LOSS_BOUND


def test_the_program_itself_starts_its_ranks(brief: tuple[str, ...], on_the_cpu: Any, tmp_path: Path) -> None:
    """As a user does: new processes, ProcessGroupNCCL, and checkpoints written in the background."""
    world_size = Training(layout="dp2overlap").write_recipe(tmp_path / "recipe.toml")
    flags = ["--run_dir", str(tmp_path), "--device", "cuda", "--nproc", str(world_size), *brief]
    done = run(["pretrain_gpt.py", str(tmp_path / "recipe.toml"), *flags], Emulation(order="late"))
    assert done.returncode == 0, done.stderr
    assert "2 ranks (torchrun, cuda)" in done.stdout
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug")) < LOSS_BOUND


@pytest.mark.parametrize(
    "layout, mutant",
    [
        ("dp2overlap", "overlap_not_awaited"),
        pytest.param("dp2overlap", "checkpoint_copy_not_awaited", marks=pytest.mark.campaign),
        pytest.param("pp2", "collectives_not_awaited", marks=pytest.mark.campaign),
    ],
)
def test_a_missing_wait_is_found(device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, mutant: str) -> None:
    """Else the harness has gone blind: the run meets NaN, or the loss or a tensor of the checkpoint is wrong."""
    # A lull lets work go on that nothing asks for.
    settings = {"EMULATED_CUDA_MUTANT": mutant, "EMULATED_CUDA_LULL_MS": "300"}
    emulation = Emulation(order="late", hooks=("tests.gpu_path.mutants",), settings=settings)
    try:
        device.train(Training(layout=layout), tmp_path, emulation)
    except TrainingError as error:
        assert "loss nan, gradient norm nan" in str(error)
        return
    reference = on_the_cpu("debug")
    worst = max(one.relative or 0 for one in trainings.checkpoint_differences(tmp_path, reference))
    assert max(trainings.loss_difference(tmp_path, reference), worst) > 100 * WEIGHTS_BOUND


OFFLOADED = ("--train.cpu_offloading_num_layers", "4")


def offloading(order: Order, mutant: str = "small_activations_offloaded") -> Emulation:
    # Without a lull, work that nothing asks for has not been done yet.
    settings = {"EMULATED_CUDA_MUTANT": mutant, "EMULATED_CUDA_LULL_MS": "300"}
    hooks = ("tests.gpu_path.mutants", "tests.gpu_path.offload_fetches")
    return Emulation(order=order, hooks=hooks, settings=settings)


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("pp2vpp2", "debug", "random"),
        *(pytest.param(*case, marks=pytest.mark.campaign)
          for case in [*(("", "debug", order) for order in ("late", "random")), ("tp2sp", "debug", "late"),
                       ("pp2vpp2", "debug", "late"),
                       *(("dp2zero3", "debug", order) for order in ("late", "random")), ("ep2", "mixtral_tiny", "late"),
                       ("tp2sp", "deepseek_v3_tiny", "late"), ("tp2sppp2", "debug", "late")]),
    ],
)  # fmt: skip
def test_activations_wait_on_the_host(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    printed = device.train(Training(layout=layout, shape=shape), tmp_path, offloading(order), OFFLOADED)
    assert "fetched ahead" in printed
    assert_same(tmp_path, on_the_cpu(shape))


RECOMPUTED = {
    "mlp": ("--train.recompute", "selective:mlp"),
    "uniform": ("--train.recompute", "full:uniform:1"),
    "block": ("--train.recompute", "full:block:1"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("again", RECOMPUTED)
@pytest.mark.parametrize(
    "layout, order", [("", "late"), ("pp2vpp2", "late"), ("dp2zero3", "random"), ("tp2sp", "late")]
)
def test_what_is_recomputed_waits_on_the_host_as_well(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, order: Order, again: str
) -> None:
    """Of a block that is recomputed its input; the backward pass keeps the rest on the device."""
    printed = device.train(Training(layout=layout), tmp_path, offloading(order), (*OFFLOADED, *RECOMPUTED[again]))
    assert "fetched ahead" in printed or (layout, again) == ("pp2vpp2", "uniform")  # a block a chunk: one tensor
    assert_same(tmp_path, on_the_cpu("debug"))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "mutant, order",
    [("offload_not_awaited_on_the_way_back", "late"), ("offload_not_awaited_on_the_way_out", "random")],
)
def test_a_missing_wait_for_the_host_is_found(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, mutant: str, order: Order
) -> None:
    try:
        device.train(Training(), tmp_path, offloading(order, mutant), OFFLOADED)
    except TrainingError as error:
        assert "gradient norm nan" in str(error)
        return
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug")) > 100 * LOSS_BOUND
