"""Named architectures: published parameter counts, and siblings that run on a laptop."""

import dataclasses
import math
from typing import Any

import pytest

from models import families
from models.costs.parameters import active_parameters, mtp_only_parameters, num_parameters
from models.families import ALIASES, SHAPES, TINY, named
from models.shape_problems import shape_problems
from models.shapes import GPTShape
from training.cli.parse import parse_config

# Elements of the published weights, tied ones once, of the repositories that models.families names.
ELEMENTS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama31_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen25_0_5b": 494_032_768,
    "qwen25_3b": 3_085_938_688,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "seed_oss_36b": 36_151_104_512,
    "ministral_8b": 8_019_808_256,
    "phi4_mini": 3_836_021_760,
    "starcoder2_3b": 3_030_371_328,
    "smollm3_3b": 3_075_098_624,
    "starcoder2_7b": 7_173_923_840,
    "starcoder2_15b": 15_957_889_024,
    "granite31_2b": 2_533_525_504,
    "granite31_8b": 8_170_835_968,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
    "pythia_1_4b": 1_414_647_808,
    "pythia_2_8b": 2_775_208_960,
    "pythia_6_9b": 6_857_302_016,
    "pythia_12b": 11_846_072_320,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "apertus_8b": 8_053_338_176,
    "ernie45_0_3b": 360_748_032,
    "glm4_9b": 9_400_279_040,
    "glm4_32b": 32_566_081_536,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
}

# Billions of parameters that a token meets, as the papers and model cards round them.
ACTIVE = {
    "mixtral_8x7b": 12.9,  # arXiv:2401.04088, section 1: "13B"; the announcement: 12.9B
    "mixtral_8x22b": 39,
    "qwen3_30b_a3b": 3.3,  # arXiv:2505.09388, table 2 and the model cards
    "qwen3_235b_a22b": 22,
    "deepseek_v2_lite": 2.4,  # arXiv:2405.04434, appendix B
    "deepseek_v2": 21,
    "deepseek_v3": 37,
    "qwen15_moe_a2_7b": 2.7,  # the model card: 14.3B in total
    "qwen2_57b_a14b": 14,  # arXiv:2407.10671, table 1
}


@pytest.mark.parametrize("name, count", ELEMENTS.items())
def test_shape_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert num_parameters(named(name)) == count


def test_gpt3_has_the_paper_s_number_of_parameters() -> None:
    # arXiv:2005.14165, table D.1: 174,600 million
    assert round(num_parameters(named("gpt3_175b")) / 1e6, -2) == 174_600


def test_deepseek_v3_has_the_published_numbers_of_parameters() -> None:
    """The weights' README: 671 B; MTP: 11.5 B of its own. The checkpoint's total has a bias for every expert, too."""
    whole, mtp = num_parameters(named("deepseek_v3")), mtp_only_parameters(named("deepseek_v3"))
    assert whole - mtp + 58 * 256 == 671_026_419_200
    assert mtp / 1e9 == pytest.approx(11.5, abs=0.2)


# Billions of parameters and of those that a token meets, as model cards round them.
ROUNDED = {
    "llama4_scout": (109, 17),  # the model cards; less the images' part
    "llama4_maverick": (400, 17),
    "olmoe_7b": (6.9, 1.3),
    "kimi_k2": (1_000, 32),
    "qwen15_moe_a2_7b": (14.3, 2.7),
    "qwen2_57b_a14b": (57.4, 14.2),
}


@pytest.mark.parametrize("name, billions", ROUNDED.items())
def test_sizes_are_those_that_model_cards_round(name: str, billions: tuple[float, float]) -> None:
    shape = named(name)
    assert (num_parameters(shape) / 1e9, active_parameters(shape) / 1e9) == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name, total, active", [("gpt_oss_20b", 20.91, 3.61), ("gpt_oss_120b", 116.83, 5.13)])
def test_gpt_oss_has_the_model_card_s_numbers_of_parameters(name: str, total: float, active: float) -> None:
    """arXiv:2508.10925, table 1: of the two tables the output layer alone is active."""
    shape = named(name)
    looked_up = shape.vocab_size * shape.hidden_size
    assert num_parameters(shape) / 1e9 == pytest.approx(total, abs=0.006)
    assert (active_parameters(shape) - looked_up) / 1e9 == pytest.approx(active, abs=0.006)


@pytest.mark.parametrize("name, total, active", [("glm45", 355, 32), ("glm45_air", 106, 12), ("minimax_m2", 230, 10)])
def test_sizes_without_embedding_and_output_layer_are_published(name: str, total: int, active: int) -> None:
    """arXiv:2508.06471, table 1, with multi-token prediction; the model card of MiniMax-M2."""
    shape = named(name)
    tables = 2 * shape.vocab_size * shape.hidden_size
    assert (num_parameters(shape) - tables) / 1e9 == pytest.approx(total, abs=3)
    assert (active_parameters(shape) - tables) / 1e9 == pytest.approx(active, abs=1)


