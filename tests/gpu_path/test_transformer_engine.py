"""Trainings with Transformer Engine: its own Python on the emulated device, its kernels in plain torch (te/).

Compared with our modules on one CPU rank: fp32 to 1e-5, 16 bits, fp8 and fp4 to bounds of a few times what was seen.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from campaign import param
from models.families import TINY
from tests.gpu_path import trainings
from tests.gpu_path.emulator import ROOT, Emulation, Order, run
from tests.gpu_path.trainings import EXTENSION, Training, TrainingError, WarmDevice, assert_same
from training.metrics.jsonl import read_jsonl

BF16_BOUND = 1e-3
FP8_BOUND = 6e-3
ROUNDED = 5e-5
"""Losses in 8 bits, or 4, are at least that far from those in bf16 on the same device, which would be 0 if nothing was
rounded."""
SHADOW_BOUND = 0.1
FP4_SHADOW_BOUND = 0.3
BF16 = ("--precision.dtype", "bf16")
WIDE = ("--model.ffn_hidden_size", "192")
"""fp8 wants multiples of 16 on each tensor rank, mxfp8 of 32."""
WIDE_LATENT = (*WIDE, "--model.qk_pos_emb_head_dim", "32")
"""Of deepseek_v3_tiny, whose latent projections have 40 rows otherwise."""
RECOMPUTED = ("--train.recompute", "full:uniform:1")
SHORT = ("--train.train_iters", "2")
HOPPER, BLACKWELL = 90, 100
BLACKWELLS = ("mxfp8", "nvfp4")
"""Recipes that need one; they multiply multiples of 32."""


STEADY = ("--optimizer.adam_eps", "1e-5")
"""Adam's first updates have the sizes of lr, however small a gradient is: with 1e-8, rounding errors of 1e-7 move the
logits of routers by up to 7e-5 within two iterations of llama4_tiny, whose nearest two experts are 1e-6 apart. With
1e-5 they move by 9e-7, and the nearest are 3e-5 apart."""


def selective(*modules: str) -> tuple[str, ...]:
    return ("--train.recompute", f"selective:{','.join(modules)}")


def fp8(recipe: str) -> tuple[str, ...]:
    """Or fp4."""
    if recipe == "nvfp4":
        return ("--precision.fp4", "e2m1", "--precision.fp4_recipe", recipe)
    return ("--precision.fp8", "e4m3" if recipe == "mxfp8" else "hybrid", "--precision.fp8_recipe", recipe)


def train_and_compare(
    te_device: WarmDevice,
    on_the_cpu: Any,
    run_dir: Path,
    layout: str,
    shape: str,
    order: Order,
    *flags: str,
    both: tuple[str, ...] = (),
) -> None:
    """Weights and moments by their places in the whole model, too: what each rank's shard is. flags: of this run;
    both: of the CPU's, too."""
    printed = te_device.train(Training(layout=layout, shape=shape), run_dir, Emulation(order=order), (*flags, *both))
    assert "Transformer Engine" not in printed, printed  # it is there, or Megatron would have said
    found = re.search(r"activations ([\d.]+) MiB\), and ([\d.]+) ([MG])iB of libraries", printed)
    assert found and float(found[1]) < 16 and (found[3] == "G" or float(found[2]) >= 32), printed  # cuBLAS has 32
    assert_same(run_dir, on_the_cpu(shape, *both))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("tp2spdp2zero3", "debug", "late"), ("dp2overlap", "debug", "late"), ("tp2sp", "debug", "late"),
        ("pp2vpp2", "debug", "eager"), ("ep2", "mixtral_tiny", "late"), ("tp2sp", "deepseek_v3_tiny", "eager"),
        ("dp4ep2zero3", "mixtral_tiny", "late"), ("dp2zero3", "deepseek_v3_tiny", "random"),
    ],
)  # fmt: skip
def test_it_trains_as_our_modules_do(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    train_and_compare(te_device, on_the_cpu, tmp_path, layout, shape, order)


def families() -> Iterator[Any]:
    """Shape, layout and moe_grouped_gemm: each family on one rank and on two; with experts, both ways."""
    for shape, model in TINY.items():
        split = "tp2spetp1" if model.num_moe_experts and model.fc_bias else "tp2sp"  # biases of experts split: refused
        for layout in ("", split):
            for grouped in ("on", "off") if model.num_moe_experts else ("auto",):
                yield pytest.param(shape, layout, grouped, id="-".join([shape, layout or "one", grouped]))


@pytest.mark.campaign
@pytest.mark.parametrize("shape, layout, grouped", families())
def test_every_family_trains_and_is_sharded_as_our_modules_are(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, shape: str, layout: str, grouped: str
) -> None:
    """By weights too: a token that a rounding error sends to another expert is 2 % of that expert's moments."""
    flags = ("--kernels.off", "moe_grouped_gemm") if grouped == "off" else ()
    train_and_compare(te_device, on_the_cpu, tmp_path, layout, shape, "random", *flags, both=STEADY)


@pytest.mark.campaign
@pytest.mark.parametrize("order", ["random", "late"])
@pytest.mark.parametrize("layout", ["dp2overlap", "pp2", "pp2vpp2", "tp2sppp2", "pp2dp2overlap"])
def test_layouts_train_whenever_streams_run(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, order: Order
) -> None:
    train_and_compare(te_device, on_the_cpu, tmp_path, layout, "debug", order)


PIECES = ("--train.cross_entropy_chunk_tokens", "24")


@pytest.mark.parametrize(
    "layout, shape",
    [
        ("tp2spdp2zero3", "debug"),
        *(pytest.param(*case, marks=pytest.mark.campaign)
          for case in [("tp2sp", "debug"), ("pp2", "gpt2_tiny"), ("tp2sp", "deepseek_v3_tiny"), ("dp2zero3", "debug")]),
    ],
)  # fmt: skip
def test_losses_in_pieces_are_those_of_all_tokens(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str
) -> None:
    """Each piece's product adds its weight's gradient to the main one."""
    train_and_compare(te_device, on_the_cpu, tmp_path, layout, shape, "late", *PIECES)


@pytest.mark.campaign
@pytest.mark.parametrize("layout, shape", [("tp2sp", "debug"), ("pp2", "gpt2_tiny"), ("dp2zero3", "debug")])
def test_losses_in_pieces_with_the_fused_cross_entropy(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str
) -> None:
    te_device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order="late"), (*BF16, *PIECES))
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape, *BF16)) < BF16_BOUND


