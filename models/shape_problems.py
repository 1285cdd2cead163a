"""What does not fit together within one architecture; how it divides over ranks is checked elsewhere.

Every sentence says the field, its value, what was expected, and the fix.
"""

from collections.abc import Callable, Iterator

from models.activations import ACTIVATIONS
from models.hybrid_problems import linear_attention_problems, mamba_problems, mixer_problems, pattern_problems
from models.shapes import GPTShape
from program.errors import UserError


def shape_problems(shape: GPTShape) -> list[str]:
    """Every problem of ``shape``, as sentences; empty when a model of it can be built."""
    hybrid = pattern_problems, mamba_problems, linear_attention_problems, mixer_problems
    for part in hybrid:  # the later ones rely on the earlier ones
        if problems := list(part(shape)):
            return problems
    parts: list[Callable[[GPTShape], Iterator[str]]] = [
        _heads, _positions, _rope_scaling, _frequencies, _window, _gate, _local_rope, _norms, _residual, _scales,
        _chunks,
    ]  # fmt: skip
    if shape.multi_latent_attention:
        parts += [_latent_attention]
    if shape.num_moe_experts:
        parts += [_experts, _expert_groups, _balance, _capacity]
    if shape.mtp_num_layers:
        parts += [_multi_token_prediction]
    return [problem for part in parts for problem in part(shape)]


def _heads(shape: GPTShape) -> Iterator[str]:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        fits = [size for size in range(1, heads + 1) if heads % size == 0]
        yield (
            f"model.num_attention_heads {heads} is not divisible by model.num_query_groups {groups}. "
            f"Groups that divide {heads} heads: {', '.join(map(str, fits))}."
        )


def _positions(shape: GPTShape) -> Iterator[str]:
    if shape.multi_latent_attention or shape.position_embedding_type != "rope":
        return
    if shape.rotary_dim % 2 or not shape.rotary_dim:
        yield (
            f"model: RoPE turns pairs of channels, but kv_channels {shape.kv_channels} x rotary_percent "
            f"{shape.rotary_percent} = {shape.rotary_dim} channels. Make that even, at least 2."
        )


def _rope_scaling(shape: GPTShape) -> Iterator[str]:
    if shape.rope_scaling != "none" and shape.position_embedding_type != "rope":
        yield (
            f'model.rope_scaling "{shape.rope_scaling}" needs model.position_embedding_type = "rope", '
            f'found "{shape.position_embedding_type}".'
        )
    if shape.rope_scaling == "llama3" and shape.rope_low_freq_factor > shape.rope_high_freq_factor:
        yield (
            f"model.rope_low_freq_factor {shape.rope_low_freq_factor} must not exceed "
            f"model.rope_high_freq_factor {shape.rope_high_freq_factor}."
        )
    if shape.rope_scaling == "longrope":
        for name in ("rope_short_factor", "rope_long_factor"):
            if len(found := getattr(shape, name)) != shape.rotary_dim // 2 or min(found, default=0) <= 0:
                yield (
                    f"model.{name} has {len(found)} numbers: longrope needs one above 0 for each of the "
                    f"{shape.rotary_dim // 2} pairs of channels that RoPE turns."
                )
    if shape.rope_scaling == "yarn" and shape.yarn_beta_slow > shape.yarn_beta_fast:
        slow, fast = shape.yarn_beta_slow, shape.yarn_beta_fast
        yield f"model.yarn_beta_slow {slow} must not exceed model.yarn_beta_fast {fast}."


def _frequencies(shape: GPTShape) -> Iterator[str]:
    """Of those fields that have a meaning here: a frequency left over from a named shape does no harm."""
    try:
        if any(shape.no_rope_blocks) and (shape.multi_latent_attention or shape.position_embedding_type != "rope"):
            yield (
                f'model.no_rope_freq "{shape.no_rope_freq}" leaves RoPE out of blocks, but there is none to leave out '
                '(or it belongs to latent attention, which needs it). Use "0".'
            )
    except UserError as error:
        yield f"model.no_rope_freq: {error}"
    try:
        _ = shape.window_blocks
    except UserError as error:
        yield f"model.window_attn_skip_freq: {error}"
    try:
        if shape.num_moe_experts and not any(shape.moe_blocks):
            yield (
                f'model.moe_layer_freq "{shape.moe_layer_freq}" makes no block a mixture of model.num_moe_experts '
                f'{shape.num_moe_experts}. Use "1" for every block, or model.num_moe_experts = 0.'
            )
    except UserError as error:
        yield f"model.moe_layer_freq: {error}"


def _window(shape: GPTShape) -> Iterator[str]:
    before, after = shape.window_size
    if before < -1 or after != 0:
        yield (
            f"model.window_size {shape.window_size} must be (tokens before its own that a query sees, 0): attention "
            "is causal. Use (4095, 0) for a window of 4,096 tokens, (-1, 0) for none."
        )


