"""What happens in a run beside steps, on the emulated device: evaluation, packed documents, a batch that is replayed, a
rank that is killed; each with our modules and with Transformer Engine's, and compared with one CPU rank."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order, run
from tests.gpu_path.trainings import Training, WarmDevice
from training.metrics.jsonl import read_jsonl

LOSS_BOUND = 1e-5
BF16_BOUND = 2e-3
EVALUATED = ("--train.train_iters", "2", "--train.eval_interval", "1", "--train.eval_iters", "2")
APART = ("--data.reset_attention_mask", "True", "--data.reset_position_ids", "True")
FAULTS = "tests.gpu_path.faults"


@pytest.fixture(params=["ours", pytest.param("transformer_engine", marks=pytest.mark.campaign)])
def modules(request: pytest.FixtureRequest) -> WarmDevice:
    """The device of each."""
    return request.getfixturevalue("device" if request.param == "ours" else "te_device")


@pytest.fixture(params=["late", pytest.param("random", marks=pytest.mark.campaign)])
def order(request: pytest.FixtureRequest) -> Order:
    """Of streams."""
    return request.param


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags for a corpus of documents of some 20 tokens, of which a sample holds three."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [f"document {number}: {number * 37 % 101:08b}" for number in range(400)]
    path = folder / "short.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ("--data.paths", str(path), "--data.cache_dir", str(folder / "cache"))


def validation_losses(run_dir: Path) -> list[float]:
    return [line["validation_loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "validation_loss" in line]


@pytest.mark.parametrize("layout", ["pp2vpp2", pytest.param("dp2overlap", marks=pytest.mark.campaign)])
def test_evaluation(modules: WarmDevice, order: Order, on_the_cpu: Any, tmp_path: Path, layout: str) -> None:
    modules.train(Training(layout=layout), tmp_path, Emulation(order=order), EVALUATED)
    reference = on_the_cpu("debug", *EVALUATED)
    assert trainings.loss_difference(tmp_path, reference) < LOSS_BOUND
    found, expected = validation_losses(tmp_path), validation_losses(reference)
    assert len(found) == 2 and found == pytest.approx(expected, rel=LOSS_BOUND)


@pytest.mark.parametrize(
    "layout, precision, bound, how",
    [
        ("dp2overlap", "bf16", BF16_BOUND, "by torch's flash kernel"),
        pytest.param("tp2sp", "fp32", LOSS_BOUND, "in blocks of queries", marks=pytest.mark.campaign),
        pytest.param("pp2", "fp32", LOSS_BOUND, "in blocks of queries", marks=pytest.mark.campaign),
        pytest.param("cp2", "fp32", LOSS_BOUND, "in blocks of queries", marks=pytest.mark.campaign),
    ],
)
def test_packed_documents(
    modules: WarmDevice, order: Order, on_the_cpu: Any, short_documents: tuple[str, ...], tmp_path: Path,
    layout: str, precision: str, bound: float, how: str,
) -> None:  # fmt: skip
    flags = (*short_documents, "--precision.dtype", precision, "--train.train_iters", "2")
    printed = modules.train(Training(layout=layout), tmp_path, Emulation(order=order), (*flags, *APART))
    assert f"documents are kept apart by attention {how}" in printed
    apart, together = on_the_cpu("debug", *flags, *APART), on_the_cpu("debug", *flags)
    assert trainings.loss_difference(together, apart) > 2 * bound  # else the comparison would show nothing
    assert trainings.loss_difference(tmp_path, apart) < bound


@pytest.mark.parametrize("layout", ["dp2overlap", pytest.param("pp2", marks=pytest.mark.campaign)])
@pytest.mark.campaign
def test_a_bad_batch_is_replayed(modules: WarmDevice, order: Order, tmp_path: Path, layout: str) -> None:
    """And leaves no trace: the checkpoint is bit for bit that of a run in which nothing went wrong, with the states of
    Python's, numpy's and torch's random generators."""
    straight, faulty = tmp_path / "straight", tmp_path / "faulty"
    modules.train(Training(layout=layout), straight, Emulation(order=order))
    emulation = Emulation(order=order, hooks=(FAULTS,), settings={"EMULATED_CUDA_FAULT": "NanOnce"})
    printed = modules.train(Training(layout=layout), faulty, emulation)
    assert "passing fault" in printed and "on rank 1" in printed
    differences = trainings.checkpoint_differences(faulty, straight, generators=True)
    assert {one.outcome for one in differences} == {"equal"}
    assert any(one.what == "generators" for one in differences)


@pytest.mark.campaign
@pytest.mark.parametrize("layout, order", [("dp2overlap", "late"), ("tp2sppp2", "late"), ("dp2overlap", "random")])
def test_a_killed_run_continues(on_the_cpu: Any, tmp_path: Path, layout: str, order: Order) -> None:
    """As a user starts it, with spawned ranks and checkpoints written in the background."""
    world_size = Training(layout=layout).write_recipe(tmp_path / "recipe.toml")
    flags = [str(tmp_path / "recipe.toml"), "--run_dir", str(tmp_path), "--device", "cuda", "--nproc", str(world_size)]
    killed = Emulation(order=order, hooks=(FAULTS,), settings={"EMULATED_CUDA_FAULT": "Killed"})
    first = run(["pretrain_gpt.py", *flags, "--checkpoint.save_interval", "1"], killed)
    assert first.returncode not in (0, 2, 75) and "SIGKILL" in first.stdout + first.stderr, first.stderr
    second = run(["pretrain_gpt.py", *flags], Emulation(order=order))
    assert second.returncode == 0, second.stderr
    assert "starting from initial weights" not in second.stdout
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug")) < LOSS_BOUND


@pytest.mark.campaign
def test_own_loss_and_optimizer_in_deterministic_mode(
    device: WarmDevice, on_the_cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of docs/callbacks.md. Each rank tries the optimizer on its device."""
    page = (trainings.ROOT / "docs/callbacks.md").read_text()
    (tmp_path / "of_the_page.py").write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)))
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = "--train.loss of_the_page:z_loss --optimizer.optimizer of_the_page:Lion --optimizer.lr 1e-3".split()
    emulation = Emulation(settings={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    debugging = ("--train.deterministic_mode", "True", "--train.detect_anomaly", "True")
    device.train(Training(layout="tp2dp2"), tmp_path, emulation, (*flags, *debugging))
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug", *flags)) < LOSS_BOUND
