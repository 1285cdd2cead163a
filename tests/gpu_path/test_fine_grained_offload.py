"""train.offload_modules on the emulated device, with Transformer Engine: losses and checkpoints are
those of the same run without it, whenever streams run, and every module named has sent something to the host."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.trainings import EXTENSION, Training, TrainingError, WarmDevice, assert_same, memory_of, warm_device

ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
EXPERTS = (*ATTENTION, "mlp_norm", "expert_fc1", "moe_act")
LATENT = ("attn_norm", *EXPERTS)
MODULES = {"debug": ATTENTION, "mixtral_tiny": EXPERTS, "deepseek_v3_tiny": LATENT, "pythia_tiny": ATTENTION,
           **dict.fromkeys(("olmo2_tiny", "qwen35_tiny"), ("core_attn",)),
           "llama4_tiny": ("qkv_linear", *EXPERTS[3:])}  # fmt: skip
BF16 = ("--precision.dtype", "bf16")
SMALL = ("--model.megatron", "min_offloaded_tensor_size=1")
SPLIT = ("--model.megatron", "min_offloaded_tensor_size=3000")
"""Elements: a microbatch's 4096 are offloaded, the part of one head or expert alone is not."""
EVALUATED = ("--train.eval_interval", "1", "--train.eval_iters", "3", "--train.generate_tokens", "40",
             "--train.sample_interval", "1", "--train.sample_prompts", "def")  # fmt: skip
"""More microbatches than an iteration trains, and passes outside of Megatron's schedules."""


HOOK = "tests.gpu_path.te.offload_v1"


def emulation(order: Order = "late", *hooks: str, **settings: str) -> Emulation:
    return Emulation(order=order, hooks=(HOOK, *hooks), settings=settings)


def offloading(modules: tuple[str, ...], *more: str) -> tuple[str, ...]:
    return ("--train.offload_modules", *modules, *(more or SMALL))


def offloaded(printed: str) -> dict[str, float]:
    """MiB of each module over all ranks, from megatron-core's own table; none where it offloads nothing."""
    found = re.search(r"^Rank +(\w[\w ]*?) +Total$[\s\S]*?^Total +([\d. ]+)$", printed, re.MULTILINE)
    return dict(zip(found[1].split(), map(float, found[2].split()), strict=False)) if found else {}


def kept_mib(printed: str) -> float:
    """Activations that were measured on the fullest rank's GPU."""
    found = re.search(r"measured .* activations ([\d.]+) MiB", printed)
    assert found, printed
    return float(found[1])


def assert_offloaded(printed: str, modules: tuple[str, ...]) -> None:
    found = offloaded(printed)
    assert set(found) == set(modules) and min(found.values()) > 0, (found, printed)


