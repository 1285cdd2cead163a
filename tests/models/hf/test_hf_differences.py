"""Where transformers and megatron-core compute different models of the same numbers: refused, read and written.

Found by comparing logits of a thousand random configurations; each case differed by 1% to 60% of the largest logit.
"""

import dataclasses
from typing import Any

import pytest

from models.families import SHAPES, TINY
from models.hf.shapes import read_shape, write_config
from program.errors import UserError

V2, V3 = TINY["deepseek_v2_tiny"], TINY["deepseek_v3_tiny"]
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def yarn(**mscales: float) -> dict[str, Any]:
    """Keys that replace a configuration's rotary positions."""
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": YARN | mscales}


READ: dict[str, tuple[Any, dict[str, Any], str]] = {
    "best three of a group": (
        V3, {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
        "topk_group = 1: expected half of num_experts_per_tok 3: transformers rates a group by the sum of its best 2",
    ),
    "best one of a group": (
        V3, {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}, "topk_group = 2: expected"
    ),
    "groups left out are 8 and 4": (
        V3, {"n_group": "absent", "topk_group": "absent", "n_routed_experts": 16, "num_experts_per_tok": 4},
        "topk_group = 4: expected half of num_experts_per_tok 4",
    ),
    "a single expert": (V3, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok = 1"),
    "mscale alone": (V2, yarn(mscale=0.5), "mscale_all_dim = None: expected a number"),
    "mscale beside 0": (V2, yarn(mscale=0.5, mscale_all_dim=0.0), "mscale_all_dim = None: expected a number"),
    "mscale of all dims alone": (V2, yarn(mscale_all_dim=0.5), "mscale = None: expected a number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_a_configuration_that_means_another_model_to_transformers_is_refused(kind: str) -> None:
    shape, changes, expected = READ[kind]
    config = write_config(shape)[1] | changes
    with pytest.raises(UserError) as error:
        read_shape({key: value for key, value in config.items() if value != "absent"})
    assert expected in str(error.value)


WRITTEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "best three of a group": (
        V3, {"moe_router_topk": 3, "moe_router_num_groups": 2, "moe_router_group_topk": 1}, "of its best 3 (num_"
    ),
    "norms of latents": (V2, {"norm_epsilon": 1e-5}, "model.latent_norm_epsilon 0.0 (theirs would be 1e-06)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_shape_that_transformers_computes_otherwise_is_not_written(kind: str) -> None:
    shape, changes, expected = WRITTEN[kind]
    with pytest.raises(UserError) as error:
        write_config(dataclasses.replace(shape, **changes))
    assert str(error.value).startswith("transformers' deepseek_v")
    assert expected in str(error.value)


def test_keys_that_are_left_out_mean_what_transformers_says() -> None:
    config = write_config(SHAPES["deepseek_v3"])[1]
    for key in ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "q_lora_rank"):
        del config[key]
    assert read_shape(config)[1] == read_shape(write_config(SHAPES["deepseek_v3"])[1])[1]
    config = write_config(TINY["mistral_tiny"])[1]
    assert read_shape(config | {"sliding_window": None})[1].window_size == (-1, 0)
    del config["sliding_window"]
    assert read_shape(config)[1].window_size == (4095, 0)
    del config["tie_word_embeddings"]
    assert not read_shape(config)[1].tied


def test_latents_are_normed_as_deepseek_s_code_does() -> None:
    """With 1e-6, whatever rms_norm_eps is: transformers' DeepseekV2Attention and DeepseekV3Attention."""
    shape = read_shape(write_config(V3)[1] | {"rms_norm_eps": 1e-5})[1]
    assert (shape.norm_epsilon, shape.latent_norm_epsilon) == (1e-5, 1e-6)
    assert write_config(shape)[1]["rms_norm_eps"] == 1e-5


def test_kimi_k2_is_a_deepseek_v3() -> None:
    kimi = SHAPES["kimi_k2"]
    config = write_config(kimi)[1]
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    model_type, shape = read_shape(config | {"model_type": "kimi_k2"})
    assert model_type == "kimi_k2"
    assert write_config(shape)[1] == config


GPT_OSS, MINIMAX, LLAMA4, QWEN35, MINISTRAL3 = (
    TINY[f"{name}_tiny"] for name in ("gpt_oss", "minimax_m2", "llama4", "qwen35_moe", "ministral3")
)

EXPERTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "experts in MXFP4": (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, "Dequantise it first: python -c"),
    "another gain of the gate": (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0: expected 1.702"),
    "no biases of attention": (GPT_OSS, {"attention_bias": False}, "attention_bias = False: expected True"),
    "two numbers of chosen experts": (GPT_OSS, {"experts_per_token": 3}, "experts_per_token = 3: expected 2"),
    "rounded or not": (GPT_OSS, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 1,
                                 "original_max_position_embeddings": 32}, "rope_scaling": None, "rope_theta": None},
                       "rope_parameters.truncate = 1: expected true or false"),
    "gates of shared experts in windows": (TINY["qwen2_moe_tiny"], {"use_sliding_window": True}, "use_sliding_window"),
    "turned channels of more than a head": (MINIMAX, {"rotary_dim": 64}, "rotary_dim = 64: expected a number from 1"),
    "softmax scores": (MINIMAX, {"scoring_func": "softmax"}, "scoring_func = 'softmax': expected 'sigmoid'"),
    "clipped queries": (TINY["olmoe_tiny"], {"clip_qkv": -8.0}, "clip_qkv = -8.0: expected null, or a number above 0"),
    "no block of experts": (TINY["ernie45_moe_tiny"], {"moe_layer_start_index": 9}, "moe_layer_start_index = 9"),
    "two of Llama 4's experts": (LLAMA4, {"num_experts_per_tok": 2}, "num_experts_per_tok = 2: expected 1"),
    "weights that do not sum to 1": (QWEN35, {"norm_topk_prob": False}, "norm_topk_prob = False: expected true"),
    "a block without experts": (QWEN35, {"mlp_only_layers": [1]}, "or decoder_sparse_step = '[1,0,1,1]'"),
    "attention without gates": (QWEN35, {"attn_output_gate": False}, "attn_output_gate = False: expected True"),
    "a longer convolution": (TINY["qwen35_tiny"], {"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim = 5"),
    "queries that do not grow by a number": (
        MINISTRAL3, {"rope_parameters": YARN}, "rope_parameters.llama_4_scaling_beta = None: expected a number from 0"
    ),
    "queries that grow in two ways": (
        MINISTRAL3, {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.2}}, "0.2: expected 0.1, which rope_parameters"
    ),
    "queries that grow without YaRN": (
        MINISTRAL3, {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}, "= 'none': expected 'yarn'"
    ),
    "parameters of RoPE that are text": (MINISTRAL3, {"rope_parameters": "yarn"}, "expected parameters by name"),
    "chunks where there is no RoPE": (LLAMA4, {"layer_types": ["chunked_attention"] * 4}, "layer_types = ['chunked"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_is_no_such_model_is_refused(kind: str) -> None:
    shape, changes, expected = EXPERTS[kind]
    with pytest.raises(UserError) as error:
        read_shape(write_config(shape)[1] | changes)
    assert expected in str(error.value)


def test_published_files_of_gpt_oss_say_some_things_twice() -> None:
    """https://huggingface.co/openai/gpt-oss-20b, config.json, once dequantised."""
    config = write_config(SHAPES["gpt_oss_20b"])[1]
    del config["rope_parameters"], config["layer_types"], config["sliding_window"]
    config |= {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0}
    assert read_shape(config)[1] == read_shape(write_config(SHAPES["gpt_oss_20b"])[1])[1]
    del config["rope_theta"], config["rope_scaling"]
    assert read_shape(config)[1].rope_scaling_factor == 32.0


def test_old_files_of_minimax_say_how_many_channels_turn() -> None:
    config = write_config(SHAPES["minimax_m2"])[1]
    for key in ("partial_rotary_factor", "rope_parameters"):
        del config[key]
    assert read_shape(config | {"rotary_dim": 64, "use_mtp": True, "num_mtp_modules": 3})[1].rotary_percent == 0.5


def test_all_groups_are_none() -> None:
    """No expert is out of reach then, whatever rates the groups."""
    config = write_config(V3)[1] | {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 2}
    assert read_shape(config)[1].moe_router_num_groups == 0
