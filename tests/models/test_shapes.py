"""Architectures: published parameter counts, what a configuration changes, names, and sublayer arithmetic."""

import dataclasses
import math
import subprocess
import sys

import pytest

from models import shapes
from models.config import OWNED, ModelConfig
from models.shapes import SHAPES, GPTShape, Parameter, named, parameters, resolve
from parallel.errors import UserError

# Elements of the published weights, tied ones once, of the repositories that shapes.py names.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama31_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
}


@pytest.mark.parametrize("name, count", PUBLISHED.items())
def test_shape_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert shapes.num_parameters(named(name)) == count


def test_gpt3_has_the_paper_s_number_of_parameters() -> None:
    # arXiv:2005.14165, table D.1: 174,600 million
    assert round(shapes.num_parameters(named("gpt3_175b")) / 1e6, -2) == 174_600


def test_every_shape_is_consistent() -> None:
    assert {name: shape.problems() for name, shape in SHAPES.items() if shape.problems()} == {}
    assert set(shapes.ALIASES.values()) <= set(SHAPES)


def test_llama_releases_differ_in_rope_scaling_only_where_published() -> None:
    assert named("llama3_8b").rope_scaling == "none"
    for name, factor in (("llama31_8b", 8.0), ("llama3_405b", 8.0), ("llama3_1b", 32.0), ("llama3_3b", 32.0)):
        shape = named(name)
        low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
        found = (
            shape.rope_scaling,
            shape.rope_scaling_factor,
            low,
            high,
            shape.rope_original_max_position_embeddings,
        )
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


def test_names_of_a_gpt2_like_model() -> None:
    shape = dataclasses.replace(named("gpt2_tiny"), num_layers=1)
    assert list(parameters(shape)) == [
        Parameter("word_embeddings.weight", (384, 64)),
        Parameter("position_embeddings.weight", (1024, 64)),
        Parameter("layers.0.self_attention.linear_qkv.layer_norm_weight", (64,)),
        Parameter("layers.0.self_attention.linear_qkv.layer_norm_bias", (64,)),
        Parameter("layers.0.self_attention.linear_qkv.weight", (192, 64)),
        Parameter("layers.0.self_attention.linear_qkv.bias", (192,)),
        Parameter("layers.0.self_attention.linear_proj.weight", (64, 64)),
        Parameter("layers.0.self_attention.linear_proj.bias", (64,)),
        Parameter("layers.0.mlp.linear_fc1.layer_norm_weight", (64,)),
        Parameter("layers.0.mlp.linear_fc1.layer_norm_bias", (64,)),
        Parameter("layers.0.mlp.linear_fc1.weight", (256, 64)),
        Parameter("layers.0.mlp.linear_fc1.bias", (256,)),
        Parameter("layers.0.mlp.linear_fc2.weight", (64, 256)),
        Parameter("layers.0.mlp.linear_fc2.bias", (64,)),
        Parameter("final_layernorm.weight", (64,)),
        Parameter("final_layernorm.bias", (64,)),
    ]


def test_names_of_a_llama_like_model_with_query_key_norms_and_biases() -> None:
    shape = dataclasses.replace(named("debug"), qk_layernorm=True, add_qkv_bias=True)
    listed = {parameter.name: parameter.shape for parameter in parameters(shape, padded_vocab=False)}
    block = {name.removeprefix("layers.3."): size for name, size in listed.items() if name.startswith("layers.3.")}
    assert block == {
        "self_attention.linear_qkv.layer_norm_weight": (64,),
        "self_attention.linear_qkv.weight": (128, 64),  # (4 heads + 2 x 2 groups) x 16
        "self_attention.linear_qkv.bias": (128,),
        "self_attention.q_layernorm.weight": (16,),
        "self_attention.k_layernorm.weight": (16,),
        "self_attention.linear_proj.weight": (64, 64),
        "mlp.linear_fc1.layer_norm_weight": (64,),
        "mlp.linear_fc1.weight": (352, 64),
        "mlp.linear_fc2.weight": (64, 176),
    }
    assert listed["word_embeddings.weight"] == listed["output_layer.weight"] == (257, 64)
    assert len(listed) == 3 + 4 * 9


def test_every_shape_field_can_be_set_in_the_model_section() -> None:
    model = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {field.name for field in dataclasses.fields(GPTShape)}
    assert model - shape == {"shape", "seq_length", "megatron"}
    assert shape <= model


def test_shape_fills_what_is_not_set_and_nothing_else() -> None:
    assert resolve(ModelConfig(shape="llama3_8b"), None) == named("llama3_8b")
    changed = resolve(ModelConfig(shape="llama3_8b", num_layers=2, hidden_dropout=0.25, add_qkv_bias=True), 1000)
    expected = dataclasses.replace(
        named("llama3_8b"), num_layers=2, hidden_dropout=0.25, add_qkv_bias=True, vocab_size=1000
    )
    assert changed == expected