def test_moonlight_has_the_paper_s_numbers_of_parameters() -> None:
    """arXiv:2502.16982, table 1, without embedding and output layer."""
    shape = named("moonlight_16b_a3b")
    tables = 2 * shape.vocab_size * shape.hidden_size
    assert (num_parameters(shape) - tables) / 1e9 == pytest.approx(15.29, abs=0.006)
    assert (active_parameters(shape) - tables) / 1e9 == pytest.approx(2.24, abs=0.006)


@pytest.mark.parametrize("name, billions", ACTIVE.items())
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """DeepSeek counts the output layer, but not the embedding, of which a token looks up one row."""
    shape = dataclasses.replace(named(name), mtp_num_layers=0)
    looked_up = shape.vocab_size * shape.hidden_size if name.startswith("deepseek") else 0
    digit = 1 if billions % 1 else 0
    assert (active_parameters(shape) - looked_up) / 1e9 == pytest.approx(billions, abs=0.6 / 10**digit)


def test_without_experts_every_parameter_is_active() -> None:
    assert active_parameters(named("qwen3_8b")) == num_parameters(named("qwen3_8b"))


def test_every_shape_is_consistent() -> None:
    assert {name: shape_problems(shape) for name, shape in SHAPES.items() if shape_problems(shape)} == {}
    assert set(ALIASES.values()) <= set(SHAPES)


def test_llama_releases_differ_in_rope_scaling_only_where_published() -> None:
    assert named("llama3_8b").rope_scaling == "none"
    for name, factor in (("llama31_8b", 8.0), ("llama3_405b", 8.0), ("llama3_1b", 32.0), ("llama3_3b", 32.0)):
        shape = named(name)
        low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
        found = (shape.rope_scaling, shape.rope_scaling_factor, low, high, shape.rope_original_max_position_embeddings)
        assert found == ("llama3", factor, 1.0, 4.0, 8192), name


def test_llama3_tiny_has_wavelengths_in_all_three_bands() -> None:
    shape = named("llama3_tiny")
    pairs = range(0, shape.rotary_dim, 2)
    wavelengths = [2 * math.pi * shape.rotary_base ** (pair / shape.rotary_dim) for pair in pairs]
    original = shape.rope_original_max_position_embeddings
    low, high = original / shape.rope_low_freq_factor, original / shape.rope_high_freq_factor
    assert any(length < high for length in wavelengths)
    assert any(high < length < low for length in wavelengths)
    assert any(length > low for length in wavelengths)
    assert original <= 64, "a test's sequence must reach the stretched wavelengths"


def architecture(shape: GPTShape) -> dict[str, Any]:
    """What a shape is, without its sizes: every word and switch, and whether a part of it exists."""
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    kind = {name: value for name, value in fields.items() if isinstance(value, bool | str)}
    sizes = ("q_lora_rank", "moe_router_num_groups", "moe_shared_expert_intermediate_size", "num_moe_experts")
    kind |= {name: fields[name] > 0 for name in sizes}
    kind |= {name: fields[name] for name in ("mtp_num_layers", "moe_aux_loss_coeff", "moe_router_topk_scaling_factor")}
    kind |= {name: fields[name] for name in ("rotary_base", "norm_epsilon", "rope_scaling_factor", "mscale")}
    kind |= {name: fields[name] for name in ("latent_norm_epsilon", "yarn_beta_fast", "yarn_beta_slow")}
    kind |= {name: fields[name] for name in ("activation_func_clamp_value", "glu_linear_offset")}
    kind["windows"] = any(shape.window_blocks), all(shape.window_blocks)
    kind["grouped"] = shape.num_query_groups < shape.num_attention_heads
    kind["dense first, then experts"] = not shape.hybrid_layer_pattern and (shape.moe_blocks[0], shape.moe_blocks[-1])
    kind["letters"] = set(shape.hybrid_layer_pattern)
    del kind["moe_layer_freq"], kind["hybrid_layer_pattern"], kind["window_attn_skip_freq"]
    return kind


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_one_keeps_an_architecture_of_its_family(name: str) -> None:
    (family,) = (each for each in families._FAMILIES if name in getattr(each, "TINY", {}))
    assert architecture(named(name)) in map(architecture, family.PUBLISHED.values())
    assert (named(name).num_layers, named(name).hidden_size, named(name).vocab_size) == (4, 64, 257)
    assert num_parameters(named(name)) < 500_000


def test_a_named_shape_needs_nothing_but_its_name() -> None:
    config = parse_config(["slurm/recipes/debug.toml", "--model.shape", "deepseek_v3_tiny"])
    for name in SHAPES:
        model = dataclasses.replace(config.model, shape=name)
        assert dataclasses.replace(config, model=model).problems(1) == [], name


def test_two_families_have_no_name_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would hide the first: families are found by their files."""
    monkeypatch.setattr(families, "_FAMILIES", [families.llama, families.llama])
    with pytest.raises(AssertionError, match=r"models.families.llama.PUBLISHED has another family's names"):
        families._of_all("PUBLISHED")