def _local_rope(shape: GPTShape) -> Iterator[str]:
    if not shape.rotary_base_local:
        return
    if shape.position_embedding_type != "rope" or not any(shape.window_blocks):
        yield (
            f"model.rotary_base_local {shape.rotary_base_local} is the base of RoPE in windowed blocks, of which there "
            "are none. Set model.window_size, or model.rotary_base_local = 0."
        )


def _norms(shape: GPTShape) -> Iterator[str]:
    special = {"latent attention": shape.multi_latent_attention, "experts": shape.num_moe_experts > 0}
    for what in (what for what, there in special.items() if there and shape.post_norm):
        yield f'model.norm_placement "{shape.norm_placement}" is not supported with {what}. Use "pre".'
    if shape.post_norm and shape.mtp_num_layers:
        yield f'model.norm_placement "{shape.norm_placement}" is not supported with model.mtp_num_layers. Use "pre".'
    if not shape.qk_layernorm_full_width:
        return
    if not shape.qk_layernorm or shape.multi_latent_attention:
        yield (
            "model.qk_layernorm_full_width is a kind of model.qk_layernorm, without latent attention. "
            "Set model.qk_layernorm = true, or leave it out."
        )
    if shape.normalization != "RMSNorm":
        yield f'model.qk_layernorm_full_width needs model.normalization "RMSNorm", found "{shape.normalization}".'


def _residual(shape: GPTShape) -> Iterator[str]:
    special = {
        'model.norm_placement "both" or "post"': shape.post_norm,
        "latent attention": shape.multi_latent_attention,
        "experts": shape.num_moe_experts > 0,
        "model.mtp_num_layers": shape.mtp_num_layers > 0,
    }
    for what in (what for what, there in special.items() if there and shape.parallel_residual):
        yield f"model.parallel_residual is not supported with {what}. Set model.parallel_residual = false."


def _scales(shape: GPTShape) -> Iterator[str]:
    for name in ("softmax_scale", "attn_logit_softcapping", "clip_qkv"):
        if getattr(shape, name) and shape.multi_latent_attention:
            yield f"model.{name} is not supported with latent attention. Use 0."
    if shape.mlp_bias and shape.num_moe_experts:
        yield "model.mlp_bias is not supported with model.num_moe_experts. Set model.mlp_bias = false."
    if shape.attention_out_bias and shape.multi_latent_attention:
        yield "model.attention_out_bias is not supported with latent attention. Set it to false."
    if shape.rotary_interleaved and shape.multi_latent_attention:
        yield "model.rotary_interleaved is not supported with latent attention. Set it to false."
    if ACTIVATIONS[shape.activation].learned and shape.num_moe_experts:
        yield f'model.activation "{shape.activation}" has parameters, and is not supported with model.num_moe_experts.'


def _chunks(shape: GPTShape) -> Iterator[str]:
    if shape.attention_chunk_size and (shape.multi_latent_attention or any(shape.window_blocks)):
        yield (
            f"model.attention_chunk_size {shape.attention_chunk_size} is not supported with model.window_size and "
            "latent attention. Set it to 0."
        )
    if shape.attn_scale and not shape.attn_scale_all_blocks and not any(shape.no_rope_blocks):
        yield (
            f"model.attn_scale {shape.attn_scale} scales queries in blocks without RoPE, of which there are none. Set "
            "model.no_rope_freq or model.attn_scale_all_blocks, or model.attn_scale = 0."
        )
    if shape.qk_l2_norm and (shape.qk_layernorm or shape.multi_latent_attention):
        yield (
            "model.qk_l2_norm is not supported with model.qk_layernorm and latent attention. Set model.qk_l2_norm = "
            "false."
        )
    if shape.moe_apply_probs_on_input and shape.num_moe_experts and shape.moe_router_topk != 1:
        yield (
            f"model.moe_apply_probs_on_input needs model.moe_router_topk 1, found {shape.moe_router_topk}. Set one of "
            "them."
        )


def _gate(shape: GPTShape) -> Iterator[str]:
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        if getattr(shape, name) and not shape.gated:
            yield (
                f'model.{name} {getattr(shape, name)} is of gated MLPs, and model.activation "{shape.activation}" is '
                f"none. Set model.{name} = 0, or swiglu, geglu or quick_geglu."
            )


def _latent_attention(shape: GPTShape) -> Iterator[str]:
    where = "model.multi_latent_attention"
    if shape.position_embedding_type != "rope" or shape.rotary_percent != 1.0:
        yield (
            f'{where} turns all its qk_pos_emb_head_dim channels with RoPE: it needs position_embedding_type "rope" '
            f'and rotary_percent 1.0, found "{shape.position_embedding_type}" and {shape.rotary_percent}.'
        )
    if shape.qk_pos_emb_head_dim % 2:
        yield f"model.qk_pos_emb_head_dim {shape.qk_pos_emb_head_dim} must be even: RoPE turns pairs of channels."
    if shape.rope_scaling not in ("none", "yarn"):
        yield f'{where}: model.rope_scaling "{shape.rope_scaling}" is not supported with it. Use "none" or "yarn".'
    if not shape.yarn_correction_range_round_to_int:
        yield f"{where}: model.yarn_correction_range_round_to_int = false is not supported with it. Set it to true."
    if shape.window_size[0] >= 0:
        yield f"{where}: model.window_size {shape.window_size} is not supported with it. Use (-1, 0)."
    if shape.num_query_groups != shape.num_attention_heads:
        yield (
            f"{where} gives every head its own keys and values: model.num_query_groups {shape.num_query_groups} must "
            f"be model.num_attention_heads, {shape.num_attention_heads}."
        )
    if shape.add_qkv_bias:
        yield f"{where} has no biases on queries, keys and values. Set model.add_qkv_bias = false."