def test_false_and_zero_override_a_shape() -> None:
    shape = resolve(ModelConfig(shape="gpt2", add_bias_linear=False, hidden_dropout=0.0), None)
    assert (shape.add_bias_linear, shape.hidden_dropout, shape.attention_dropout) == (False, 0.0, 0.1)


def test_head_width_follows_hidden_size_and_heads() -> None:
    assert resolve(ModelConfig(shape="debug", hidden_size=256), None).kv_channels == 64
    assert resolve(ModelConfig(shape="debug", num_attention_heads=8), None).kv_channels == 8
    assert resolve(ModelConfig(shape="debug", hidden_size=256, kv_channels=32), None).kv_channels == 32
    assert resolve(ModelConfig(shape="llama3_1b", num_layers=1), None).kv_channels == 64


def test_padded_vocabulary() -> None:
    assert [named(name).padded_vocab_size for name in ("debug", "gpt2", "llama3_8b")] == [384, 50304, 128256]
    assert resolve(ModelConfig(make_vocab_size_divisible_by=100), 257).padded_vocab_size == 300


def test_vocabulary_is_the_section_s_else_the_tokenizer_s() -> None:
    assert resolve(ModelConfig(vocab_size=300), 257).vocab_size == 300
    assert resolve(ModelConfig(), 1000).vocab_size == 1000
    with pytest.raises(UserError, match=r"model\.vocab_size is 200.* 257 ids"):
        resolve(ModelConfig(vocab_size=200), 257)


def test_unknown_shape_is_reported_with_near_names() -> None:
    (problem,) = ModelConfig(shape="lama3_8b").problems()
    assert '"lama3_8b" is unknown' in problem
    assert "llama3_8b" in problem
    with pytest.raises(UserError, match="gpt2_xl"):
        resolve(ModelConfig(shape="gpt2_x"), None)


@pytest.mark.parametrize(
    "config, expected",
    [
        (ModelConfig(num_layers=0), "model.num_layers must be 1 or more, found 0"),
        (ModelConfig(seq_length=-1), "model.seq_length must be 1 or more"),
        (ModelConfig(hidden_dropout=1.0), "model.hidden_dropout must be in [0, 1), found 1.0"),
        (ModelConfig(attention_dropout=-0.1), "model.attention_dropout must be in [0, 1)"),
        (ModelConfig(rotary_percent=0.0), "model.rotary_percent must be in (0, 1]"),
        (ModelConfig(norm_epsilon=0.0), "model.norm_epsilon must be above 0"),
        (ModelConfig(make_vocab_size_divisible_by=0), "model.make_vocab_size_divisible_by must be 1 or more"),
        (ModelConfig(hidden_size=100, num_attention_heads=3), "Use hidden_size 99 or 102"),
        (ModelConfig(megatron=("num_layers=3",)), "num_layers is set by Triplane's own fields"),
        (ModelConfig(megatron=("softmax_scale",)), 'expected "field=value"'),
    ],
)
def test_section_reports_bad_values(config: ModelConfig, expected: str) -> None:
    (problem,) = config.problems()
    assert expected in problem


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"num_query_groups": 3},
            "not divisible by model.num_query_groups 3. Groups that divide 4 heads: 1, 2, 4.",
        ),
        ({"kv_channels": 15}, "RoPE turns pairs of channels"),
        (
            {"position_embedding_type": "none", "rope_scaling": "yarn"},
            'needs model.position_embedding_type = "rope"',
        ),
        (
            {"rope_scaling": "llama3", "rope_low_freq_factor": 4.0},
            "must be below model.rope_high_freq_factor",
        ),
        ({"rope_scaling": "yarn", "yarn_beta_slow": 32.0}, "must be below model.yarn_beta_fast"),
    ],
)
def test_shape_reports_what_does_not_fit_together(changes: dict[str, object], expected: str) -> None:
    (problem,) = dataclasses.replace(named("debug"), **changes).problems()  # type: ignore[arg-type]
    assert expected in problem


def test_owned_names_are_mcore_s() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert OWNED - {field.name for field in dataclasses.fields(TransformerConfig)} == set()


def test_pattern_and_sublayers() -> None:
    shape = named("debug")
    assert shapes.hybrid_layer_pattern(shape, [4]) == "*-*-*-*-"
    assert shapes.hybrid_layer_pattern(shape, [1, 0, 3]) == "*-||*-*-*-"
    assert shapes.num_sublayers(shape) == 8
    assert shapes.recompute_num_sublayers(3) == 6
    assert [shapes.block_of(number) for number in (1, 2, 8)] == [
        (0, "self_attention"),
        (0, "mlp"),
        (3, "mlp"),
    ]
    assert shapes.per_sublayer([1, 0, 0, 1]) == [1, 1, 0, 0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="do not sum to 4"):
        shapes.hybrid_layer_pattern(shape, [2, 1])


def test_numeric_modules_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, models.config, models.shapes, models.flops, training.schedule, training.batch_size\n"
        "sys.exit(' '.join({'torch', 'numpy', 'megatron'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