@pytest.mark.parametrize(
    "layout, shape",
    [("tp2spdp2", "debug"), param(("dp2zero3", "debug")), param(("tp2sp", "deepseek_v3_tiny")), param(("", "debug"))],
)
def test_qk_clip_scales_by_the_logits_that_its_attention_returns(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str
) -> None:
    clip = ("--optimizer.qk_clip", "--optimizer.qk_clip_threshold", "0.02", *SHORT)
    train_and_compare(te_device, on_the_cpu, tmp_path, layout, shape, "late", both=clip)
    largest = [line["max_attention_logit"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert len(largest) == 2
    assert min(largest) > 0.02


@pytest.mark.parametrize(
    "exchange",
    ["p2p", pytest.param("a2a", marks=pytest.mark.campaign), pytest.param("all_gather", marks=pytest.mark.campaign)],
)
@pytest.mark.campaign
def test_its_attention_runs_over_context_ranks(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, exchange: str
) -> None:
    flags = ("--parallel.cp_comm_type", exchange)
    te_device.train(Training(layout="cp2"), tmp_path, Emulation(order="late"), (*BF16, *SHORT, *flags))
    assert trainings.loss_difference(tmp_path, on_the_cpu("debug", *BF16, *SHORT)) < BF16_BOUND


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape",
    [("tp2sp", "debug"), ("ep2", "mixtral_tiny"), ("tp2sp", "deepseek_v3_tiny"), ("dp2zero3", "debug"),
     ("dp2zero2", "debug")],
)  # fmt: skip
def test_16_bits_train_as_our_modules_do(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str
) -> None:
    te_device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order="late"), BF16)
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape, *BF16)) < BF16_BOUND