def _experts(shape: GPTShape) -> Iterator[str]:
    experts, topk = shape.num_moe_experts, shape.moe_router_topk
    if shape.moe_shared_expert_gate and not shape.moe_shared_expert_intermediate_size:
        yield (
            "model.moe_shared_expert_gate weighs shared experts, but model.moe_shared_expert_intermediate_size is 0: "
            "there are none. Set it, or model.moe_shared_expert_gate = false."
        )
    if topk > experts:
        yield f"model.moe_router_topk {topk} exceeds model.num_moe_experts {experts}. Use {experts} or less."
    if topk == 1 and shape.moe_router_score_function == "softmax" and not shape.moe_router_pre_softmax:
        yield (
            "model.moe_router_topk 1 with a softmax over the chosen expert alone is always 1, so the router would "
            "never learn. Set model.moe_router_pre_softmax = true."
        )
    if shape.add_bias_linear and shape.moe_shared_expert_intermediate_size:
        yield (
            "model.add_bias_linear is not supported with model.moe_shared_expert_intermediate_size "
            f"{shape.moe_shared_expert_intermediate_size}: megatron-core has no biases for shared experts. Set "
            "model.add_bias_linear = false."
        )


def _expert_groups(shape: GPTShape) -> Iterator[str]:
    """Group-limited routing: the best ``moe_router_group_topk`` groups, and within them the best experts."""
    experts, topk = shape.num_moe_experts, shape.moe_router_topk
    groups, chosen = shape.moe_router_num_groups, shape.moe_router_group_topk
    names = f"model.moe_router_num_groups {groups} and model.moe_router_group_topk {chosen}"
    if not groups and not chosen:
        return
    if not groups or not chosen:
        yield f"{names}: group-limited routing needs both. Set both, or both to 0."
        return
    if experts % groups:
        fits = [size for size in range(1, experts + 1) if experts % size == 0]
        yield (
            f"model.num_moe_experts {experts} is not divisible by model.moe_router_num_groups {groups}. "
            f"Groups that divide {experts} experts: {', '.join(map(str, fits))}."
        )
    if chosen > groups:
        yield f"{names}: a token cannot choose from more groups than there are. Use {groups} or less."
    if shape.moe_router_score_function == "sigmoid" and topk % chosen:
        fits = [size for size in range(1, min(topk, groups) + 1) if topk % size == 0]
        yield (
            f"model.moe_router_topk {topk} is not divisible by model.moe_router_group_topk {chosen}: a group's score "
            f"is the sum of its best topk / group_topk experts. Use one of {', '.join(map(str, fits))}."
        )
    elif not experts % groups and topk > chosen * (experts // groups):
        yield (
            f"model.moe_router_topk {topk} from {chosen} groups needs {-(-topk // chosen)} experts in each, but a "
            f"group has {experts // groups}. Raise model.moe_router_group_topk, or lower model.moe_router_num_groups."
        )


def _balance(shape: GPTShape) -> Iterator[str]:
    if shape.moe_router_load_balancing_type == "none" and shape.moe_aux_loss_coeff > 0:
        yield (
            f"model.moe_aux_loss_coeff {shape.moe_aux_loss_coeff} weighs no loss: model.moe_router_load_balancing_type "
            'is "none". Choose "aux_loss", "seq_aux_loss" or "global_aux_loss", or set the coefficient to 0.'
        )
    groups = shape.moe_router_num_groups
    if shape.moe_router_enable_expert_bias and shape.moe_router_score_function == "softmax" and groups:
        yield (
            f"model.moe_router_enable_expert_bias with model.moe_router_num_groups {groups} needs "
            'model.moe_router_score_function = "sigmoid", found "softmax".'
        )


def _capacity(shape: GPTShape) -> Iterator[str]:
    if shape.moe_pad_expert_input_to_capacity and not shape.moe_expert_capacity_factor:
        yield (
            "model.moe_pad_expert_input_to_capacity fills experts up to a capacity, but "
            "model.moe_expert_capacity_factor is 0: there is none. Set it, for example to 1.25."
        )


def _multi_token_prediction(shape: GPTShape) -> Iterator[str]:
    if shape.position_embedding_type == "learned_absolute":
        yield (
            "model.mtp_num_layers embeds tokens on the last pipeline stage too, where learned positions are not: "
            'set model.position_embedding_type to "rope" or "none", or model.mtp_num_layers = 0.'
        )
