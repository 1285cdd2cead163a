"""Layers as CUDA graphs (kernels.cuda_graph_impl) on the emulated device: bit by bit what their kernels compute."""

import json
from pathlib import Path

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.trainings import Training, TrainingError, WarmDevice

ON = ("--kernels.cuda_graph_impl", "local")
DROPOUT = ("--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1")
EVALUATION = (
    "--train.train_iters", "3", "--train.global_batch_size", "4", "--train.eval_interval", "2",
    "--train.eval_iters", "2",
)  # fmt: skip
BF16 = ("--precision.dtype", "bf16")


def equal_with_graphs(
    device: WarmDevice, folder: Path, training: Training, flags: tuple[str, ...], emulation: Emulation
) -> str:
    """What the ranks with graphs printed. Losses and checkpoints, random generators among them, are compared."""
    device.train(training, folder / "off", emulation, flags)
    text = device.train(training, folder / "on", emulation, (*flags, *ON))
    assert trainings.loss_difference(folder / "on", folder / "off") == 0
    differences = trainings.checkpoint_differences(folder / "on", folder / "off", generators=True)
    assert {one.outcome for one in differences} == {"equal"}
    assert "layers as CUDA graphs" in text
    return text


def measured(folder: Path) -> Emulation:
    """Launches of the third iteration are counted."""
    settings = {"EMULATED_CUDA_LAUNCHES": str(folder)}
    return Emulation(hooks=("tests.gpu_path.launch_meter",), settings=settings)


def launches(folder: Path) -> int:
    return json.loads((folder / "launches-0.json").read_text())["step"][0]


def test_graphs_train_as_their_kernels_do(device: WarmDevice, tmp_path: Path) -> None:
    """With dropout, overlapped gradients and evaluations; and the host launches less."""
    counts = {}
    for name, flags in {"off": (), "on": ON}.items():
        (tmp_path / name).mkdir()
        flags = (*DROPOUT, *EVALUATION, *flags)
        device.train(Training(layout="dp2overlap"), tmp_path / name, measured(tmp_path / name), flags)
        counts[name] = launches(tmp_path / name)
    assert trainings.loss_difference(tmp_path / "on", tmp_path / "off") == 0
    differences = trainings.checkpoint_differences(tmp_path / "on", tmp_path / "off", generators=True)
    assert {one.outcome for one in differences} == {"equal"}
    assert counts["on"] < counts["off"] / 2, counts


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape, flags, order",
    [
        ("tp2", "debug", DROPOUT, "late"),
        ("pp2", "debug", DROPOUT, "random"),
        ("dp2overlap", "debug", (), "late"),
        ("pp2vpp2", "debug", DROPOUT, "late"),
        ("ep2", "mixtral_tiny", (), "late"),
    ],
)
def test_layouts_train_with_graphs(
    device: WarmDevice, tmp_path: Path, layout: str, shape: str, flags: tuple[str, ...], order: Order
) -> None:
    equal_with_graphs(device, tmp_path, Training(layout=layout, shape=shape), flags, Emulation(order=order))


@pytest.mark.campaign
@pytest.mark.parametrize("layout, flags, order", [("", BF16, "late"), ("tp2sp", DROPOUT[:2], "random")])
def test_transformer_engines_modules_train_with_graphs(
    te_device: WarmDevice, tmp_path: Path, layout: str, flags: tuple[str, ...], order: Order
) -> None:
    equal_with_graphs(te_device, tmp_path, Training(layout=layout), flags, Emulation(order=order))


@pytest.mark.campaign
def test_a_bad_batch_runs_again_kernel_by_kernel(device: WarmDevice, tmp_path: Path) -> None:
    """So that the hooks that look for its origin are called; the second result, with the same dropout, counts."""
    emulation = Emulation(hooks=("tests.gpu_path.passing_fault",))
    text = equal_with_graphs(device, tmp_path, Training(layout="dp2"), DROPOUT, emulation)
    assert "a passing fault of the hardware" in text


@pytest.mark.campaign
def test_a_run_continues_with_graphs(device: WarmDevice, tmp_path: Path) -> None:
    """A resumed run captures once more: dropout goes on as if it had not."""
    device.train(Training(), tmp_path / "whole", Emulation(), (*DROPOUT, *ON))
    for stop in (("--train.exit_interval", "2"), ()):
        device.train(Training(), tmp_path / "parts", Emulation(), (*DROPOUT, *ON, *stop))
    assert trainings.loss_difference(tmp_path / "parts", tmp_path / "whole") == 0


@pytest.mark.campaign
@pytest.mark.parametrize("mutant", ["graph_input_not_copied", "graph_not_launched", "capture_draws"])
def test_a_wrong_replay_is_found(device: WarmDevice, tmp_path: Path, mutant: str) -> None:
    emulation = Emulation(hooks=("tests.gpu_path.mutants",), settings={"EMULATED_CUDA_MUTANT": mutant})
    device.train(Training(), tmp_path / "off", Emulation(), DROPOUT)
    try:
        device.train(Training(), tmp_path / "on", emulation, (*DROPOUT, *ON))
    except TrainingError as error:
        assert "loss nan, gradient norm nan" in str(error)
        return
    assert trainings.loss_difference(tmp_path / "on", tmp_path / "off") > 1e-4