@pytest.fixture(scope="module")
def plain(te_device: WarmDevice, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of a layout and model with these flags on the device; trained once."""

    @cache
    def trained(layout: str, shape: str, flags: tuple[str, ...]) -> Path:
        run_dir = tmp_path_factory.mktemp("plain")
        te_device.train(Training(layout=layout, shape=shape), run_dir, Emulation(), flags)
        return run_dir

    return trained


@pytest.mark.parametrize(
    "recipe, layout, shape",
    [
        pytest.param("tensorwise", "", "debug", marks=pytest.mark.campaign),
        *(pytest.param(recipe, "", "debug", marks=pytest.mark.campaign)
          for recipe in ("nvfp4", "delayed", "blockwise", "mxfp8")),
        *(pytest.param(recipe, layout, shape, marks=pytest.mark.campaign)
          for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
          for layout, shape in [("tp2sp", "debug"), ("dp2overlap", "debug"), ("ep2", "mixtral_tiny"),
                                ("", "deepseek_v3_tiny")]),
        pytest.param("nvfp4", "tp2sp", "debug", marks=pytest.mark.campaign),
        pytest.param("nvfp4", "ep2", "mixtral_tiny", marks=pytest.mark.campaign),
        *(pytest.param(recipe, "dp2zero3", "debug", marks=pytest.mark.campaign)
          for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")),
    ],
)  # fmt: skip
def test_fp8_trains_near_16_bits(
    te_device: WarmDevice, on_the_cpu: Any, plain: Any, tmp_path: Path, recipe: str, layout: str, shape: str
) -> None:
    """And not as they do on the same device, with the same kernels: else nothing was rounded to 8 bits, or to 4."""
    wide = (*BF16, *SHORT, *(WIDE_LATENT if shape == "deepseek_v3_tiny" else WIDE))
    capability = BLACKWELL if recipe in BLACKWELLS else HOPPER
    order: Order = "random" if layout and recipe != "nvfp4" else "eager"
    emulation = Emulation(order=order, capability=capability)
    te_device.train(Training(layout=layout, shape=shape), tmp_path, emulation, (*wide, *fp8(recipe)))
    assert trainings.loss_difference(tmp_path, on_the_cpu(shape, *wide)) < FP8_BOUND
    assert trainings.loss_difference(tmp_path, plain(layout, shape, wide)) > ROUNDED


@pytest.mark.parametrize(
    "layout, shape, recipe, capability",
    [
        ("", "debug", ("tensorwise", "hybrid"), HOPPER),
        pytest.param("pp2vpp2", "debug", ("blockwise", "hybrid"), HOPPER, marks=pytest.mark.campaign),
        pytest.param("tp2sppp2", "debug", ("mxfp8", "e4m3"), BLACKWELL, marks=pytest.mark.campaign),
        pytest.param("", "deepseek_v3_tiny", ("tensorwise", "e4m3"), HOPPER, marks=pytest.mark.campaign),
        pytest.param("", "deepseek_v3_tiny", ("nvfp4", "e2m1"), BLACKWELL, marks=pytest.mark.campaign),
    ],
)
def test_the_first_and_last_layers_stay_in_bf16(
    te_device: WarmDevice, tmp_path: Path, layout: str, shape: str, recipe: tuple[str, str], capability: int
) -> None:
    """Seen by whose forward pass quantizes: two of mcore's sublayers are a layer; MTP's, from 1, stay in fp8, and under
    fp4 in bf16."""
    start, quantizing = (2, {*range(5, 15)}) if shape == "debug" else (1, {3, 4, 5, 6})
    name = "fp4" if recipe[0] == "nvfp4" else "fp8"
    flags: tuple[str, ...] = (*fp8(recipe[0]), f"--precision.{name}", recipe[1])
    flags += ("--precision.first_last_layers_bf16", "True", "--precision.num_layers_at_start_in_bf16", str(start))
    flags += (*WIDE, "--model.num_layers", "8") if shape == "debug" else WIDE_LATENT
    flags += ("--train.train_iters", "1", "--train.global_batch_size", "2")
    emulation = Emulation(capability=capability, hooks=("tests.gpu_path.te.fp8_layers",))
    printed = te_device.train(Training(layout=layout, shape=shape), tmp_path, emulation, (*BF16, *flags))
    assert {int(found) for found in re.findall(r"fp8 in sublayer (\d+)$", printed, re.M)} == quantizing
    mtp = {int(found) for found in re.findall(r"fp8 in sublayer (\d+) of MTP", printed)}
    assert mtp == ({1, 2} if shape == "deepseek_v3_tiny" and name == "fp8" else set())
    assert ("in bf16 in depths of multi-token prediction" in printed) == (name == "fp4")
    kept = f"but in bf16 in the first {start} and last 1 layers"
    assert f"products in {name} {recipe[1]} ({recipe[0]}), {kept}" in printed


@pytest.mark.parametrize(
    "capability, format, recipe",
    [param((HOPPER, "e4m3", "tensorwise")), param((BLACKWELL, "hybrid", "tensorwise")), (BLACKWELL, "e4m3", "mxfp8")],
)
def test_the_recipe_is_the_cards(
    te_device: WarmDevice, tmp_path: Path, capability: int, format: str, recipe: str
) -> None:
    """Without fp8_recipe; a run's config.toml names what it was."""
    flags = (*BF16, *WIDE, "--precision.fp8", format, "--train.train_iters", "1", "--train.global_batch_size", "1")
    printed = te_device.train(Training(), tmp_path, Emulation(capability=capability), flags)
    assert f"products in fp8 {format} ({recipe})" in printed
    assert f'fp8_recipe = "{recipe}"' in (tmp_path / "config.toml").read_text()


def test_the_cards_recipe_has_its_sizes(te_device: WarmDevice, tmp_path: Path) -> None:
    """The debug model's 176 is a multiple of 16 only."""
    with pytest.raises(TrainingError, match=r"precision.fp8 with fp8_recipe mxfp8 multiplies multiples of 32 only"):
        te_device.train(Training(), tmp_path, Emulation(capability=BLACKWELL), (*BF16, "--precision.fp8", "e4m3"))


DELAYED = (
    *BF16, *fp8("delayed"), "--model.megatron", "fp8_amax_history_len=3", "fp8_amax_compute_algo=max",
    "--train.eval_interval", "1", "--train.eval_iters", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    "layout, then, shape, bound",
    [
        ("", "", "debug", 0.0),
        pytest.param("dp2zero3", "dp2zero3", "debug", 0.0, marks=pytest.mark.campaign),
        pytest.param("tp2sp", "tp2sp", "debug", 0.0, marks=pytest.mark.campaign),
        pytest.param("pp2vpp2", "pp2vpp2", "debug", 0.0, marks=pytest.mark.campaign),
        pytest.param("ep2", "ep2", "mixtral_tiny", 0.0, marks=pytest.mark.campaign),
        pytest.param("", "", "deepseek_v3_tiny", 0.0, marks=pytest.mark.campaign),
        pytest.param("tp2sp", "pp2", "debug", BF16_BOUND, marks=pytest.mark.campaign),
    ],
)
def test_a_run_in_fp8_continues_with_its_scales(
    te_device: WarmDevice, plain: Any, half: tuple[str, ...], tmp_path: Path, layout: str, then: str, shape: str,
    bound: float,
) -> None:  # fmt: skip
    """In the same layout bit for bit: with the recipe delayed, too, whose scales come from earlier steps."""
    flags = (*(WIDE_LATENT if shape == "deepseek_v3_tiny" else WIDE), *DELAYED)
    if layout == "dp2zero3":
        flags += ("--optimizer.optimizer_cpu_offload", "true")
    te_device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(), (*flags, *half))
    printed = te_device.train(Training(layout=then, shape=shape), tmp_path, Emulation(), flags)
    assert "fp8's scales start fresh" not in printed
    assert trainings.loss_difference(tmp_path, plain(layout, shape, flags)) <= bound


