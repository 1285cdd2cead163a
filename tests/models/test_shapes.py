"""Architectures: names of parameters, what a configuration changes, what cannot be, and sublayer arithmetic."""

import dataclasses
import subprocess
import sys

import pytest

from models import sublayers
from models.config import ModelConfig
from models.costs.parameters import Parameter, parameters
from models.families import named
from models.frequencies import parse_freq
from models.owned_fields import OWNED
from models.resolve import resolve
from models.shape_fields import MEGATRON_NAMES
from models.shape_problems import shape_problems
from models.shapes import GPTShape
from program.errors import UserError


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


def listed(shape: GPTShape, prefix: str) -> dict[str, tuple[int, ...]]:
    """Parameters whose names begin so, without that beginning."""
    found = {parameter.name: parameter.shape for parameter in parameters(shape)}
    return {name.removeprefix(prefix): size for name, size in found.items() if name.startswith(prefix)}


MIXTURE = {
    "pre_mlp_layernorm.weight": (64,),
    "mlp.router.weight": (8, 64),
    "mlp.experts.linear_fc1.weight": (8, 64, 64),
    "mlp.experts.linear_fc2.weight": (8, 64, 32),
    "mlp.shared_experts.linear_fc1.weight": (64, 64),
    "mlp.shared_experts.linear_fc2.weight": (64, 32),
}
LATENT = {
    "input_layernorm.weight": (64,),
    "self_attention.linear_q_down_proj.weight": (32, 64),
    "self_attention.linear_q_up_proj.layer_norm_weight": (32,),
    "self_attention.linear_q_up_proj.weight": (4 * (16 + 8), 32),
    "self_attention.linear_kv_down_proj.weight": (32 + 8, 64),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (32,),
    "self_attention.linear_kv_up_proj.weight": (4 * (16 + 16), 32),
    "self_attention.linear_proj.weight": (64, 64),
}


def test_names_of_latent_attention_experts_and_multi_token_prediction() -> None:
    shape = named("deepseek_v3_tiny")
    mlp = {
        "mlp.linear_fc1.layer_norm_weight": (64,),
        "mlp.linear_fc1.weight": (352, 64),
        "mlp.linear_fc2.weight": (64, 176),
    }
    assert listed(shape, "layers.0.") == LATENT | mlp
    assert listed(shape, "layers.1.") == listed(shape, "layers.3.") == LATENT | MIXTURE
    own = {f"{name}.weight": (64,) for name in ("enorm", "hnorm", "final_layernorm")}
    assert listed(shape, "mtp.") == {
        f"0.{name}": size for name, size in (own | {"eh_proj.weight": (64, 128)} | LATENT | MIXTURE).items()
    }
    assert list(listed(shape, "")) == list(dict.fromkeys(listed(shape, "")))


def test_two_depths_and_a_dense_last_block() -> None:
    shape = dataclasses.replace(named("gpt2_tiny"), position_embedding_type="none", mtp_num_layers=2)
    depth = listed(shape, "mtp.1.")
    assert depth == listed(shape, "mtp.0.")
    assert {"enorm.bias", "hnorm.bias", "final_layernorm.bias", "mlp.linear_fc1.weight"} <= set(depth)
    assert "eh_proj.bias" not in depth


def test_latent_attention_without_query_latents_and_norms() -> None:
    shape = dataclasses.replace(named("deepseek_v2_tiny"), q_lora_rank=0, qk_layernorm=False)
    assert set(listed(shape, "layers.0.self_attention.")) == {
        "linear_q_proj.weight",
        "linear_kv_down_proj.weight",
        "linear_kv_up_proj.weight",
        "linear_proj.weight",
    }
    assert listed(shape, "layers.0.self_attention.linear_q_proj.") == {"weight": (4 * (16 + 8), 64)}


def test_experts_without_gates_or_shared_ones() -> None:
    shape = dataclasses.replace(named("mixtral_tiny"), activation="squared_relu", moe_ffn_hidden_size=0)
    assert listed(shape, "layers.2.mlp.") == {
        "router.weight": (4, 64),
        "experts.linear_fc1.weight": (4, 176, 64),
        "experts.linear_fc2.weight": (4, 64, 176),
    }


