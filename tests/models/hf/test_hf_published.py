"""config.json files as they are published, with the keys that transformers does not read, mean the published shapes.

What both kinds of keys say of tokens, versions and caches is left out.
"""

import dataclasses
from typing import Any

import pytest

from models.costs.parameters import num_parameters
from models.families import SHAPES
from models.hf.shapes import TRAINING_ONLY, _meaning, read_shape
from models.shapes import GPTShape
from program.errors import UserError


def of(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """sizes: hidden, intermediate, blocks, heads, key-value heads, vocabulary, positions."""
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    return {"model_type": model_type} | dict(zip(keys, sizes, strict=True)) | more


SILU: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02}
GEMMA: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid", "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
YARN = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3", "type": "llama3",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2_2b": of(
        "gemma2", (2304, 9216, 26, 8, 4, 256000, 8192), **GEMMA, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh", rope_theta=10000.0, sliding_window=4096,
    ),
    "gemma3_1b": of(
        "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768), **GEMMA, attn_logit_softcapping=None,
        final_logit_softcapping=None, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000,
        sliding_window=512, sliding_window_pattern=6,
    ),
    "olmo3_32b": of(
        "olmo3", (5120, 27648, 64, 40, 8, 100278, 65536), **SILU, attention_bias=False, attention_dropout=0.0,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 16, rms_norm_eps=1e-6, rope_scaling=YARN, rope_theta=500000,
        sliding_window=4096, tie_word_embeddings=False,
    ),
    "olmo2_7b": of(
        "olmo2", (4096, 11008, 32, 32, 32, 100352, 4096), **SILU, attention_bias=False, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    "phi3_mini": of(
        "phi3", (3072, 8192, 32, 32, 32, 32064, 4096), **SILU, attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
        original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False,
    ),
    "pythia_1_4b": {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 16,
        "num_hidden_layers": 24, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "granite31_8b": of(
        "granite", (4096, 12800, 40, 32, 8, 49152, 131072), **SILU, attention_bias=False, attention_dropout=0.1,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0, mlp_bias=False,
        residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True,
    ),
    "smollm3_3b": of(
        "smollm3", (2048, 11008, 36, 16, 4, 128256, 65536), **SILU, attention_bias=False, layer_types=[FULL] * 36,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
        use_sliding_window=False,
    ),
    "seed_oss_36b": of(
        "seed_oss", (5120, 27648, 64, 80, 8, 155136, 524288), **SILU, attention_bias=True, attention_dropout=0.1,
        attention_out_bias=False, head_dim=128, mlp_bias=False, residual_dropout=0.1, rms_norm_eps=1e-6,
        rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "starcoder2_7b": of(
        "starcoder2", (4608, 18432, 32, 36, 4, 49152, 16384), activation_function="gelu", attention_dropout=0.1,
        attention_softmax_in_fp32=True, embedding_dropout=0.1, hidden_act="gelu_pytorch_tanh",
        initializer_range=0.018042, layer_norm_epsilon=1e-5, mlp_type="default", norm_epsilon=1e-5,
        norm_type="layer_norm", residual_dropout=0.1, rope_theta=1000000, scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True, sliding_window=4096, use_bias=True,
    ),
    "starcoder2_3b": of(
        "starcoder2", (3072, 12288, 30, 24, 2, 49152, 16384), attention_dropout=0.1, embedding_dropout=0.1,
        hidden_act="gelu_pytorch_tanh", initializer_range=0.018042, mlp_type="default", norm_epsilon=1e-5,
        norm_type="layer_norm", residual_dropout=0.1, rope_theta=999999.4420358813, sliding_window=4096, use_bias=True,
    ),
    "phi4_mini": of(
        "phi3", (3072, 8192, 32, 24, 8, 200064, 131072), **SILU, attention_bias=False, embd_pdrop=0.0, full_attn_mod=1,
        interpolate_factor=1, lm_head_bias=False, mlp_bias=False, original_max_position_embeddings=4096,
        partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=None,
        rope_scaling={"long_factor": [*SHAPES["phi4_mini"].rope_long_factor], "short_factor": [1.0] * 48,
                      "type": "longrope"},
        tie_word_embeddings=True,
    ),
    "ministral3_8b": of(
        "ministral3", (4096, 14336, 34, 32, 8, 131072, 262144), **SILU, attention_dropout=0.0, head_dim=128,
        rms_norm_eps=1e-5, sliding_window=None,
        rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262144, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
        },
    ),
    "mamba_codestral_7b": {
        "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.1, "layer_norm_epsilon": 1e-5, "n_groups": 8,
        "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "rescale_prenorm_residual": False,
        "residual_in_fp32": True, "rms_norm": True, "state_size": 128, "tie_word_embeddings": False,
        "time_step_floor": 1e-4, "time_step_init_scheme": "random", "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": False,
        "use_conv_bias": True, "vocab_size": 32768,
    },
    "gemma3_4b": {  # its text_config
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "gemma3_27b": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "apertus_8b": of(
        "apertus", (4096, 21504, 32, 32, 8, 131072, 65536), attention_bias=False, hidden_act="xielu", mlp_bias=False,
        post_norm=False, qk_norm=True, rms_norm_eps=1e-5, rope_scaling=LLAMA3, rope_theta=12000000,
        tie_word_embeddings=False,
    ),
    "minitron_4b": of(
        "nemotron", (3072, 9216, 32, 24, 8, 256000, 4096), attention_bias=False, head_dim=128, hidden_act="relu2",
        mlp_bias=False, norm_eps=1e-5, partial_rotary_factor=0.5, rope_theta=10000, tie_word_embeddings=False,
    ),
    "ernie45_0_3b": of(
        "ernie4_5", (1024, 3072, 18, 16, 2, 103424, 131072), **SILU, head_dim=128, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=True, use_bias=False,
    ),
    "glm4_9b": of(
        "glm4", (4096, 13696, 40, 32, 2, 151552, 32768), **SILU, attention_bias=True, attention_dropout=0.0,
        head_dim=128, partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "qwen25_7b": of(
        "qwen2", (3584, 18944, 28, 28, 4, 152064, 131072), **SILU, attention_dropout=0.0, max_window_layers=28,
        rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False, use_mrope=False,
        use_sliding_window=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_means_the_published_shape(name: str) -> None:
    _, found = read_shape(CONFIGS[name])
    expected = SHAPES[name]
    for field in dataclasses.fields(GPTShape):
        if field.name not in TRAINING_ONLY:
            assert _meaning(found, field.name) == _meaning(expected, field.name), field.name
    assert found.hf_model_type == CONFIGS[name]["model_type"]


SMOLLM2 = of(
    "llama", (576, 1536, 30, 9, 3, 49152, 8192), **SILU, attention_bias=False, attention_dropout=0.0,
    is_llama_config=True, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5, rope_interleaved=False,
    rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
)  # fmt: skip
OLD = {"temperature": 1.0, "top_k": 50, "_attn_implementation": "sdpa", "use_return_dict": True, "torchscript": False}


@pytest.mark.parametrize("more", [{}, OLD, {"layer_types": [FULL] * 30}, {"use_sliding_window": False}], ids=str)
def test_keys_without_effect_are_read_over(more: dict[str, Any]) -> None:
    """Of SmolLM2-135M, and what other files hold."""
    assert num_parameters(read_shape(SMOLLM2 | more)[1]) == 134_515_008


@pytest.mark.parametrize(
    "more", [{"layer_types": [FULL, SLIDING] * 15}, {"use_sliding_window": True}, {"rope_interleaved": True}], ids=str
)
def test_and_refused_where_they_would_have_one(more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="unknown"):
        read_shape(SMOLLM2 | more)


def test_a_window_beyond_the_context_is_one() -> None:
    shape = read_shape(CONFIGS["phi4_mini"] | {"sliding_window": 262144})[1]
    assert (shape.window_size, shape.rotary_dim) == ((262143, 0), 96)


def test_ministral_3_without_rope_parameters_is_the_8b() -> None:
    config = {key: value for key, value in CONFIGS["ministral3_8b"].items() if key != "rope_parameters"}
    assert read_shape(config) == read_shape(CONFIGS["ministral3_8b"])
    old = CONFIGS["ministral3_8b"]["rope_parameters"]
    assert read_shape(config | {"rope_scaling": old}) == read_shape(CONFIGS["ministral3_8b"])