@pytest.mark.campaign
def test_a_run_in_fp4_continues_with_its_random_numbers(te_device: WarmDevice, tmp_path: Path) -> None:
    """By which it rounds gradients: bit for bit, and where layers are recomputed, too."""
    blackwell, flags = Emulation(capability=BLACKWELL), (*BF16, *WIDE, *fp8("nvfp4"))
    te_device.train(Training(), tmp_path / "whole", blackwell, flags)
    te_device.train(Training(), tmp_path / "broken", blackwell, (*flags, "--train.exit_interval", "2"))
    te_device.train(Training(), tmp_path / "broken", blackwell, (*flags, *RECOMPUTED))
    differences = trainings.checkpoint_differences(tmp_path / "broken", tmp_path / "whole", generators=True)
    assert {one.outcome for one in differences} == {"equal"}


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["dp2overlap", "pp2vpp2"])
def test_evaluations_do_not_move_the_scales(te_device: WarmDevice, tmp_path: Path, layout: str) -> None:
    """Of the recipe "delayed", which come from the values of earlier passes."""
    for name, flags in (("plain", ()), ("evaluated", ("--train.eval_interval", "1", "--train.eval_iters", "2"))):
        te_device.train(Training(layout=layout), tmp_path / name, Emulation(), (*BF16, *WIDE, *fp8("delayed"), *flags))
    differences = trainings.checkpoint_differences(tmp_path / "evaluated", tmp_path / "plain")
    assert {one.outcome for one in differences} == {"equal"}