def test_every_shape_field_can_be_set_in_the_model_section() -> None:
    model = {field.name for field in dataclasses.fields(ModelConfig)}
    shape = {field.name for field in dataclasses.fields(GPTShape)}
    assert model - shape == {"name", "shape", "seq_length", "megatron"}
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
        (ModelConfig(norm_epsilon=0.0), "model.norm_epsilon must be in (0, 1]"),
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
            {"rope_scaling": "llama3", "rope_low_freq_factor": 5.0},
            "must not exceed model.rope_high_freq_factor",
        ),
        ({"rope_scaling": "yarn", "yarn_beta_slow": 33.0}, "must not exceed model.yarn_beta_fast"),
    ],
)
def test_shape_reports_what_does_not_fit_together(changes: dict[str, object], expected: str) -> None:
    (problem,) = shape_problems(dataclasses.replace(named("debug"), **changes))  # type: ignore[arg-type]
    assert expected in problem


@pytest.mark.parametrize(
    "name, changes, expected",
    [
        ("debug", {"no_rope_freq": "1,2"}, 'model.no_rope_freq: "1,2" is no layer frequency'),
        ("debug", {"no_rope_freq": "[0,1]"}, 'model.no_rope_freq: "[0,1]" has 2 entries for model.num_layers 4'),
        ("gpt2_tiny", {"no_rope_freq": "4"}, "leaves RoPE out of blocks, but there is none"),
        ("mistral_tiny", {"window_attn_skip_freq": "[1]*5"}, "model.window_attn_skip_freq: "),
        ("mistral_tiny", {"window_size": (16, 16)}, "Use (4095, 0) for a window of 4,096 tokens"),
        ("mistral_tiny", {"window_size": (-2, 0)}, "model.window_size (-2, 0) must be"),
        ("mixtral_tiny", {"moe_layer_freq": "[0]+[1]*4"}, "model.moe_layer_freq: "),
        ("mixtral_tiny", {"moe_layer_freq": "[0]*4"}, "makes no block a mixture of model.num_moe_experts 4"),
        ("mixtral_tiny", {"moe_layer_freq": "0"}, "makes no block a mixture"),
        ("mixtral_tiny", {"moe_router_topk": 5}, "model.moe_router_topk 5 exceeds model.num_moe_experts 4. Use 4"),
        ("mixtral_tiny", {"moe_router_topk": 1}, "Set model.moe_router_pre_softmax = true"),
        (
            "mixtral_tiny",
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 64},
            "model.add_bias_linear = false",
        ),
        ("mixtral_tiny", {"moe_router_num_groups": 2}, "group-limited routing needs both"),
        ("mixtral_tiny", {"moe_router_group_topk": 2}, "group-limited routing needs both"),
        ("deepseek_v2_tiny", {"moe_router_num_groups": 3}, "Groups that divide 8 experts: 1, 2, 4, 8."),
        ("deepseek_v2_tiny", {"moe_router_group_topk": 8, "moe_router_topk": 8}, "Use 2 or less"),
        (
            "deepseek_v3_tiny",
            {"moe_router_topk": 3, "moe_router_group_topk": 2},
            "is the sum of its best topk / group_topk experts. Use one of 1",
        ),
        ("deepseek_v2_tiny", {"moe_router_topk": 6}, "needs 6 experts in each, but a group has 4"),
        ("mixtral_tiny", {"moe_router_load_balancing_type": "none"}, "model.moe_aux_loss_coeff 0.02 weighs no loss"),
        (
            "mixtral_tiny",
            {"moe_router_enable_expert_bias": True, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
            'moe_router_score_function = "sigmoid", found "softmax"',
        ),
        ("mixtral_tiny", {"moe_pad_expert_input_to_capacity": True}, "model.moe_expert_capacity_factor is 0"),
        ("deepseek_v3_tiny", {"rotary_percent": 0.5}, "needs position_embedding_type"),
        ("deepseek_v3_tiny", {"qk_pos_emb_head_dim": 7}, "model.qk_pos_emb_head_dim 7 must be even"),
        ("deepseek_v3_tiny", {"rope_scaling": "linear"}, 'model.rope_scaling "linear" is not supported with it'),
        ("deepseek_v3_tiny", {"window_size": (15, 0)}, "model.window_size (15, 0) is not supported with it"),
        ("deepseek_v3_tiny", {"num_query_groups": 2}, "must be model.num_attention_heads, 4"),
        ("deepseek_v3_tiny", {"add_qkv_bias": True}, "Set model.add_qkv_bias = false"),
        ("deepseek_v3_tiny", {"no_rope_freq": "2"}, "latent attention, which needs it"),
        ("gpt2_tiny", {"mtp_num_layers": 1}, "where learned positions are not"),
    ],
)
def test_shape_reports_what_cannot_be(name: str, changes: dict[str, object], expected: str) -> None:
    (problem,) = shape_problems(dataclasses.replace(named(name), **changes))  # type: ignore[arg-type]
    assert expected in problem


