"""transformers' own model of one of our shapes, and its weights under our canonical names, for tests.

Shape letters as in models/parameters.py: h = hidden_size, f = width of an MLP or expert, E = experts, n = query heads,
g = key-value groups, d = kv_channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.init import global_tensors
from models.names import canonical
from models.shapes import GPTShape

State = dict[str, Tensor]
"""What is left of a state dict: each tensor is popped where it is used, so what remains was not."""


def architecture(shape: GPTShape) -> str:
    """transformers' name of the architecture, from its features. Raises ValueError for what transformers lacks."""
    if shape.activation != ("gelu" if shape.position_embedding_type == "learned_absolute" else "swiglu"):
        raise ValueError(f"no model of transformers has {shape.activation} and {shape.position_embedding_type}")
    if any(shape.no_rope_blocks) or any(shape.window_blocks) != all(shape.window_blocks):
        raise ValueError("no model of these families has blocks with different attention")
    if shape.position_embedding_type == "learned_absolute":
        return "GPT2"
    if shape.multi_latent_attention:
        return "DeepseekV3" if shape.moe_router_score_function == "sigmoid" else "DeepseekV2"
    if shape.num_moe_experts:
        return "Qwen3Moe" if shape.qk_layernorm else "Mixtral"
    if shape.qk_layernorm:
        return "Qwen3"
    if shape.add_qkv_bias:
        return "Qwen2"
    return "Mistral" if any(shape.window_blocks) else "Llama"


def hf_config(shape: GPTShape) -> Any:
    """transformers' configuration with the same numbers. Embeddings have ``vocab_size`` rows: theirs has no padding."""
    import transformers

    name = architecture(shape)
    kind = getattr(transformers, name + "Config")
    if name == "GPT2":
        return kind(
            vocab_size=shape.vocab_size,
            n_positions=shape.max_position_embeddings,
            n_embd=shape.hidden_size,
            n_inner=shape.ffn_hidden_size,
            n_layer=shape.num_layers,
            n_head=shape.num_attention_heads,
            layer_norm_epsilon=shape.norm_epsilon,
            tie_word_embeddings=shape.tied,
            bos_token_id=None,
            eos_token_id=None,
        )
    settings = _common(shape)
    if name.startswith("Deepseek"):
        settings |= _latents(shape) | _deepseek_experts(shape)
    else:
        settings["head_dim"] = shape.kv_channels
    if name == "Mixtral":
        settings |= {"intermediate_size": shape.expert_ffn_hidden_size, "num_local_experts": shape.num_moe_experts}
        settings["num_experts_per_tok"] = shape.moe_router_topk
    if name == "Qwen3Moe":
        settings |= {"moe_intermediate_size": shape.expert_ffn_hidden_size, "num_experts": shape.num_moe_experts}
        settings |= {"num_experts_per_tok": shape.moe_router_topk, "norm_topk_prob": not shape.moe_router_pre_softmax}
        settings["mlp_only_layers"] = [block for block, moe in enumerate(shape.moe_blocks) if not moe]
    if name == "Mistral":
        settings["sliding_window"] = shape.window_size[0] + 1  # theirs counts the token itself
    return kind(**settings)


def _common(shape: GPTShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": _rope(shape),
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rope(shape: GPTShape) -> dict[str, Any]:
    kind = "default" if shape.rope_scaling == "none" else shape.rope_scaling
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": float(shape.rotary_base)}
    if kind != "default":
        rope["factor"] = shape.rope_scaling_factor
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = shape.rope_original_max_position_embeddings
    if kind == "llama3":
        rope |= {"low_freq_factor": shape.rope_low_freq_factor, "high_freq_factor": shape.rope_high_freq_factor}
    if kind == "yarn":
        rope |= {"beta_fast": shape.yarn_beta_fast, "beta_slow": shape.yarn_beta_slow}
    if kind == "yarn" and shape.multi_latent_attention:
        rope |= {"mscale": shape.mscale, "mscale_all_dim": shape.mscale_all_dim}
    return rope


def _latents(shape: GPTShape) -> dict[str, Any]:
    return {
        "q_lora_rank": shape.q_lora_rank or None,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_head_dim,
        "qk_rope_head_dim": shape.qk_pos_emb_head_dim,
        "v_head_dim": shape.v_head_dim,
    }


def _deepseek_experts(shape: GPTShape) -> dict[str, Any]:
    dense = shape.moe_blocks.index(True)
    if not all(shape.moe_blocks[dense:]):
        raise ValueError("DeepSeek's dense blocks all come first")
    settings = {
        "n_routed_experts": shape.num_moe_experts,
        "n_shared_experts": shape.moe_shared_expert_intermediate_size // shape.expert_ffn_hidden_size,
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
        "num_experts_per_tok": shape.moe_router_topk,
        "n_group": shape.moe_router_num_groups or 1,
        "topk_group": shape.moe_router_group_topk or 1,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": shape.moe_router_topk_scaling_factor,
        "norm_topk_prob": shape.moe_router_score_function == "sigmoid",
    }
    if shape.moe_router_score_function == "softmax":
        settings["topk_method"] = "group_limited_greedy" if shape.moe_router_num_groups else "greedy"
    return settings


def hf_model(shape: GPTShape) -> nn.Module:
    """transformers' model for evaluation, in fp32, with its plain attention and its loop over experts."""
    import transformers

    config = hf_config(shape)
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Random values for every parameter and saved buffer, such that none can be missed without changing the output.

    Matrices halve what they multiply: with larger ones, transformers' own fp32 logits are 2e-5 from its fp64 ones for
    DeepSeek's, and with these 2e-6. Norms' weights differ from 1, biases from 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * 0.5 * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * noise)


