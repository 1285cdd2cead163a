"""Fused kernels on the emulated device: each trains as without it, and has really been called.

Losses and weights in fp32 to 1e-5 and 1e-4, in bf16 losses to 1e-3, as in test_transformer_engine.py.
"""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.kernels import FUSIONS
from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.trainings import Training, TrainingError, WarmDevice

LOSS_BOUND, WEIGHTS_BOUND, BF16_BOUND = 1e-5, 1e-4, 1e-3
FP32, BF16 = ("--precision.dtype", "fp32"), ("--precision.dtype", "bf16")
GEGLU = (*FP32, "--model.activation", "geglu")
TIED, DENSE, EXPERTS, LATENT = "gpt2_tiny", "debug", "mixtral_tiny", "deepseek_v3_tiny"
GROUPED = "deepseek_v2_tiny"
"""Softmax over groups of experts, which Triplane chooses itself: its balancing loss is fused."""

COMPARED = [
    ("bias_activation_fusion", "tp2sp", DENSE, FP32),
    ("bias_activation_fusion", "", TIED, FP32),
    ("bias_activation_fusion", "ep2", EXPERTS, FP32),
    ("bias_activation_fusion", "tp2sp", DENSE, BF16),
    ("bias_activation_fusion", "tp2sp", DENSE, GEGLU),
    ("apply_rope_fusion", "tp2sp", DENSE, FP32),
    ("apply_rope_fusion", "cp2", DENSE, BF16),
    ("apply_rope_fusion", "tp2sp", LATENT, FP32),
    ("cross_entropy_loss_fusion", "tp2sp", DENSE, BF16),
    ("cross_entropy_loss_fusion", "pp2dp2overlap", TIED, BF16),
    ("cross_entropy_loss_fusion", "", LATENT, BF16),
    ("gradient_accumulation_fusion", "tp2sp", DENSE, FP32),
    ("gradient_accumulation_fusion", "pp2dp2overlap", TIED, FP32),
    ("gradient_accumulation_fusion", "", TIED, FP32),
    ("gradient_accumulation_fusion", "ep2", EXPERTS, FP32),
    ("gradient_accumulation_fusion", "pp2", LATENT, FP32),
    ("gradient_accumulation_fusion", "tp2sp", DENSE, BF16),
    ("moe_grouped_gemm", "ep2", EXPERTS, FP32),
    ("moe_grouped_gemm", "ep2", LATENT, BF16),
    ("moe_permute_fusion", "ep2", EXPERTS, FP32),
    ("moe_permute_fusion", "tp2spep2dp2", EXPERTS, FP32),
    ("moe_permute_fusion", "ep2", LATENT, BF16),
    ("moe_router_fusion", "ep2", EXPERTS, FP32),
    ("moe_router_fusion", "ep2", LATENT, FP32),
    ("moe_router_fusion", "ep2", GROUPED, FP32),
    ("moe_shared_expert_overlap", "ep2", LATENT, FP32),
    ("moe_shared_expert_overlap", "tp2spep2dp2", LATENT, FP32),
    ("moe_shared_expert_overlap", "ep2", LATENT, BF16),
]
"""(field, layout, shape, number format): on against off."""