def test_latent_attention_needs_rope() -> None:
    shape = dataclasses.replace(named("deepseek_v3_tiny"), position_embedding_type="none", rope_scaling="none")
    (problem,) = shape_problems(shape)
    assert 'needs position_embedding_type "rope" and rotary_percent 1.0, found "none"' in problem


def test_what_is_left_over_from_a_named_shape_does_no_harm() -> None:
    dense = resolve(ModelConfig(shape="deepseek_v3_tiny", num_moe_experts=0, num_layers=2), None)
    assert shape_problems(dense) == []
    assert dense.moe_blocks == (False, False)
    whole = resolve(ModelConfig(shape="mistral_tiny", window_size=(-1, 0), window_attn_skip_freq="[1]"), None)
    assert shape_problems(whole) == []
    assert whole.window_blocks == (False,) * 4


def blocks(text: str) -> tuple[bool, ...]:
    return tuple(letter == "1" for letter in text)


def test_frequencies_of_blocks_are_megatron_s() -> None:
    mixture = dataclasses.replace(named("mixtral_tiny"), num_layers=6)
    window = dataclasses.replace(named("mistral_tiny"), num_layers=6)
    for freq, moe, windowed, no_rope in (
        ("1", "111111", "000000", "111111"),
        ("2", "101010", "101010", "010101"),
        ("3", "100100", "110110", "001001"),
        ("0", "000000", "111111", "000000"),
        ("[0]*4+[1]*2", "000011", "000011", "000011"),
    ):
        assert dataclasses.replace(mixture, moe_layer_freq=freq).moe_blocks == blocks(moe), freq
        assert dataclasses.replace(window, window_attn_skip_freq=freq).window_blocks == blocks(windowed), freq
        assert dataclasses.replace(window, no_rope_freq=freq).no_rope_blocks == blocks(no_rope), freq


def test_frequencies_are_read_and_not_evaluated() -> None:
    assert parse_freq("([0]+[1]*2)*2") == [0, 1, 1, 0, 1, 1]
    assert parse_freq(" [1, 0] ") == [1, 0]
    for text in ("", "-1", "[]", "[2]", "[1]*[1]", "2*3", "__import__('os')", "[0]*20000", "1.0", "True"):
        with pytest.raises(UserError, match="is no layer frequency"):
            parse_freq(text)


def test_owned_names_are_mcore_s() -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    theirs = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(MEGATRON_NAMES.values()) <= theirs
    assert OWNED - theirs <= {field.name for field in dataclasses.fields(GPTShape)}


def test_pattern_and_sublayers() -> None:
    shape = named("debug")
    assert sublayers.hybrid_layer_pattern(shape, [4]) == "*-*-*-*-"
    assert sublayers.hybrid_layer_pattern(shape, [1, 0, 3]) == "*-||*-*-*-"
    assert sublayers.num_sublayers(shape) == 8
    assert sublayers.recompute_num_sublayers(shape, 3) == 6
    assert [sublayers.block_of(shape, number) for number in (1, 2, 8)] == [(0, "*"), (0, "-"), (3, "-")]
    assert sublayers.per_sublayer(shape, [1, 0, 0, 1]) == [1, 1, 0, 0, 0, 0, 1, 1]
    mixture = named("deepseek_v3_tiny")
    assert sublayers.hybrid_layer_pattern(mixture, [2, 2]) == "+-+E|+E+E/+E"
    assert sublayers.hybrid_layer_pattern(named("mixtral_tiny"), [4]) == "*E*E*E*E"
    with pytest.raises(ValueError, match="do not sum to 4"):
        sublayers.hybrid_layer_pattern(shape, [2, 1])


def test_numeric_modules_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, models.config, models.sublayers, models.costs.flops\n"
        "import training.config.lr_schedule, training.config.batch_schedule\n"
        "sys.exit(' '.join({'torch', 'numpy', 'megatron'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