@pytest.mark.campaign
def test_a_run_that_was_not_in_fp8_says_that_its_scales_start_fresh(te_device: WarmDevice, tmp_path: Path) -> None:
    flags = (*BF16, *WIDE)
    te_device.train(Training(), tmp_path, Emulation(), (*flags, "--train.exit_interval", "2"))
    assert "fp8's scales start fresh" in te_device.train(Training(), tmp_path, Emulation(), (*flags, *fp8("delayed")))


@pytest.mark.campaign
def test_microbatches_that_run_again_have_the_scales_they_had(
    te_device: WarmDevice, plain: Any, tmp_path: Path
) -> None:
    again, flags = Emulation(hooks=("tests.gpu_path.passing_fault",)), (*WIDE, *DELAYED)
    assert "a passing fault of the hardware" in te_device.train(Training(), tmp_path, again, flags)
    assert trainings.loss_difference(tmp_path, plain("", "debug", flags)) == 0


SHADOW = ("--precision.fp8_shadow", "warn:1", "--log.log_interval", "1")


@pytest.mark.parametrize(
    "recipe, layout, shape, more",
    [
        ("delayed", "dp2overlap", "debug", ("--model.hidden_dropout", "0.1")),
        pytest.param("tensorwise", "tp2sp", "debug", (), marks=pytest.mark.campaign),
        pytest.param("delayed", "pp2", "debug", (), marks=pytest.mark.campaign),
        pytest.param("delayed", "pp2vpp2", "debug", ("--parallel.overlap_grad_reduce", "True"),
                     marks=pytest.mark.campaign),
        pytest.param("tensorwise", "ep2", "mixtral_tiny", (), marks=pytest.mark.campaign),
        pytest.param("delayed", "", "deepseek_v3_tiny", (), marks=pytest.mark.campaign),
        pytest.param("delayed", "", "debug", RECOMPUTED, marks=pytest.mark.campaign),
        pytest.param("mxfp8", "cp2", "debug", (), marks=pytest.mark.campaign),
        pytest.param("nvfp4", "", "debug", (), marks=pytest.mark.campaign),
    ],
)  # fmt: skip
@pytest.mark.campaign
def test_a_shadow_window_compares_and_changes_nothing(
    te_device: WarmDevice, tmp_path: Path, recipe: str, layout: str, shape: str, more: tuple[str, ...]
) -> None:
    """fp8, or fp4, differs from bf16, and not much; what is trained is bit for bit what it is without a window."""
    flags = (*BF16, *SHORT, *(WIDE_LATENT if shape == "deepseek_v3_tiny" else WIDE), *fp8(recipe), *more)
    order: Order = "eager" if recipe == "nvfp4" else "late"  # its small kernels would be a minute's in late order
    emulation = Emulation(order=order, capability=BLACKWELL if recipe in BLACKWELLS else HOPPER)
    for name, window in (("plain", ()), ("shadow", SHADOW)):
        te_device.train(Training(layout=layout, shape=shape), tmp_path / name, emulation, (*flags, *window))
    differences = trainings.checkpoint_differences(tmp_path / "shadow", tmp_path / "plain", generators=True)
    assert {one.outcome for one in differences} == {"equal"}
    lines = [line for line in read_jsonl(tmp_path / "shadow" / "metrics.jsonl") if "loss" in line]
    assert all(0 < line["fp8/shadow_loss_difference"] < FP8_BOUND for line in lines)
    bound = FP4_SHADOW_BOUND if recipe == "nvfp4" else SHADOW_BOUND
    assert all(0 < line["fp8/shadow_grad_norm_difference"] < bound for line in lines)


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_a_shadow_window_finds_a_scale_that_saturates(te_device: WarmDevice, tmp_path: Path, recipe: str) -> None:
    """Of one layer, by its name; the loss differs by 0.02 % only."""
    flags = (*BF16, *SHORT, *WIDE, *fp8(recipe), *SHADOW)
    capability = BLACKWELL if recipe in BLACKWELLS else HOPPER
    emulation = Emulation(hooks=("tests.gpu_path.te.wrong_scale",), capability=capability)
    printed = te_device.train(Training(), tmp_path / "on", emulation, flags)
    found = re.findall(r"warning: iteration \d: fp\d against bf16, .* in (\S+), more than", printed)
    assert found and set(found) == {"layers.1.mlp"}, printed