@pytest.fixture(scope="module")
def metered() -> Iterator[WarmDevice]:
    """Whose peak leaves out what emulated kernels compute with."""
    with warm_device(EXTENSION, "tests.gpu_path.kernel_peaks") as warm:
        yield warm


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape",
    [("", "debug"), ("pp2", "debug"), ("tp2sp", "debug"), ("", "mixtral_tiny"), ("", "deepseek_v3_tiny")],
)
def test_memory_is_as_predicted(metered: WarmDevice, tmp_path: Path, layout: str, shape: str) -> None:
    """The device's within 2 % where all stays there, and within 7 % where modules are offloaded: their blocks come back
    piece by piece. The host's within 7 %, whose pinned tensors are rounded up. Cross entropy is torch's: the emulated
    kernel's result is not as large as the real one's."""
    many: tuple[str, ...] = (
        "--model.seq_length", "64", "--train.micro_batch_size", "32", "--train.global_batch_size", "64",
        "--train.train_iters", "3", "--train.eval_interval", "None", "--kernels.off", "cross_entropy_loss_fusion",
    )  # fmt: skip
    if shape != "deepseek_v3_tiny":
        many = (*many, "--model.hidden_size", "256", "--model.ffn_hidden_size", "1024")
    found = []
    for name, flags in (("kept", ()), ("away", offloading(MODULES[shape]))):
        metered.train(Training(layout=layout, shape=shape), tmp_path / name, emulation("eager"), (*flags, *BF16, *many))
        found.append(memory_of(tmp_path / name))
    kinds = ("weights", "gradients", "optimizer", "activations")
    kept, away = ({side: sum(row[side][kind] for kind in kinds) for side in ("predicted", "measured")} for row in found)
    host = found[1]["predicted"]["host"], found[1]["measured"]["host"]
    mib = [each / 2**20 for each in (kept["predicted"], kept["measured"], away["predicted"], away["measured"], *host)]
    print(shape, layout, "predicted and measured: kept, away, host", [round(each, 1) for each in mib])
    assert host[1] == pytest.approx(host[0], rel=0.07)
    assert kept["measured"] == pytest.approx(kept["predicted"], rel=0.02)
    assert away["measured"] == pytest.approx(away["predicted"], rel=0.07)
    saved, predicted = kept["measured"] - away["measured"], kept["predicted"] - away["predicted"]
    assert saved > 0.5 * predicted > 0


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("pp2vpp2", "debug", "late"),
        *(pytest.param(*case, marks=pytest.mark.campaign)
          for case in [("", "debug", "late"), ("", "debug", "random"), ("tp2sp", "debug", "late"),
                       ("dp2overlap", "debug", "late"),
                       ("pp2", "debug", "late"), ("pp2", "debug", "random"), ("pp2vpp2", "debug", "random"),
                       ("tp2sppp2", "debug", "late"), ("dp2zero3", "debug", "late"),
                       ("", "mixtral_tiny", "late"), ("ep2", "mixtral_tiny", "late"),
                       ("pp2", "mixtral_tiny", "random"), ("", "deepseek_v3_tiny", "late"),
                       ("tp2sp", "deepseek_v3_tiny", "late"), ("pp2vpp2", "deepseek_v3_tiny", "late")]),
    ],
)  # fmt: skip
def test_it_trains_as_without(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    training, flags = Training(layout=layout, shape=shape), offloading(MODULES[shape])
    printed = te_device.train(training, tmp_path, emulation(order), flags)
    assert_offloaded(printed, MODULES[shape])
    assert_same(tmp_path, on_the_cpu(shape))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape, flags, both",
    [
        ("pp2", "debug", SMALL, EVALUATED),
        ("", "debug", SMALL, (*EVALUATED, *BF16, "--train.micro_batch_size", "2")),
        ("", "debug", SMALL, ("--train.recompute", "selective:core_attn,mlp")),
        ("", "mixtral_tiny", SMALL, ("--train.recompute", "selective:moe_act,layernorm")),
        ("pp2vpp2", "deepseek_v3_tiny", SMALL, ("--train.recompute", "selective:mla_up_proj,layernorm")),
        ("cp2", "debug", SMALL, BF16),
        ("cp2", "debug", ("--model.megatron", "min_offloaded_tensor_size=1500"),
         (*BF16, "--parallel.cp_comm_type", "all_gather")),
        ("cp2", "deepseek_v3_tiny", SMALL, BF16),
        ("tp4sp", "olmo2_tiny", SMALL, ()),
        ("tp2sp", "qwen35_tiny", SMALL, ()),
        ("", "llama4_tiny", SPLIT, ()),
        ("", "debug", SPLIT, ("--data.reset_attention_mask", "True", "--data.reset_position_ids", "True")),
        ("", "pythia_tiny", SMALL, ()),
        ("", "mixtral_tiny", SPLIT, ()),
        ("", "deepseek_v3_tiny", SPLIT, ()),
        ("", "debug", (*SMALL, "activation_offload_fraction=0.5"), ()),
        ("pp2", "debug", (*SMALL, "delta_offload_bytes_across_pp_ranks=100000"), ()),
        ("pp2vpp2", "debug", (*SMALL, "delta_offload_bytes_across_pp_ranks=100000"), ()),
    ],
)  # fmt: skip
def test_bit_for_bit(
    te_device: WarmDevice, tmp_path: Path, layout: str, shape: str, flags: tuple[str, ...], both: tuple[str, ...]
) -> None:
    """With evaluation and samples between the iterations, modules that are recomputed, norms of queries and keys,
    parallel residuals, parts of a tensor, and a part of the groups."""
    assert_equal(te_device, tmp_path, Training(layout=layout, shape=shape), emulation(), flags, both)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "recipe, layout, shape",
    [("delayed", "", "debug"), ("tensorwise", "tp2sp", "debug"), ("tensorwise", "pp2vpp2", "debug"),
     ("blockwise", "", "mixtral_tiny"), ("mxfp8", "", "mixtral_tiny")],
)  # fmt: skip
def test_fp8_bit_for_bit(te_device: WarmDevice, tmp_path: Path, recipe: str, layout: str, shape: str) -> None:
    """Copies of weights in 8 bits stay on the GPU: offloaded, they would come back changed."""
    flags = (*BF16, "--model.ffn_hidden_size", "192", "--precision.fp8_recipe", recipe, "--precision.fp8")
    both = (*flags, "e4m3" if recipe == "mxfp8" else "hybrid")
    card = Emulation(order="late", hooks=(HOOK,), capability=100 if recipe == "mxfp8" else 90)
    assert_equal(te_device, tmp_path, Training(layout=layout, shape=shape), card, SMALL, both)