def hf_mtp_model(theirs: nn.Module, shape: GPTShape) -> nn.Module:
    """transformers' multi-token prediction beside ``theirs``, whose embedding and output layer it uses."""
    from transformers.modeling_layers import MtpModel

    return MtpModel(theirs, shape.mtp_num_layers).float().eval()


def canonical_weights(model: nn.Module, shape: GPTShape) -> State:
    """Every tensor of transformers' model, under our canonical names, in our layout.

    Raises AssertionError for tensors of theirs that ours has no place for.
    """
    state: State = dict(model.state_dict())
    weights = _gpt2(state, shape) if architecture(shape) == "GPT2" else _llama_like(state, shape)
    if shape.tied:
        assert torch.equal(state.pop("lm_head.weight"), weights["word_embeddings.weight"])
    else:
        weights["output_layer.weight"] = state.pop("lm_head.weight")
    assert not state, f"ours has no place for {', '.join(sorted(state))}"
    return weights


def canonical_mtp_weights(mtp: nn.Module, shape: GPTShape) -> State:
    """Those of transformers' multi-token prediction that it has of its own, likewise."""
    state: State = dict(mtp.state_dict())
    for shared in ("embed_tokens.weight", "shared_head.weight"):
        del state[shared]
    weights: State = {}
    for depth in range(shape.mtp_num_layers):
        theirs, ours = f"layers.{depth}.", f"mtp.{depth}."
        for name, mine in {"post_norm": "final_layernorm"}.items() | {(n, n) for n in ("enorm", "hnorm", "eh_proj")}:
            weights[f"{ours}{mine}.weight"] = state.pop(f"{theirs}{name}.weight")
        weights |= block_weights(state, shape, theirs + "mtp_block.", ours, shape.moe_blocks[-1])
    assert not state, f"ours has no place for {', '.join(sorted(state))}"
    return weights


def _llama_like(state: State, shape: GPTShape) -> State:
    weights = {
        "word_embeddings.weight": state.pop("model.embed_tokens.weight"),
        "final_layernorm.weight": state.pop("model.norm.weight"),
    }
    for block, moe in enumerate(shape.moe_blocks):
        weights |= block_weights(state, shape, f"model.layers.{block}.", f"layers.{block}.", moe)
    return weights


def block_weights(state: State, shape: GPTShape, theirs: str, ours: str, moe: bool) -> State:
    """The tensors of one block. theirs, ours: what their names begin with."""
    attention = _latent_attention if shape.multi_latent_attention else _attention
    return attention(state, shape, theirs, ours) | (_experts if moe else _mlp)(state, theirs, ours)


def _attention(state: State, shape: GPTShape, theirs: str, ours: str) -> State:
    theirs_attention, attention = theirs + "self_attn.", ours + "self_attention."
    weights = {
        attention + "linear_qkv.layer_norm_weight": state.pop(theirs + "input_layernorm.weight"),
        attention + "linear_proj.weight": state.pop(theirs_attention + "o_proj.weight"),
    }
    for part in ("weight", "bias") if shape.add_qkv_bias else ("weight",):
        queries, keys, values = (state.pop(f"{theirs_attention}{kind}_proj.{part}") for kind in "qkv")
        weights[f"{attention}linear_qkv.{part}"] = by_group(queries, keys, values, shape.num_query_groups)
    if shape.qk_layernorm:
        weights[attention + "q_layernorm.weight"] = state.pop(theirs_attention + "q_norm.weight")
        weights[attention + "k_layernorm.weight"] = state.pop(theirs_attention + "k_norm.weight")
    return weights