def test_a_shadow_window_stops_at_a_scale_that_saturates(te_device: WarmDevice, tmp_path: Path) -> None:
    flags = (*BF16, *SHORT, *WIDE, *fp8("tensorwise"), *SHADOW, "--precision.fp8_shadow", "stop:1")
    emulation = Emulation(hooks=("tests.gpu_path.te.wrong_scale",))
    with pytest.raises(TrainingError, match=r"in layers\.1\.mlp, more than .* Stopped \(precision.fp8_shadow\)"):
        te_device.train(Training(), tmp_path, emulation, flags)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "recipe, shape, recomputed",
    [
        ("delayed", "debug", RECOMPUTED),
        ("tensorwise", "debug", RECOMPUTED),
        ("mxfp8", "debug", RECOMPUTED),
        ("tensorwise", "debug", selective("core_attn", "mlp", "layernorm")),
        ("blockwise", "mixtral_tiny", selective("moe_act", "layernorm")),
        ("tensorwise", "deepseek_v3_tiny", selective("moe", "mla_up_proj")),
        ("delayed", "debug", ("--train.recompute", "auto:1530.978MiB")),  # attention of 3 blocks, MLPs of 2
        ("tensorwise", "mixtral_tiny", ("--train.recompute", "auto:1531.915MiB")),
    ],
)
def test_fp8_layers_are_recomputed_with_the_scales_that_they_had(
    te_device: WarmDevice, tmp_path: Path, recipe: str, shape: str, recomputed: tuple[str, ...]
) -> None:
    wide = WIDE_LATENT if shape == "deepseek_v3_tiny" else WIDE
    for run_dir, flags in ((tmp_path / "kept", ()), (tmp_path / "recomputed", recomputed)):
        emulation = Emulation(capability=BLACKWELL if recipe in BLACKWELLS else HOPPER)
        printed = te_device.train(Training(shape=shape), run_dir, emulation, (*BF16, *wide, *fp8(recipe), *flags))
    assert ("stage 0: attention of" in printed) == recomputed[1].startswith("auto:"), printed
    assert trainings.loss_difference(tmp_path / "kept", tmp_path / "recomputed") == 0


@pytest.mark.campaign
def test_its_modules_compute_what_ours_do() -> None:
    """tests/gpu's own comparison, of every small family: names, logits and gradients."""
    found = run(
        ["-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu/test_gpu.py", "-k", "transformer_engine"],
        Emulation(hooks=(EXTENSION,)),
    )
    assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout[-3000:]


@pytest.mark.parametrize("field, recipe", [("fp8_recipe", "mxfp8"), param(("fp4_recipe", "nvfp4"))])
def test_a_card_that_cannot_do_a_recipe_says_so(te_device: WarmDevice, tmp_path: Path, field: str, recipe: str) -> None:
    with pytest.raises(TrainingError) as failed:
        te_device.train(Training(), tmp_path, Emulation(), (*BF16, *WIDE, *fp8(recipe)))
    card = "emulated device (no GPU) (compute capability 9.0)"
    assert f'precision.{field} = "{recipe}" cannot run on {card}: Device compute capability 10.0' in str(failed.value)


@pytest.mark.campaign
def test_fp8_without_it_is_refused(device: WarmDevice, tmp_path: Path) -> None:
    """Megatron would train in bf16 and say nothing."""
    with pytest.raises(
        TrainingError, match=r'precision.fp8 = "hybrid" needs Transformer Engine, which is not installed'
    ):
        device.train(Training(), tmp_path, Emulation(), (*BF16, *fp8("tensorwise")))


@pytest.mark.parametrize("kind", [pytest.param("cpu", marks=pytest.mark.campaign), "cuda"])
@pytest.mark.campaign
def test_half_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Without its extension, as .te is. A CPU needs none of it; on a GPU, one message, where mcore has a traceback."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".te"))
    recipe = tmp_path / "recipe.toml"
    Training().write_recipe(recipe)
    flags = ["--run_dir", str(tmp_path / "run"), "--device", kind, "--train.train_iters", "1"]
    found = run(["pretrain_gpt.py", str(recipe), *flags], devices=1 if kind == "cuda" else 0)
    assert found.returncode == (0 if kind == "cpu" else 2), found.stderr
    if kind == "cuda":
        assert (
            "Transformer Engine is installed, but cannot be imported: FileNotFoundError: Could not find" in found.stderr
        )
