"""Forward parity with transformers' own implementations: the same random weights, the same logits, in fp32."""

import dataclasses
import json
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import some
from models.config import ModelConfig
from models.costs.parameters import num_parameters
from models.families import TINY, named
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks
from tests.models.hf_weights import (
    canonical_mtp_weights,
    canonical_weights,
    copy_into,
    hf_config,
    hf_model,
    hf_mtp_model,
    randomise,
)

VOCAB, SAMPLES, SEQ = 257, 2, 96

NO_GROUPS = {"moe_router_num_groups": 0, "moe_router_group_topk": 0, "moe_router_topk_scaling_factor": 1.0}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 32}
LONGROPE = {
    "rope_scaling": "longrope", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 128,
    "rope_short_factor": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), "rope_long_factor": (1.0, 2.0, 3.0, 4.5, 6.0, 7.5),
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2_tiny", {}),
    "gpt3": ("gpt3_tiny", {}),
    "llama2": ("llama2_tiny", {}),
    "llama2 linear": ("llama2_tiny", {"rope_scaling": "linear", "rope_scaling_factor": 2.5}),
    "llama2 yarn": ("llama2_tiny", YARN),
    "llama3.1": ("llama3_tiny", {}),
    "llama3.2 tied": ("llama3_tiny", {"untie_embeddings_and_output_weights": False}),
    "mistral": ("mistral_tiny", {}),
    "llama attention biases": ("llama2_tiny", {"add_qkv_bias": True, "attention_out_bias": True}),
    "llama MLP biases": ("llama2_tiny", {"mlp_bias": True}),
    "cwm": ("cwm_tiny", {}),
    "helium": ("helium_tiny", {}),
    "mixtral": ("mixtral_tiny", {}),
    "ministral": ("ministral_tiny", {}),
    "ministral windows in some": ("ministral_tiny", {"window_attn_skip_freq": "[1,0,0,1]"}),
    "ministral3": ("ministral3_tiny", {}),
    "ministral3 windows, tied, odd sizes": (
        "ministral3_tiny",
        {
            "window_size": (12, 0),
            "untie_embeddings_and_output_weights": False,
            "hidden_size": 60,
            "kv_channels": 14,
            "num_attention_heads": 6,
            "num_query_groups": 3,
            "attn_scale": 0.7,
            "rope_attention_factor": 0.0,
        },
    ),
    "qwen2": ("qwen2_tiny", {}),
    "qwen2 tied": ("qwen2_tiny", {"untie_embeddings_and_output_weights": False}),
    "qwen2_moe": ("qwen2_moe_tiny", {}),
    "qwen2_moe dense blocks between": ("qwen2_moe_tiny", {"moe_layer_freq": "[0,1,0,1]", "moe_router_topk": 3}),
    "qwen3": ("qwen3_tiny", {}),
    "qwen3_moe": ("qwen3_moe_tiny", {}),
    "qwen2 windows": ("qwen2_tiny", {"window_size": (10, 0), "window_attn_skip_freq": "[0,0,1,1]"}),
    "qwen3 windows, biases": (
        "qwen3_tiny",
        {"window_size": (10, 0), "window_attn_skip_freq": "2", "add_qkv_bias": True, "attention_out_bias": True},
    ),
    "seed_oss": ("seed_oss_tiny", {}),
    "seed_oss all biases": ("seed_oss_tiny", {"mlp_bias": True, "attention_out_bias": True}),
    "smollm3": ("smollm3_tiny", {}),
    "starcoder2": ("starcoder2_tiny", {}),
    "starcoder2 fractional base": ("starcoder2_tiny", {"rotary_base": 999.4420358813}),
    "starcoder2 untied, no biases": (
        "starcoder2_tiny",
        {"add_bias_linear": False, "untie_embeddings_and_output_weights": True},
    ),
    "granite": ("granite_tiny", {}),
    "granite biases": ("granite_tiny", {"add_bias_linear": True}),
    "phi3": ("phi3_tiny", {}),
    "phi4": ("phi4_tiny", {}),
    "phi4 partial rotary": ("phi4_tiny", {"rotary_percent": 0.75}),
    "phi4 longrope, short": ("phi4_tiny", {"rotary_percent": 0.75, **LONGROPE}),
    "phi4 longrope, long": (
        "phi4_tiny",
        {"rotary_percent": 0.75, **LONGROPE, "rope_original_max_position_embeddings": 32},
    ),
    "pythia": ("pythia_tiny", {}),
    "gpt_neox one after the other, tied": (
        "pythia_tiny",
        {
            "parallel_residual": False,
            "rotary_percent": 1.0,
            "activation": "gelu",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "gpt_neox without attention biases": ("pythia_tiny", {"add_bias_linear": False, "mlp_bias": True}),
    "olmo2": ("olmo2_tiny", {}),
    "olmo2 groups, biases": ("olmo2_tiny", {"num_query_groups": 2, "add_qkv_bias": True, "attention_out_bias": True}),
    "olmo3": ("olmo3_tiny", {}),
    "olmo3 plain": ("olmo3_tiny", {"rope_scaling": "none", "rotary_base_local": 0}),
    "gemma": ("gemma_tiny", {}),
    "gemma one key": ("gemma_tiny", {"num_query_groups": 1, "kv_channels": 24}),
    "gemma2": ("gemma2_tiny", {}),
    "gemma2 without caps, windows": (
        "gemma2_tiny",
        {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "window_size": (-1, 0)},
    ),
    "gemma3": ("gemma3_tiny", {}),
    "gemma3 unstretched, capped, other pattern": (
        "gemma3_tiny",
        {"rope_scaling": "none", "final_logit_softcapping": 3.0, "window_attn_skip_freq": "[1,0,0,1]"},
    ),
    "nemotron": ("nemotron_tiny", {}),
    "nemotron biases": ("nemotron_tiny", {"add_bias_linear": True}),
    "apertus": ("apertus_tiny", {}),
    "ernie4_5": ("ernie45_tiny", {}),
    "ernie4_5 biases": ("ernie45_tiny", {"add_bias_linear": True}),
    "glm4": ("glm4_tiny", {}),
    "glm": ("glm4_tiny", {"norm_placement": "pre", "add_qkv_bias": False, "hf_model_type": "glm"}),
    "qwen3_moe weights that do not sum to 1, dense blocks": (
        "qwen3_moe_tiny",
        {"moe_router_pre_softmax": True, "moe_layer_freq": "[0,1,0,1]", "moe_router_topk": 3},
    ),
    "deepseek_v2": ("deepseek_v2_tiny", {}),
    "deepseek_v2 three of two groups": (
        "deepseek_v2_tiny",
        {"moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "deepseek_v2 mscales differ": ("deepseek_v2_tiny", {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "deepseek_v2_lite": ("deepseek_v2_tiny", {"q_lora_rank": 0, **NO_GROUPS}),
    "mamba2": ("mamba2_tiny", {}),
    "mamba2 of odd sizes": (
        "mamba2_tiny",
        {"hidden_size": 60, "mamba_num_heads": 15, "mamba_head_dim": 8, "mamba_num_groups": 5, "mamba_state_dim": 13},
    ),
    "mamba2 tied, one group": ("mamba2_tiny", {"mamba_num_groups": 1, "untie_embeddings_and_output_weights": False}),
    "nemotron_h": ("nemotron_h_tiny", {}),
    "nemotron_h of odd sizes": (
        "nemotron_h_tiny",
        {
            "hybrid_layer_pattern": "*M--MM-",
            "hidden_size": 60,
            "ffn_hidden_size": 99,
            "num_attention_heads": 6,
            "num_query_groups": 3,
            "kv_channels": 14,
            "mamba_num_heads": 9,
            "mamba_head_dim": 7,
            "mamba_num_groups": 3,
            "mamba_state_dim": 11,
        },
    ),
    "nemotron_3": ("nemotron3_tiny", {}),
    "qwen3_next": ("qwen3_next_tiny", {}),
    "qwen3_next of odd sizes": (
        "qwen3_next_tiny",
        {
            "linear_attention_freq": "[1,0,1,1]",
            "moe_layer_freq": "[1,1,1,0]",
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_query_groups": 3,
            "kv_channels": 24,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 7,
        },
    ),
    "qwen3_5": ("qwen35_tiny", {}),
    "qwen3_5 of odd sizes, tied": (
        "qwen35_tiny",
        {
            "num_layers": 3,
            "linear_attention_freq": "[1,0,1]",
            "untie_embeddings_and_output_weights": False,
            "hidden_size": 60,
            "ffn_hidden_size": 99,
            "num_attention_heads": 6,
            "num_query_groups": 3,
            "kv_channels": 24,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 7,
        },
    ),
    "qwen3_5_moe": ("qwen35_moe_tiny", {}),
    "qwen3_5_moe of odd sizes": (
        "qwen35_moe_tiny",
        {
            "num_layers": 3,
            "linear_attention_freq": "[1,0,1]",
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_query_groups": 1,
            "kv_channels": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 9,
            "linear_value_head_dim": 14,
            "num_moe_experts": 5,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 22,
            "moe_shared_expert_intermediate_size": 34,
        },
    ),
    "deepseek_v3": ("deepseek_v3_tiny", {"mtp_num_layers": 0}),
    "deepseek_v3 without groups": ("deepseek_v3_tiny", {"mtp_num_layers": 0, **NO_GROUPS}),
    "moonlight": ("moonlight_tiny", {}),
    "moonlight with a large epsilon": ("moonlight_tiny", {"norm_epsilon": 0.1, "q_lora_rank": 32}),
    "kimi_k2": ("kimi_k2_tiny", {}),
    "gpt_oss": ("gpt_oss_tiny", {}),
    "minimax_m2": ("minimax_m2_tiny", {}),
    "ernie45": ("ernie45_moe_tiny", {}),
    "ernie45 no shared experts, untied": (
        "ernie45_moe_tiny",
        {"moe_shared_expert_intermediate_size": 0, "untie_embeddings_and_output_weights": True, "moe_router_topk": 2},
    ),
    "olmoe": ("olmoe_tiny", {}),
    "olmoe clipped": ("olmoe_tiny", {"clip_qkv": 0.5}),
    "olmoe weights that sum to 1, groups": ("olmoe_tiny", {"moe_router_pre_softmax": False, "num_query_groups": 2}),
    "llama4": ("llama4_tiny", {}),
    "llama4 interleaved experts, no norms, other blocks": (
        "llama4_tiny",
        {"moe_layer_freq": "[0,1,0,1]", "qk_l2_norm": False, "no_rope_freq": "[1,0,0,1]", "rope_scaling": "none"},
    ),
    "llama4 queries that stay": ("llama4_tiny", {"attn_scale": 0.0}),
    "glm45": ("glm45_tiny", {"mtp_num_layers": 0}),
    "glm45_air without biases": (
        "glm45_tiny",
        {"mtp_num_layers": 0, "qk_layernorm": False, "add_qkv_bias": False, "rotary_percent": 0.25},
    ),
    "gpt_oss other windows, clamp and topk": (
        "gpt_oss_tiny",
        {"window_attn_skip_freq": "[0,1,1,0]", "activation_func_clamp_value": 0.5, "moe_router_topk": 3},
    ),
}

SUITE = (
    "llama2 linear", "ministral3 windows, tied, odd sizes", "qwen2_moe dense blocks between", "seed_oss all biases",
    "starcoder2", "granite", "phi4 longrope, long", "pythia", "gemma3", "nemotron",
    "deepseek_v2 three of two groups", "mamba2 of odd sizes", "olmoe clipped", "qwen3_5_moe of odd sizes",
)  # fmt: skip
"""What neither test_convert.py nor test_convert_transformers.py of tests/tools has: they compare logits, too."""
SHAPES = {CASES[name][0] for name in SUITE}


def import_classes(names: Iterable[str]) -> None:
    """transformers' models of these cases once, here, and not in every forked rank."""
    import transformers
    import transformers.modeling_layers

    for shape, changes in map(CASES.__getitem__, names):
        getattr(transformers, type(hf_config(resolve(ModelConfig(shape=shape, **changes), VOCAB))).__name__)


def on_one_rank(check: Any, *args: Any) -> None:
    """Call ``check(ranks, *args)`` on a rank of its own."""

    def run(identity: Identity) -> None:
        from parallel import groups

        with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
            check(ranks, *args)

    run_ranks(1, run)


def build(ranks: Any, model: ModelConfig, shape: GPTShape) -> Any:
    from models import gpt

    blueprint = gpt.Blueprint(model=model, shape=shape, precision=PrecisionConfig(dtype="fp32"))
    (chunk,) = gpt.build(blueprint, ranks)
    return chunk.eval()


def some_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their positions, both [b, s]."""
    tokens = torch.randint(0, VOCAB, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(2))
    return tokens, torch.arange(SEQ)[None].expand(SAMPLES, -1)


@torch.no_grad()
def _same_logits(ranks: Any, model: ModelConfig) -> None:
    shape = resolve(model, VOCAB)
    theirs = hf_model(shape)
    randomise(theirs, seed=1, centre=0.0 if shape.layernorm_zero_centered_gamma else 1.0)
    ours = build(ranks, model, shape)
    copy_into(ours, canonical_weights(theirs, shape))
    tokens, positions = some_tokens()
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens, positions, None)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)


def _judge(ranks: Any, names: Sequence[str], found: Path) -> None:
    """Case -> what differs."""
    verdicts = dict.fromkeys(names, "")
    for name in names:
        shape, changes = CASES[name]
        try:
            _same_logits(ranks, ModelConfig(shape=shape, seq_length=SEQ, **changes))
        except Exception:
            verdicts[name] = traceback.format_exc()
    found.write_text(json.dumps(verdicts))


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all cases that were asked for, on one rank: a start of it costs as much as a case."""
    asked = [one for one in request.session.items if isinstance(one, pytest.Function) and one.module is request.module]
    names = [one.callspec.params["name"] for one in asked if "verdicts" in one.fixturenames]
    import_classes(names)
    found = tmp_path_factory.mktemp("parity") / "verdicts.json"
    on_one_rank(_judge, names, found)
    return json.loads(found.read_text())


@pytest.mark.parametrize("name", some(CASES, SUITE))
def test_logits_are_those_of_transformers(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]


@torch.no_grad()
def _same_logits_with_short_steps(ranks: Any, model: ModelConfig) -> None:
    """Nemotron-H's class raises steps below time_step_min: those of weights as they begin, and of trained ones."""
    shape = resolve(model, VOCAB)
    theirs = hf_model(shape)
    randomise(theirs, seed=1)
    for name, tensor in theirs.state_dict().items():
        if name.endswith("dt_bias"):
            tensor.sub_(9.0)
    ours = build(ranks, model, shape)
    copy_into(ours, canonical_weights(theirs, shape))
    tokens, positions = some_tokens()
    ours_logits, theirs_logits = ours(tokens, positions, None)[..., :VOCAB], theirs(tokens).logits
    torch.testing.assert_close(ours_logits, theirs_logits, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", some(["mamba2_tiny", "nemotron_h_tiny"], ["nemotron_h_tiny"]))
def test_short_steps_of_mixers_are_those_of_transformers(name: str) -> None:
    on_one_rank(_same_logits_with_short_steps, ModelConfig(shape=name, seq_length=SEQ))


@torch.no_grad()
def _same_predictions_of_later_tokens(ranks: Any, model: ModelConfig) -> None:
    """Depth k embeds the tokens k places on; where there are none, megatron-core embeds token 0."""
    shape = resolve(model, VOCAB)
    theirs = hf_model(shape)
    mtp = hf_mtp_model(theirs, shape)
    randomise(theirs, seed=1)
    randomise(mtp.layers, seed=3)
    ours = build(ranks, model, shape)
    copy_into(ours, canonical_weights(theirs, shape) | canonical_mtp_weights(mtp, shape))
    found: list[torch.Tensor] = []  # of each depth, then of the model itself; copies: the loss is made in place
    ours.output_layer.register_forward_hook(
        lambda _module, _inputs, output: found.append(output[0].detach().transpose(0, 1).clone())
    )
    tokens, positions = some_tokens()
    with torch.enable_grad():  # depths predict where something is trained by it
        ours(tokens, positions, None, labels=tokens)
    hidden, ahead = theirs.model(tokens).last_hidden_state, tokens
    assert len(found) == shape.mtp_num_layers + 1
    for depth in range(shape.mtp_num_layers):
        ahead = torch.cat([ahead[:, 1:], torch.zeros_like(ahead[:, :1])], dim=1)
        hidden = mtp.forward_layer(depth, hidden, positions, None, input_ids=ahead)
        torch.testing.assert_close(found[depth][..., :VOCAB], theirs.lm_head(hidden), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[-1][..., :VOCAB], theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", some(["deepseek_v3_tiny", "glm45_tiny"], ["glm45_tiny"]))
def test_multi_token_prediction_is_that_of_transformers(name: str) -> None:
    on_one_rank(_same_predictions_of_later_tokens, ModelConfig(shape=name, seq_length=SEQ, mtp_num_layers=2))


PUBLISHED = [
    "gpt2_xl", "llama2_7b", "llama31_8b", "llama32_1b", "mistral_7b", "mixtral_8x7b", "qwen2_0_5b", "qwen25_7b",
    "qwen3_0_6b", "qwen3_30b_a3b", "seed_oss_36b", "phi4", "pythia_1b", "olmo3_7b", "gemma2_27b", "gemma3_1b",
    "minitron_4b", "apertus_8b", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "kimi_k2",
    "moonlight_16b_a3b", "qwen15_moe_a2_7b", "qwen2_57b_a14b", "gpt_oss_20b", "gpt_oss_120b", "mamba2_130m",
    "mamba_codestral_7b", "glm45", "glm45_air", "minimax_m2", "ernie45_21b_a3b", "olmoe_7b", "llama4_scout",
    "llama4_maverick", "nemotron_h_47b", "nemotron3_nano_30b_a3b", "qwen3_next_80b_a3b", "qwen35_9b",
    "qwen35_27b", "qwen35_35b_a3b", "qwen35_0_8b", "ministral3_3b", "phi4_mini", "starcoder2_3b",
]  # fmt: skip


@pytest.mark.parametrize("name", some([*PUBLISHED, *TINY], [*SHAPES, "gemma3_1b"]))
def test_a_shape_has_as_many_parameters_as_transformers_own_model(name: str) -> None:
    import transformers

    shape = dataclasses.replace(named(name), mtp_num_layers=0)  # theirs keeps it apart
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(hf_config(shape))
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]  # not ERNIE's router biases
    assert sum(parameter.numel() for parameter in trained) == num_parameters(shape)
