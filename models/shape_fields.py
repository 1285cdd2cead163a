"""The fields of an architecture, a line each: what a recipe's ``model`` section, its checks, ``--help``, the reading of
a ``config.json`` and megatron-core's configuration are made from.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from models.activations import ActivationName
from models.norms import Normalization
from models.spans import (
    BLOCKS,
    EPSILON,
    EXPERTS,
    FACTOR,
    FROM_ONE,
    HEADS,
    LENGTH,
    PART,
    SHARE,
    TOKENS,
    WEIGHT,
    WIDTH,
    Span,
)

PositionEmbedding = Literal["rope", "learned_absolute", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
NormPlacement = Literal["pre", "post", "both"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
Part = Literal["blocks", "latent", "mamba", "delta_net", "experts", "mtp"]
"""What of a model megatron-core's field belongs to: it is set where the model has that."""

Use = Literal["common", "rare", "shapes"]
"""common: many recipes, so that ``--help`` shows it. rare: a few. shapes: hardly any, as a named shape or an imported
config.json brings it, a trait of published models; docs/configuration.md lists it apart."""

SAME = "the same"


@dataclass(kw_only=True, slots=True, frozen=True)
class Declared:
    """What is known of a field beside its type, its default and the docstring below it."""

    span: Span | None = None
    """What its number may be."""
    zero_is_none: bool = False
    """0, which ``span`` does not have, says that there is none, or that it follows from others."""
    use: Use = "rare"
    """Who sets it."""
    exported: bool = True
    """It says something about the model; off: about its training, so that an exported model has no use for it."""
    megatron: str = ""
    """megatron-core's field of the same value (None where 0 is none); ``SAME``: of the same name."""
    part: Part = "blocks"
    megatron_lm: bool = True
    """Megatron-LM core_r0.19.0 has an argument for it; off: a model in which it is not the default is not written for
    Megatron-LM, which would make another one of its weights."""