@pytest.fixture(scope="module")
def unfused(te_device: WarmDevice, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of a training with every fusion off; trained once."""

    @cache
    def trained(layout: str, shape: str, flags: tuple[str, ...]) -> Path:
        run_dir = tmp_path_factory.mktemp("off")
        assert not train(te_device, run_dir, layout, shape, (*flags, *off()))
        return run_dir

    return trained


def off(*but: str) -> tuple[str, ...]:
    return ("--kernels.off", *(name for name in FUSIONS if name not in but))


def train(
    te_device: WarmDevice, run_dir: Path, layout: str, shape: str, flags: tuple[str, ...], order: Order = "eager"
) -> set[str]:
    """The fusions whose kernels were called, on any rank."""
    emulation = Emulation(
        order=order, hooks=("tests.gpu_path.fusion_calls",), settings={"FUSION_CALLS": str(run_dir)}
    )  # fmt: skip
    printed = te_device.train(Training(layout=layout, shape=shape), run_dir, emulation, flags)
    calls: Counter[str] = Counter()
    for file in run_dir.glob("calls-*.json"):
        calls.update(json.loads(file.read_text()))
    on: set[str] = {name for name in FUSIONS if calls[name]}
    assert bool(calls["accumulating products"]) == ("gradient_accumulation_fusion" in on)
    line = f"fused kernels: {', '.join(fusion.title for name, fusion in FUSIONS.items() if name in on)}"
    assert (line in printed.splitlines()) if on else "fused kernels" not in printed, printed
    return on


def compare(run_dir: Path, reference: Path, flags: tuple[str, ...]) -> None:
    if flags == BF16:
        assert trainings.loss_difference(run_dir, reference) < BF16_BOUND
        return
    assert trainings.loss_difference(run_dir, reference) < LOSS_BOUND
    worst = max(trainings.checkpoint_differences(run_dir, reference), key=lambda one: one.relative or 0)
    assert (worst.relative or 0) < WEIGHTS_BOUND, worst


@pytest.mark.parametrize(
    "layout, shape, flags, expected",
    [
        ("ep2", LATENT, FP32, set(FUSIONS) - {"cross_entropy_loss_fusion"}),
        ("dp2overlap", DENSE, BF16,
         {"bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion"}),
    ],
)  # fmt: skip
def test_what_is_on_by_default_trains_as_our_modules_do(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, flags: tuple[str, ...],
    expected: set[str],
) -> None:  # fmt: skip
    assert train(te_device, tmp_path, layout, shape, flags, order="late") == expected
    compare(tmp_path, on_the_cpu(shape, *flags), flags)
    chosen = "fused (cuDNN)" if flags == BF16 else "unfused"
    assert f"attention backend: {chosen}\n" in (tmp_path / "output.txt").read_text()


@pytest.mark.campaign
@pytest.mark.parametrize("field, layout, shape, flags", COMPARED)
def test_each_alone_trains_as_without_it(
    te_device: WarmDevice, unfused: Any, tmp_path: Path, field: str, layout: str, shape: str, flags: tuple[str, ...]
) -> None:
    assert train(te_device, tmp_path, layout, shape, (*flags, *off(field))) == {field}
    compare(tmp_path, unfused(layout, shape, flags), flags)


@pytest.mark.campaign
def test_the_attention_that_is_asked_for_is_chosen(te_device: WarmDevice, unfused: Any, tmp_path: Path) -> None:
    train(te_device, tmp_path, "", DENSE, (*BF16, *off(), "--kernels.attention_backend", "unfused"))
    assert "attention backend: unfused\n" in (tmp_path / "output.txt").read_text()
    compare(tmp_path, unfused("", DENSE, BF16), BF16)


def test_every_fusion_has_been_compared() -> None:
    """What auto turns on."""
    assert {field for field, *_ in COMPARED} == set(FUSIONS)


def test_where_transformer_engine_is_missing_only_its_own_are_off(device: WarmDevice, tmp_path: Path) -> None:
    printed = device.train(Training(), tmp_path, Emulation(), ("--train.train_iters", "1"))
    assert "fused kernels: activation" in printed.splitlines()


@pytest.mark.campaign
def test_triton_kernels_compute_what_stands_for_them(te_device: WarmDevice) -> None:
    """In Triton's interpreter, which is too slow for a training."""
    found = te_device.check("triton_kernels")
    assert found.returncode == 0 and "equal" in found.stdout, found.stderr[-3000:]


MULTICAST = "kernels.tp_comm_overlap cannot run: card or driver has no multicast. Set UB_SKIPMC=1 to use CUDA IPC"


@pytest.mark.campaign
def test_userbuffers_are_made_before_the_model_and_forgotten_after_it(te_device: WarmDevice) -> None:
    """With fp8 one set for its layers, with bytes for what is gathered, and one for layers in bf16."""
    found = te_device.check("userbuffers", ranks=2)
    assert found.returncode == 0, found.stderr
    assert [line for line in found.stdout.splitlines() if "[UB]" not in line] == [
        f"{MULTICAST}, or leave it out.",
        "12 of [128, 64] torch.bfloat16 TP 2",
        "fc1 fc2 proj qkv",
        "16 of [128, 64] torch.bfloat16 TP 2",
        "8 of [128, 64] torch.uint8 TP 2",
        "fc1 fc2 proj qkv",
    ]


def test_a_training_asks_for_userbuffers(te_device: WarmDevice, tmp_path: Path) -> None:
    """Which the emulated card has not."""
    with pytest.raises(TrainingError, match=MULTICAST):
        te_device.train(Training(layout="tp2sp"), tmp_path, Emulation(), (*BF16, "--kernels.tp_comm_overlap", "True"))


@pytest.mark.campaign
def test_a_cross_entropy_that_is_wrong_is_not_used(te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path) -> None:
    emulation = Emulation(order="eager", hooks=("tests.gpu_path.te.wrong_losses",))
    printed = te_device.train(Training(layout="tp2sp"), tmp_path, emulation, BF16)
    assert "cross entropy is not fused: the kernel's losses are off by" in printed
    compare(tmp_path, on_the_cpu("debug", *BF16), BF16)
