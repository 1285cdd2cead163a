"""What is known of how published runs ran, beyond their tables."""

import csv

import pytest

from models.costs.flops import flops_per_token
from models.costs.sizes import sizes
from tests.planner.benchmarked import BENCHMARKED
from tests.planner.models import shape_of
from tests.planner.programs import PublishedProgram, on_card, program, when
from tests.planner.recipes import RECIPES, recipe, release
from tests.planner.rows import PUBLISHED, PublishedRun, read
from tools.plan.cost.hardware import card_age


def summary(at: str, model: str, gpu: str, precision: str, notes: str = "") -> dict[str, str]:
    """A row of Megatron-Bridge's tables, as far as it determines the program."""
    source = f"Megatron-Bridge performance summary {at}"
    return {
        "source": source, "model": model, "gpu": gpu, "precision": precision, "notes": notes, "year": "2026",
        "framework": "Megatron-Bridge",
    }  # fmt: skip


def test_a_recipe_holds_until_the_next_release_that_changes_it() -> None:
    found = {
        at: recipe(summary(at, "GPT OSS 120B", "GB200", "mxfp8")) for at in ("26.04", "26.04.01", "26.06", "26.08")
    }
    before, same, after, last = found.values()
    assert before == same and after == last and before and after
    assert (before.fused_experts, before.cuda_graphs) == (False, "none")
    assert (after.fused_experts, after.cuda_graphs, after.fp8_attention) == (True, "full", True)
    assert (before.fp8_head, after.fp8_head) == (False, True)


@pytest.mark.parametrize(
    "row",
    [
        summary("25.11", "Kimi_K2", "GB300", "mxfp8"),  # later only
        summary("26.04", "Mixtral-8x7B", "H100", "bf16"),
        {"source": "NVIDIA/dgxc-benchmarking README", "model": "DeepSeek-V3", "gpu": "GB200", "precision": "bf16"},
    ],
)
def test_no_recipe_is_made_up(row: dict[str, str]) -> None:
    assert recipe(row) is None


def test_releases() -> None:
    assert [release({"source": f"Megatron-Bridge performance summary {at}"}) for at in ("26.04", "26.04.01")] == [
        (26, 4, 0),
        (26, 4, 1),
    ]
    assert release({"source": "vTrain data 26.04"}) is None


@pytest.mark.parametrize(
    "source, year, expected",
    [
        ("Megatron-Bridge performance summary 26.08", 2026, 2026 + 7.5 / 12),
        ("NVIDIA/dgxc-benchmarking README @35a9aec v24.11.1", 2025, 2024 + 10.5 / 12),
        ("torchtitan llama3_h100_202412_torchtitan.md", 2024, 2024.5),  # no version of a container
        ("a table of 2023", 2023, 2023.5),
    ],
)
def test_how_old_a_card_was_to_its_software(source: str, year: int, expected: float) -> None:
    assert when({"source": source, "year": str(year)}) == pytest.approx(expected)
    for card, launched in (("NVIDIA H100 SXM", 2022.8), ("NVIDIA GB300", 2025.0), ("NVIDIA A100-SXM4-80GB", 2020.4)):
        assert card_age(card, expected) == pytest.approx(max(0.0, expected - launched))


def test_heads_wider_than_128_had_no_fused_attention_on_blackwell(rows: dict[str, PublishedRun]) -> None:
    """Before Transformer Engine 2.5 latent attention wrote its scores; Nemotron went through FlashAttention 2."""
    latent, wide = rows["r0575"].case.published, rows["r0565"].case.published
    assert (latent.flash_attention, wide.flash_attention, wide.newest_attention) == (False, True, False)
    plain = PublishedProgram()
    for head_dim, generation, year in ((128, "blackwell", 2025.3), (192, "hopper", 2025.3), (192, "blackwell", 2025.6)):
        assert on_card(plain, head_dim, True, generation, year) == plain
    assert rows["r0844"].case.published.flash_attention  # the same model in 25.11
    assert not on_card(plain, 192, True, "blackwell", 2025.3).flash_attention


def test_the_table_is_whole() -> None:
    with RECIPES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 150
    assert {row["dispatcher"] for row in rows} == {"alltoall", "deepep", "hybridep"}
    assert {row["cuda_graphs"] for row in rows} == {"none", "part", "full"}
    keys = [(row["model"], row["gpu"], row["precision"], row["since"]) for row in rows]
    assert len(set(keys)) == len(keys)


def test_a_program_does_what_its_recipe_says() -> None:
    plain = program(summary("26.02", "Qwen3-235B-A22B", "H100", "fp8"), gated=True)
    assert plain.overlaps_dispatch and not plain.sends_once and not plain.fused_dispatch and plain.waits_for_counts
    fused = program(summary("26.06", "DeepSeek-V3", "GB300", "mxfp8"), gated=True)
    assert fused.fused_experts and fused.fp8_attention and fused.sends_once and not fused.waits_for_counts
    ungated = program(summary("26.08", "Nemotron_3_Nano", "GB300", "mxfp8"), gated=False)
    assert not ungated.fused_experts and ungated.fp8_attention
    dropped = program(summary("25.09", "Qwen3_30B_a3B", "GB200", "fp8", "(tokendrop)"), gated=True)
    assert dropped.graphed and not dropped.sends_once and not dropped.waits_for_counts