def declare(default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """A dataclass field. about: as ``Declared``."""
    return dataclasses.field(default=default, metadata={"declared": Declared(**about)})


same = partial(declare, megatron=SAME)
of_latent, of_mamba, of_delta_net, of_experts, of_mtp = (
    partial(declare, part=part, megatron=SAME) for part in ("latent", "mamba", "delta_net", "experts", "mtp")
)


@dataclass(kw_only=True, slots=True, frozen=True)
class ShapeFields:
    """Of ``GPTShape``, which has what follows from them."""

    num_layers: int = declare(span=BLOCKS, use="common")
    """Blocks (attention + MLP) of the whole model; of a hybrid_layer_pattern its letters."""

    hidden_size: int = same(span=WIDTH, use="common")
    """Width of the residual stream."""

    ffn_hidden_size: int = same(span=WIDTH, use="common")
    """Inner width of the MLP; a gated MLP has two projections of this width."""

    num_attention_heads: int = same(span=HEADS, use="common")
    """Query heads of each attention."""

    num_query_groups: int = same(span=HEADS, use="common")
    """Key-value heads, each shared by num_attention_heads / num_query_groups heads (arXiv:2305.13245)."""

    kv_channels: int = same(span=WIDTH)
    """Width of one head. Setting hidden_size or num_attention_heads makes it their quotient."""

    normalization: Normalization = same(use="common")
    """Before attention, MLP and output layer. RMSNorm has no bias and no mean (arXiv:1910.07467)."""

    norm_epsilon: float = declare(1e-5, span=EPSILON, megatron="layernorm_epsilon")
    """Added to the variance (LayerNorm) or the mean square (RMSNorm)."""

    activation: ActivationName = declare(use="common")
    """Of the MLP. swiglu, geglu and quick_geglu are gated (arXiv:2002.05202); gelu is GPT-2's tanh approximation,
    quick_geglu's is x sigmoid(1.702 x)."""

    activation_func_clamp_value: float = same(0.0, span=FACTOR, zero_is_none=True, use="shapes")
    """Of a gated MLP: the gate is at most this, the other projection within plus and minus this (gpt-oss: 7). 0: no."""

    glu_linear_offset: float = same(0.0, use="shapes")
    """Of a gated MLP: added to the projection that its gate multiplies (gpt-oss: 1)."""

    add_bias_linear: bool = same()
    """Biases in every linear layer of the blocks, routers and experts included."""

    add_qkv_bias: bool = same(False)
    """A bias in the query-key-value projection, whatever add_bias_linear says."""

    attention_out_bias: bool = declare(False, use="shapes")
    """A bias in attention's output projection, whatever add_bias_linear says."""

    mlp_bias: bool = declare(False, use="shapes")
    """Biases in both linear layers of dense MLPs, whatever add_bias_linear says."""

    norm_placement: NormPlacement = declare("pre", megatron_lm=False, use="shapes")
    """pre: attention and MLP read a normed stream; post: what they add to it is normed (OLMo-2); both (Gemma-2)."""

    layernorm_zero_centered_gamma: bool = same(False, use="shapes")
    """Norms multiply by 1 + weight, so that weight decay pulls them to 1 (Gemma; Nemotron's LayerNorm1P)."""

    qk_layernorm: bool = same(False)
    """Normalise each head's queries and keys."""

    qk_layernorm_full_width: bool = declare(False, megatron_lm=False, use="shapes")
    """With qk_layernorm: one norm over the queries of all heads, one over the keys of all groups (OLMo-2)."""

    clip_qkv: float = declare(0.0, span=FACTOR, zero_is_none=True, megatron_lm=False, use="shapes")
    """Queries, keys and values, behind their norms, are at most this, and at least minus this (OLMoE). 0: they stay."""

    parallel_residual: bool = declare(False, megatron_lm=False, use="shapes")
    """Attention and MLP of a block read the same stream, each through its own norm (GPT-NeoX)."""

    residual_multiplier: float = declare(1.0, span=FACTOR, megatron_lm=False, use="shapes")
    """What attention and MLP add to the residual stream is multiplied by this (Granite)."""

    embedding_multiplier: float = declare(1.0, span=FACTOR, megatron_lm=False, use="shapes")
    """Word embeddings are multiplied by this (Granite; Gemma by sqrt(hidden_size))."""

    logits_scaling: float = declare(1.0, span=FACTOR, megatron_lm=False, use="shapes")
    """Logits are divided by this (Granite)."""

    final_logit_softcapping: float = declare(0.0, span=FACTOR, zero_is_none=True, megatron_lm=False, use="shapes")
    """Logits become cap x tanh(logits / cap) (Gemma-2, arXiv:2408.00118). 0: they stay."""

    attn_logit_softcapping: float = declare(0.0, span=FACTOR, zero_is_none=True, megatron_lm=False, use="shapes")
    """Attention's scores become cap x tanh(scores / cap) (Gemma-2). 0: they stay."""

    softmax_scale: float = same(0.0, span=FACTOR, zero_is_none=True, use="shapes")
    """Queries times keys are multiplied by this before the softmax. 0: 1 / sqrt(kv_channels)."""

    qk_l2_norm: bool = declare(False, use="shapes")
    """Give each head's queries and keys a mean square of 1, in blocks with RoPE (Llama-4)."""

    softmax_type: SoftmaxType = same("vanilla", use="shapes")
    """learnable: each head's softmax has one more logit, which is trained and takes weight from all tokens (gpt-oss);
    off-by-one: that logit is 0."""

    position_embedding_type: PositionEmbedding = declare(use="common")
    """rope: rotate queries and keys (arXiv:2104.09864); learned_absolute: a trained vector per position."""

    max_position_embeddings: int = declare(span=LENGTH)
    """Positions of the learned table, in tokens; with rope only what the architecture was published for."""

    rotary_base: float = of_latent(10_000, span=FROM_ONE, use="common")
    """RoPE's base: the longest wavelength is about 2 pi times this many tokens."""

    rotary_base_local: float = declare(0, span=FROM_ONE, zero_is_none=True, megatron_lm=False, use="shapes")
    """RoPE's base in windowed blocks, which rope_scaling then leaves as they are (Gemma-3, OLMo-3). 0: as elsewhere."""

    rotary_interleaved: bool = same(False, use="shapes")
    """RoPE turns channels 0 and 1, 2 and 3, ... together (GLM-4). Off: each with the one half the turned width on."""

    rotary_percent: float = of_latent(1.0, span=PART)
    """Fraction of each head's channels that RoPE turns."""

    rope_scaling: RopeScaling = declare("none")
    """How RoPE is stretched: linear (arXiv:2306.15595), llama3 (as Llama 3.1), yarn (arXiv:2309.00071), longrope
    (arXiv:2402.13753)."""

    rope_scaling_factor: float = of_latent(1.0, span=FROM_ONE, megatron="rotary_scaling_factor")
    """New context length / original one."""

    rope_low_freq_factor: float = declare(1.0, span=FACTOR, use="shapes")
    """llama3: wavelengths above original context / this get the whole factor."""

    rope_high_freq_factor: float = declare(4.0, span=FACTOR, use="shapes")
    """llama3: wavelengths below original context / this stay as they are."""

    rope_original_max_position_embeddings: int = of_latent(
        8192, span=TOKENS, megatron="original_max_position_embeddings"
    )
    """llama3, yarn, longrope: context length in tokens before stretching."""

    rope_attention_factor: float = declare(0.0, span=FACTOR, zero_is_none=True, use="shapes")
    """What scaled RoPE multiplies queries and keys by. 0: as yarn, longrope or the others have it."""

    rope_short_factor: tuple[float, ...] = declare((), use="shapes")
    """longrope: what each turned pair of channels' wavelength is multiplied by, where model.seq_length is no longer
    than the original context."""

    rope_long_factor: tuple[float, ...] = declare((), use="shapes")
    """longrope: likewise, where model.seq_length is longer than the original context."""

    yarn_beta_fast: float = of_latent(32.0, span=FACTOR, megatron="beta_fast", use="shapes")
    """yarn: channels with more turns than this over the original context stay as they are."""

    yarn_beta_slow: float = of_latent(1.0, span=FACTOR, megatron="beta_slow", use="shapes")
    """yarn: channels with fewer turns than this over the original context get the whole factor."""

    yarn_correction_range_round_to_int: bool = declare(True, use="shapes")
    """yarn: round the numbers of the channels between which it changes to whole ones. Off: gpt-oss."""

    mscale: float = of_latent(1.0, span=WEIGHT, use="shapes")
    """yarn with latent attention: scale of rotated channels, over that of mscale_all_dim."""

    mscale_all_dim: float = of_latent(0.0, span=WEIGHT, use="shapes")
    """yarn with latent attention: the softmax is scaled by (0.1 mscale_all_dim ln(rope_scaling_factor) + 1)^2."""

    no_rope_freq: str = declare("0", use="shapes")
    """Blocks without RoPE: "N" (every N-th; "0": none) or a list with 1 for such blocks, e.g. "[0,0,0,1]*4"."""

    window_size: tuple[int, int] = declare((-1, 0))
    """Sliding window: tokens before and after its own that a query sees. (-1, 0): all before it."""

    window_attn_skip_freq: str = declare("0")
    """Blocks that see everything in spite of window_size: "N" (every N-th; "0": none) or a list with 1 for windowed."""

    attention_chunk_size: int = declare(0, span=TOKENS, zero_is_none=True, megatron_lm=False, use="shapes")
    """Blocks with RoPE see their own chunk of so many tokens only (Llama-4). 0: all before it."""

    attn_scale: float = declare(0.0, span=FACTOR, zero_is_none=True, megatron_lm=False, use="shapes")
    """In blocks without RoPE, queries at position p are multiplied by 1 + this x ln(1 + floor((p + 1) / floor_scale))
    (Llama-4, arXiv:2501.19399). 0: they stay."""

    attn_scale_all_blocks: bool = declare(False, use="shapes")
    """attn_scale in every block, of floor(p / floor_scale) (Ministral 3)."""

    floor_scale: int = declare(8192, span=TOKENS, use="shapes")
    """Tokens after which queries first grow by attn_scale."""

    multi_latent_attention: bool = of_latent(False)
    """Keys and values from one narrow latent vector per token (MLA, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int = of_latent(0, span=WIDTH, zero_is_none=True)
    """MLA: width of the queries' latent vector; 0: queries are projected directly."""

    kv_lora_rank: int = of_latent(512, span=WIDTH)
    """MLA: width of the latent vector of keys and values."""

    qk_head_dim: int = of_latent(128, span=WIDTH)
    """MLA: channels of a head's queries and keys that carry no position."""

    qk_pos_emb_head_dim: int = of_latent(64, span=WIDTH)
    """MLA: channels of a head's queries, and of the one key for all heads, that RoPE turns."""

    v_head_dim: int = of_latent(128, span=WIDTH)
    """MLA: channels of a head's values."""

    latent_norm_epsilon: float = declare(0.0, span=EPSILON, zero_is_none=True, megatron_lm=False, use="shapes")
    """MLA: norm_epsilon of the norms of latents. 0: norm_epsilon."""

    num_moe_experts: int = of_experts(0, span=EXPERTS, zero_is_none=True, use="common")
    """Experts of each mixture layer. 0: no mixture, a dense MLP everywhere."""

    moe_layer_freq: str = declare("1")
    """Blocks with experts: "N" (every N-th, from the first) or a list with 1 for them, e.g. "[0]*3+[1]*58"."""

    moe_ffn_hidden_size: int = of_experts(0, span=WIDTH, zero_is_none=True, use="common")
    """Inner width of one expert. 0: ffn_hidden_size."""

    moe_shared_expert_intermediate_size: int = of_experts(0, span=WIDTH, zero_is_none=True)
    """Inner width of all shared experts together, which every token passes through. 0: none."""

    moe_shared_expert_gate: bool = of_experts(False, use="shapes")
    """Multiply what shared experts give by the sigmoid of a product of the token with one vector (Qwen2-MoE)."""

    moe_apply_probs_on_input: bool = of_experts(False, use="shapes")
    """An expert's weight multiplies what it reads, not what it gives (Llama-4). Needs moe_router_topk 1."""

    moe_router_topk: int = of_experts(2, span=EXPERTS, use="common")
    """Experts that each token is sent to."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = of_experts("softmax")
    """What makes scores of the router's logits; sigmoid scores are normalised over the chosen experts."""

    moe_router_pre_softmax: bool = of_experts(False)
    """Softmax over all experts, before the choice, so that weights do not sum to 1. Off: over the chosen ones."""

    moe_router_num_groups: int = of_experts(0, span=EXPERTS, zero_is_none=True, use="shapes")
    """Groups that experts are divided into for group-limited routing. 0: no groups."""

    moe_router_group_topk: int = of_experts(0, span=EXPERTS, zero_is_none=True, use="shapes")
    """Groups that a token may choose experts from: with softmax those with the best expert (DeepSeek-V2), with sigmoid
    those whose best topk / group_topk experts add up to most (V3)."""

    moe_router_topk_scaling_factor: float = of_experts(1.0, span=FACTOR)
    """What the chosen experts' weights are multiplied by."""

    moe_router_enable_expert_bias: bool = of_experts(False)
    """A bias per expert, for the choice only, moved after each step against the load (arXiv:2408.15664). With softmax
    it is added to the softmax over all experts (ERNIE-4.5)."""

    moe_router_bias_update_rate: float = of_experts(1e-3, span=WEIGHT, exported=False)
    """How far a step moves the expert bias."""

    moe_router_load_balancing_type: LoadBalancing = of_experts("none", use="common", exported=False)
    """Balancing loss: over a microbatch (aux_loss), each sample, or the global batch so far (global_aux_loss)."""

    moe_aux_loss_coeff: float = of_experts(0.0, span=WEIGHT, exported=False)
    """Weight of the balancing loss."""

    moe_z_loss_coeff: float = of_experts(0.0, span=WEIGHT, zero_is_none=True, exported=False)
    """Weight of the router's z loss, which keeps its logits small (arXiv:2202.08906). 0: off."""

    moe_expert_capacity_factor: float = of_experts(0.0, span=FACTOR, zero_is_none=True, exported=False)
    """An expert takes at most this many times its even share of a microbatch's tokens; more are dropped. 0: none is."""

    moe_pad_expert_input_to_capacity: bool = of_experts(False, exported=False)
    """Fill every expert up to its capacity, for fixed sizes. Needs moe_expert_capacity_factor."""

    moe_token_drop_policy: Literal["probs", "position"] = of_experts("probs", exported=False)
    """Which tokens a full expert keeps: those with the highest weights, or the first."""

    hybrid_layer_pattern: str = declare("")
    """One letter a layer, instead of blocks of attention and MLP: M (Mamba-2), *, + (latent attention), -, E (experts).
    Sets num_layers. "": blocks."""

    mamba_state_dim: int = of_mamba(128, span=HEADS, use="shapes")
    """Mamba-2: channels of a head's state (arXiv:2405.21060)."""

    mamba_head_dim: int = of_mamba(64, span=HEADS, use="shapes")
    """Mamba-2: channels of a head."""

    mamba_num_groups: int = of_mamba(8, span=HEADS, use="shapes")
    """Mamba-2: groups of heads that write and read states alike."""

    mamba_num_heads: int = of_mamba(0, span=HEADS, zero_is_none=True, use="shapes")
    """Mamba-2: heads. 0: as many as make 2 x hidden_size channels."""

    attention_output_gate: bool = same(False, use="shapes")
    """Multiply what each head of attention returns by the sigmoid of a projection of its own (arXiv:2505.06708)."""

    linear_attention_freq: str = declare("0")
    """Blocks with a gated delta net (arXiv:2412.06464) in place of attention: "N" (all but every N-th; "0": none) or a
    list with 1 for such blocks, e.g. "[1,1,1,0]*12"."""

    linear_key_head_dim: int = of_delta_net(128, span=HEADS, use="shapes")
    """Gated delta net: channels of a head's queries and keys."""

    linear_value_head_dim: int = of_delta_net(128, span=HEADS, use="shapes")
    """Gated delta net: channels of a head's values."""

    linear_num_key_heads: int = of_delta_net(16, span=HEADS, use="shapes")
    """Gated delta net: heads of queries and keys."""

    linear_num_value_heads: int = of_delta_net(32, span=HEADS, use="shapes")
    """Gated delta net: heads of values, each key's equally many."""

    mtp_num_layers: int = of_mtp(0, span=BLOCKS, zero_is_none=True)
    """Depths of multi-token prediction, each a block that predicts one token further (arXiv:2412.19437). 0: off."""

    mtp_loss_scaling_factor: float = of_mtp(0.1, span=WEIGHT, exported=False)
    """Weight of the mean loss of the multi-token-prediction depths."""

    untie_embeddings_and_output_weights: bool = declare(use="common")
    """Give the output layer a matrix of its own instead of the word embeddings."""

    vocab_size: int = declare(span=TOKENS, use="common")
    """Token ids; more than the tokenizer has is allowed. None: the tokenizer's."""

    make_vocab_size_divisible_by: int = declare(128, span=WIDTH, exported=False)
    """Embedding rows are rounded up to a multiple of this; TP never changes the padding."""

    hidden_dropout: float = same(span=SHARE, use="common", exported=False)
    """Probability of dropping an element of the embedding's, attention's or MLP's output."""

    attention_dropout: float = same(span=SHARE, use="common", exported=False)
    """Probability of dropping an attention weight."""

    init_method_std: float = same(0.02, span=WEIGHT, exported=False)
    """Standard deviation of initial matrices; output projections get this / sqrt(2 num_layers)."""

    use_mup: bool = declare(False, megatron_lm=False)
    """Maximal update parametrization (arXiv:2203.03466): initial weights, learning rates, logits and attention's scores
    are scaled by width, so that a learning rate found at mup_base_hidden_size is right at hidden_size."""

    mup_base_hidden_size: int = declare(0, span=WIDTH, zero_is_none=True)
    """muP: width at which nothing is scaled. 0: hidden_size."""

    mup_embedding_mult: float = declare(1.0, span=FACTOR)
    """muP: embeddings of words and positions are multiplied by this."""

    mup_output_mult: float = declare(1.0, span=FACTOR)
    """muP: logits are multiplied by this. 1: by mup_base_hidden_size / hidden_size."""

    mup_base_head_dim: float = declare(0.0, span=FACTOR, zero_is_none=True)
    """muP: queries times keys are multiplied by sqrt(this) / kv_channels^mup_attn_scale_power. 0: the root is 1."""

    mup_attn_scale_power: float = declare(1.0, span=Span(0, 2))
    """muP: 1 for its own scores, 0.5 for those of a model without it. Latent attention keeps its own."""

    hf_model_type: str = declare("", exported=False, use="shapes")
    """transformers' model_type that an export writes where it fits, as an import leaves it. "": the first that fits."""


def declared() -> Iterator[tuple[str, Declared]]:
    """Each field of ``ShapeFields`` with what is known of it."""
    for field in dataclasses.fields(ShapeFields):
        yield field.name, field.metadata["declared"]


SPANS: Mapping[str, Span] = {name: about.span for name, about in declared() if about.span is not None}

MEGATRON_NAMES: Mapping[str, str] = {
    name: name if about.megatron == SAME else about.megatron for name, about in declared() if about.megatron
}
"""Our field -> megatron-core's of the same value."""


def megatron_settings(shape: ShapeFields, has: Callable[[Part], bool]) -> dict[str, Any]:
    """megatron-core's fields with the value of one of our fields, of those parts that the model has."""
    found = {}
    for name, about in declared():
        if about.megatron and has(about.part):
            value = getattr(shape, name)
            found[MEGATRON_NAMES[name]] = None if about.zero_is_none and not value else value
    return found