def assert_equal(
    te_device: WarmDevice, folder: Path, training: Training, card: Emulation, flags: tuple[str, ...],
    both: tuple[str, ...],
) -> None:  # fmt: skip
    """Losses, weights, moments and random states with and without. flags: of offloading; both: of the two runs."""
    te_device.train(training, folder / "kept", card, both)
    te_device.train(training, folder / "offloaded", card, (*offloading(MODULES[training.shape], *flags), *both))
    assert trainings.loss_difference(folder / "offloaded", folder / "kept") == 0
    differences = trainings.checkpoint_differences(folder / "offloaded", folder / "kept", generators=True)
    assert {one.outcome for one in differences} == {"equal"}


@pytest.mark.campaign
def test_the_gpu_keeps_less(te_device: WarmDevice, tmp_path: Path) -> None:
    kept = kept_mib(te_device.train(Training(), tmp_path / "kept", emulation("eager")))
    half = kept_mib(
        te_device.train(
            Training(), tmp_path / "half", emulation("eager"),
            offloading(ATTENTION, *SMALL, "activation_offload_fraction=0.5"),
        )
    )  # fmt: skip
    whole = kept_mib(te_device.train(Training(), tmp_path / "whole", emulation("eager"), offloading(ATTENTION)))
    assert whole < half < kept, (whole, half, kept)


@pytest.mark.campaign
def test_microbatches_that_run_again(te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path) -> None:
    again = emulation("late", "tests.gpu_path.passing_fault")
    printed = te_device.train(Training(), tmp_path, again, offloading(ATTENTION))
    assert "a passing fault of the hardware" in printed
    assert_same(tmp_path, on_the_cpu("debug"))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape, mutant, failure",
    [
        ("", "debug", "offloaded_copies_not_ordered", ""),
        ("pp2vpp2", "debug", "offloaded_chunk_ends_early", "Chunk mismatch"),
        ("tp2sp", "qwen35_tiny", "offloaded_memory_freed", "SIGSEGV"),
    ],
)
def test_what_is_mended_is_seen_without(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, mutant: str, failure: str
) -> None:
    """megatron-core 0.19.2 as it is: the run fails, or trains something else."""
    broken = emulation("late", "tests.gpu_path.mutants", EMULATED_CUDA_MUTANT=mutant)
    with pytest.raises(TrainingError if failure else AssertionError) as found:
        te_device.train(Training(layout=layout, shape=shape), tmp_path, broken, offloading(MODULES[shape]))
        assert_same(tmp_path, on_the_cpu(shape))
    assert failure in str(found.value)


def test_it_says_which_variable_it_needs(te_device: WarmDevice, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs NVTE_CPU_OFFLOAD_V1=1 in the environment"):
        te_device.train(Training(), tmp_path, Emulation(), offloading(ATTENTION))


def test_without_transformer_engine_it_says_what_it_needs(device: WarmDevice, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="offload_modules needs a GPU and Transformer Engine"):
        device.train(Training(), tmp_path, Emulation(), offloading(ATTENTION))