def test_what_a_recipe_recomputes_and_which_kernels_its_release_had() -> None:
    at = {
        release: program(summary(release, "GPT OSS 120B", "GB200", "mxfp8"), gated=True)
        for release in ("26.04", "26.06", "26.06.01", "26.08")
    }
    assert at["26.04"].recomputes_norms and at["26.04"].recomputes_expert_activation
    assert not at["26.06"].recomputes_norms and not at["26.06"].recomputes_expert_activation
    assert [own.slow_bias_gradients for own in at.values()] == [False, False, True, False]
    latent = program(summary("26.04", "Kimi_K2", "GB300", "mxfp8"), gated=True)
    assert latent.recomputes_latents and not latent.recomputes_norms


def test_whose_tensor_parallelism_overlaps() -> None:
    found = {
        name: program(summary(at, name, gpu, precision), gated=True).tp_overlap
        for at, name, gpu, precision in (
            ("25.09", "Qwen3-235B-A22B", "GB200", "fp8"), ("25.09", "DeepSeek-V3", "H100", "fp8"),
            ("26.04", "Llama3-70B", "GB200", "nvfp4"), ("26.04", "Llama3-8B", "GB200", "mxfp8"),
        )
    }  # fmt: skip
    assert list(found.values()) == [True, False, False, True]
    assert not program(summary("26.02", "Qwen3-235B-A22B", "H100", "fp8"), gated=True).tp_overlap


def test_llm_foundry_by_its_strategy_and_its_composer(rows: dict[str, PublishedRun]) -> None:
    found = [rows[name].case for name in ("r0290", "r0278", "r0296")]  # small, large, earlier
    assert [case.published.gathers_once for case in found] == [True, False, False]
    assert [case.software.gradient_bytes for case in found] == [4, 4, 2]


@pytest.mark.parametrize(
    "day, slow_host, accumulated, reduced, held",
    [("02-20", 1.03, 6.0, 2, 2), ("02-26", 1.0, 6.0, 2, 2), ("02-28", 1.0, 18.0, 4, 6)],
)
def test_jean_zay_before_and_after_what_its_chronicle_tells(
    day: str, slow_host: float, accumulated: float, reduced: int, held: int
) -> None:
    found = program({"framework": "Megatron-DeepSpeed", "precision": "bf16", "notes": f"{day} line 1"}, gated=False)
    assert found.waits_for_kernels and found.bucket_bytes == 2e9
    assert (found.slow_host, found.accumulate_bytes) == (slow_host, accumulated)
    assert (found.gradient_bytes, found.main_gradient_bytes) == (reduced, held)
    other = program({"framework": "Megatron-DeepSpeed", "precision": "fp16", "notes": "1F1B"}, gated=False)
    assert not other.waits_for_kernels and not other.bucket_bytes


@pytest.fixture(scope="module")
def rows() -> dict[str, PublishedRun]:
    return {row.id: row for row in read(PUBLISHED)}


def test_stages_are_balanced_as_recipes_balance_them(rows: dict[str, PublishedRun]) -> None:
    """61 layers in 16 chunks: four each, and the last one with the head. 94 in 24, 126 in 64: a slot for each end."""
    ends = {name: (rows[name].case.layout.first_layers, rows[name].case.layout.last_layers) for name in rows}
    assert ends["r0687"] == (32, 29) and ends["r0851"] == (4, 1) and ends["r0702"] == (11, 11)
    assert ends["r0872"] == (7, 6)  # "Et|(tt|)*30mL"
    assert ends["r0513"] == (15, 15) and ends["r0455"] == (0, 0)  # 126 layers; 96 on 8 x 12 chunks
    assert ends["r0125"] == (0, 0), "Megatron-DeepSpeed deals as it always did"
    for row in rows.values():
        chunks, layout = row.case.layout.chunk_layers, row.case.layout
        assert not chunks or (sum(chunks) == row.shape.num_layers and len(chunks) == layout.pp * layout.vpp)


@pytest.mark.parametrize(
    "model, seq, published",
    [
        ("gpt_oss_120b", 4096, 32.6), ("nemotron_3_nano", 8192, 22.3), ("nemotron_3_5_lightning", 8192, 28.1),
        ("nemotron_3_super", 8192, 84.8), ("nemotron_3_ultra", 8192, 363), ("deepseekv4_flash", 4096, 90.8),
    ],
)  # fmt: skip
def test_models_that_are_not_trained_here_compute_what_tables_say(model: str, seq: int, published: float) -> None:
    """Megatron-Bridge's, of 26.08: TFLOPS per GPU over tokens per second and GPU; 1e9 per token."""
    assert flops_per_token(BENCHMARKED[model], seq) / 1e9 == pytest.approx(published, rel=0.015)


def test_experts_in_a_latent_space_are_as_many_and_as_small_as_they_are(rows: dict[str, PublishedRun]) -> None:
    """As many FLOPs in all, within 2 %, and four times the activations between the products."""
    row = rows["r0640"]
    assert row.text["model"] == "Nemotron_3_Super"
    real, stood_for = row.case.model, sizes(row.shape, 8192)
    assert (real.experts, real.topk, real.expert_hidden) == (512, 22, 1024) and real.hidden == 4096
    computed = [each.topk * each.expert_hidden * each.expert_ffn for each in (real, stood_for)]
    assert computed[0] == pytest.approx(computed[1], rel=0.02)
    assert real.topk * real.expert_ffn > 3.5 * stood_for.topk * stood_for.expert_ffn


def test_deepseek_predicts_one_token_more_in_megatron_bridge(rows: dict[str, PublishedRun]) -> None:
    depths = {name: shape_of(rows[name].text).mtp_num_layers for name in ("r0687", "r0844", "r0575")}
    assert depths == {"r0687": 1, "r0844": 0, "r0575": 0}