def by_group(queries: Tensor, keys: Tensor, values: Tensor, groups: int) -> Tensor:
    """[n d, ...] and twice [g d, ...] -> [(n + 2 g) d, ...]: of each group its n/g queries, its key, its value."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (queries, keys, values)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _latent_attention(state: State, shape: GPTShape, theirs: str, ours: str) -> State:
    """No rows change places, although the two sides turn different channels together as far as one can see.

    DeepSeek's weights have the channels that a frequency turns next to each other: (0, 1), (2, 3), … Their V2 in
    transformers turns them as complex numbers, where they are; their V3 (``rope_interleave``) and megatron-core
    (``mla_rotary_interleaved``) first sort even channels before odd ones. All read the same rows, and the order of
    channels that queries and keys end up with is common to both, so it does not show in their product.
    """
    theirs_attention, attention = theirs + "self_attn.", ours + "self_attention."
    named = {
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "linear_proj.weight": "o_proj.weight",
    }
    if shape.q_lora_rank:
        named |= {
            "linear_q_down_proj.weight": "q_a_proj.weight",
            "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
            "linear_q_up_proj.weight": "q_b_proj.weight",
        }
    else:
        named["linear_q_proj.weight"] = "q_proj.weight"
    weights = {attention + mine: state.pop(theirs_attention + name) for mine, name in named.items()}
    weights[ours + "input_layernorm.weight"] = state.pop(theirs + "input_layernorm.weight")
    return weights


def _mlp(state: State, theirs: str, ours: str) -> State:
    return {
        ours + "mlp.linear_fc1.layer_norm_weight": state.pop(theirs + "post_attention_layernorm.weight"),
        **_gated(state, theirs + "mlp.", ours + "mlp."),
    }


def _gated(state: State, theirs: str, ours: str) -> State:
    gate, up = state.pop(theirs + "gate_proj.weight"), state.pop(theirs + "up_proj.weight")
    return {
        ours + "linear_fc1.weight": torch.cat([gate, up]),
        ours + "linear_fc2.weight": state.pop(theirs + "down_proj.weight"),
    }


def _experts(state: State, theirs: str, ours: str) -> State:
    """transformers, too, keeps the gate's rows before the others: [E, 2 f, h]."""
    weights = {
        ours + "pre_mlp_layernorm.weight": state.pop(theirs + "post_attention_layernorm.weight"),
        ours + "mlp.router.weight": state.pop(theirs + "mlp.gate.weight"),
        ours + "mlp.experts.linear_fc1.weight": state.pop(theirs + "mlp.experts.gate_up_proj"),
        ours + "mlp.experts.linear_fc2.weight": state.pop(theirs + "mlp.experts.down_proj"),
    }
    if theirs + "mlp.gate.e_score_correction_bias" in state:
        weights[ours + "mlp.router.expert_bias"] = state.pop(theirs + "mlp.gate.e_score_correction_bias")
    if theirs + "mlp.shared_experts.gate_proj.weight" in state:
        weights |= _gated(state, theirs + "mlp.shared_experts.", ours + "mlp.shared_experts.")
    return weights


def _gpt2(state: State, shape: GPTShape) -> State:
    weights = {
        "word_embeddings.weight": state.pop("transformer.wte.weight"),
        "position_embeddings.weight": state.pop("transformer.wpe.weight"),
        "final_layernorm.weight": state.pop("transformer.ln_f.weight"),
        "final_layernorm.bias": state.pop("transformer.ln_f.bias"),
    }
    for block in range(shape.num_layers):
        weights |= _gpt2_block(state, shape, f"transformer.h.{block}.", f"layers.{block}.")
    return weights


def _gpt2_block(state: State, shape: GPTShape, theirs: str, ours: str) -> State:
    """GPT-2's Conv1D keeps matrices as [in, out]; its c_attn has all queries, then all keys, then all values."""
    weights = {}
    named = {
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for part in ("weight", "bias"):
        weights[f"{ours}self_attention.linear_qkv.layer_norm_{part}"] = state.pop(f"{theirs}ln_1.{part}")
        weights[f"{ours}mlp.linear_fc1.layer_norm_{part}"] = state.pop(f"{theirs}ln_2.{part}")
        for name, mine in named.items():
            weights[f"{ours}{mine}.{part}"] = state.pop(f"{theirs}{name}.{part}").t()  # of a bias: itself
        qkv = f"{ours}self_attention.linear_qkv.{part}"
        weights[qkv] = by_group(*weights[qkv].chunk(3), shape.num_query_groups)
    return weights


@torch.no_grad()
def copy_into(chunk: nn.Module, weights: State) -> None:
    """Set all of a chunk's parameters and its routers' biases, on any layout, from whole tensors.

    Rows of the vocabulary that are only padding become 3.0, which must not show. Raises AssertionError for a tensor
    that no entry of this chunk took, for a shape that differs, and for a parameter that nothing set.
    """
    for param in chunk.parameters():
        param.fill_(torch.nan)
    unused = set(weights)
    for entry in global_tensors(chunk):
        name = canonical(entry.key)
        source = weights[name]
        unused.discard(name)
        if name in ("word_embeddings.weight", "output_layer.weight"):
            source = nn.functional.pad(source, (0, 0, 0, entry.global_shape[0] - source.shape[0]), value=3.0)
        assert tuple(source.shape) == tuple(entry.global_shape), f"{name}: {source.shape}, not {entry.global_shape}"
        box = entry.data.view((1,) * entry.prepend_axis_num + tuple(entry.data.shape))
        offsets = zip(entry.global_offset, box.shape, strict=True)
        box.copy_(source[tuple(slice(start, start + size) for start, size in offsets)])
    assert not unused, f"this chunk has no {', '.join(sorted(unused))}"
    unset = [name for name, param in chunk.named_parameters() if param.isnan().any()]
    assert not unset, f"nothing set {', '.join(unset)}"
