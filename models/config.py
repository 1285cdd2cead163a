"""The ``model`` section of a recipe."""

from dataclasses import asdict, dataclass
from typing import Literal

from models.activations import ActivationName
from models.families import named, unknown_shape
from models.norms import Normalization
from models.owned_fields import OWNED, UNSUPPORTED
from models.ranges import range_problems
from models.shapes import LoadBalancing, NormPlacement, PositionEmbedding, RopeScaling, SoftmaxType
from parallel.megatron_fields import megatron_field_problems, parse

MOST_NAME = 100
"""Characters of model.name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """What is trained. A named shape fills every field that is None."""

    shape: str = "debug"
    """Named architecture, fills every field that is not set: debug, demo, gpt2, gpt3_175b, llama3_8b, ..."""

    name: str | None = None
    """What the model is called where a start, a report or a checkpoint names it; an import notes its own. None:
    model.shape."""

    seq_length: int = 4096
    """Tokens per sample."""

    num_layers: int | None = None
    """Blocks (attention + MLP) of the whole model; of a hybrid_layer_pattern its letters."""

    hidden_size: int | None = None
    """Width of the residual stream."""

    ffn_hidden_size: int | None = None
    """Inner width of the MLP; a gated MLP has two projections of this width."""

    num_attention_heads: int | None = None
    """Query heads of each attention."""

    num_query_groups: int | None = None
    """Key-value heads, each shared by num_attention_heads / num_query_groups heads (arXiv:2305.13245)."""

    kv_channels: int | None = None
    """Width of one head. Setting hidden_size or num_attention_heads makes it their quotient."""

    normalization: Normalization | None = None
    """Before attention, MLP and output layer. RMSNorm has no bias and no mean (arXiv:1910.07467)."""

    norm_epsilon: float | None = None
    """Added to the variance (LayerNorm) or the mean square (RMSNorm)."""

    activation: ActivationName | None = None
    """Of the MLP. swiglu, geglu and quick_geglu are gated (arXiv:2002.05202); gelu is GPT-2's tanh approximation,
    quick_geglu's is x sigmoid(1.702 x)."""

    activation_func_clamp_value: float | None = None
    """Of a gated MLP: the gate is at most this, the other projection within plus and minus this (gpt-oss: 7). 0: no."""

    glu_linear_offset: float | None = None
    """Of a gated MLP: added to the projection that its gate multiplies (gpt-oss: 1)."""

    add_bias_linear: bool | None = None
    """Biases in every linear layer of the blocks, routers and experts included."""

    add_qkv_bias: bool | None = None
    """A bias in the query-key-value projection, whatever add_bias_linear says."""

    attention_out_bias: bool | None = None
    """A bias in attention's output projection, whatever add_bias_linear says."""

    mlp_bias: bool | None = None
    """Biases in both linear layers of dense MLPs, whatever add_bias_linear says."""

    norm_placement: NormPlacement | None = None
    """pre: attention and MLP read a normed stream; post: what they add to it is normed (OLMo-2); both (Gemma-2)."""

    layernorm_zero_centered_gamma: bool | None = None
    """Norms multiply by 1 + weight, so that weight decay pulls them to 1 (Gemma; Nemotron's LayerNorm1P)."""

    qk_layernorm: bool | None = None
    """Normalise each head's queries and keys."""

    qk_layernorm_full_width: bool | None = None
    """With qk_layernorm: one norm over the queries of all heads, one over the keys of all groups (OLMo-2)."""

    parallel_residual: bool | None = None
    """Attention and MLP of a block read the same stream, each through its own norm (GPT-NeoX)."""

    residual_multiplier: float | None = None
    """What attention and MLP add to the residual stream is multiplied by this (Granite)."""

    embedding_multiplier: float | None = None
    """Word embeddings are multiplied by this (Granite; Gemma by sqrt(hidden_size))."""

    logits_scaling: float | None = None
    """Logits are divided by this (Granite)."""

    final_logit_softcapping: float | None = None
    """Logits become cap x tanh(logits / cap) (Gemma-2, arXiv:2408.00118). 0: they stay."""

    attn_logit_softcapping: float | None = None
    """Attention's scores become cap x tanh(scores / cap) (Gemma-2). 0: they stay."""

    softmax_scale: float | None = None
    """Queries times keys are multiplied by this before the softmax. 0: 1 / sqrt(kv_channels)."""

    qk_l2_norm: bool | None = None
    """Give each head's queries and keys a mean square of 1, in blocks with RoPE (Llama-4)."""

    softmax_type: SoftmaxType | None = None
    """learnable: each head's softmax has one more logit, which is trained and takes weight from all tokens (gpt-oss);
    off-by-one: that logit is 0."""

    position_embedding_type: PositionEmbedding | None = None
    """rope: rotate queries and keys (arXiv:2104.09864); learned_absolute: a trained vector per position."""

    max_position_embeddings: int | None = None
    """Positions of the learned table, in tokens; with rope only what the architecture was published for."""

    rotary_base: float | None = None
    """RoPE's base: the longest wavelength is about 2 pi times this many tokens."""

    rotary_base_local: float | None = None
    """RoPE's base in windowed blocks, which rope_scaling then leaves as they are (Gemma-3, OLMo-3). 0: as elsewhere."""

    rotary_interleaved: bool | None = None
    """RoPE turns channels 0 and 1, 2 and 3, ... together (GLM-4). Off: each with the one half the turned width on."""

    rotary_percent: float | None = None
    """Fraction of each head's channels that RoPE turns."""

    rope_scaling: RopeScaling | None = None
    """How RoPE is stretched: linear (arXiv:2306.15595), llama3 (as Llama 3.1), yarn (arXiv:2309.00071), longrope
    (arXiv:2402.13753)."""

    rope_scaling_factor: float | None = None
    """New context length / original one."""

    rope_low_freq_factor: float | None = None
    """llama3: wavelengths above original context / this get the whole factor."""

    rope_high_freq_factor: float | None = None
    """llama3: wavelengths below original context / this stay as they are."""

    rope_original_max_position_embeddings: int | None = None
    """llama3, yarn, longrope: context length in tokens before stretching."""

    rope_attention_factor: float | None = None
    """What scaled RoPE multiplies queries and keys by. 0: as yarn, longrope or the others have it."""

    rope_short_factor: tuple[float, ...] | None = None
    """longrope: what each turned pair of channels' wavelength is multiplied by, where model.seq_length is no longer
    than the original context."""

    rope_long_factor: tuple[float, ...] | None = None
    """longrope: likewise, where model.seq_length is longer than the original context."""

    yarn_beta_fast: float | None = None
    """yarn: channels with more turns than this over the original context stay as they are."""

    yarn_beta_slow: float | None = None
    """yarn: channels with fewer turns than this over the original context get the whole factor."""

    yarn_correction_range_round_to_int: bool | None = None
    """yarn: round the numbers of the channels between which it changes to whole ones. Off: gpt-oss."""

    mscale: float | None = None
    """yarn with latent attention: scale of rotated channels, over that of mscale_all_dim."""

    mscale_all_dim: float | None = None
    """yarn with latent attention: the softmax is scaled by (0.1 mscale_all_dim ln(rope_scaling_factor) + 1)^2."""

    no_rope_freq: str | None = None
    """Blocks without RoPE: "N" (every N-th; "0": none) or a list with 1 for such blocks, e.g. "[0,0,0,1]*4"."""

    window_size: tuple[int, int] | None = None
    """Sliding window: tokens before and after its own that a query sees. (-1, 0): all before it."""

    window_attn_skip_freq: str | None = None
    """Blocks that see everything in spite of window_size: "N" (every N-th; "0": none) or a list with 1 for windowed."""

    attention_chunk_size: int | None = None
    """Blocks with RoPE see their own chunk of so many tokens only (Llama-4). 0: all before it."""

    attn_scale: float | None = None
    """In blocks without RoPE, queries at position p are multiplied by 1 + this x ln(1 + floor((p + 1) / floor_scale))
    (Llama-4, arXiv:2501.19399). 0: they stay."""

    attn_scale_all_blocks: bool | None = None
    """attn_scale in every block, of floor(p / floor_scale) (Ministral 3)."""

    floor_scale: int | None = None
    """Tokens after which queries first grow by attn_scale."""

    multi_latent_attention: bool | None = None
    """Keys and values from one narrow latent vector per token (MLA, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int | None = None
    """MLA: width of the queries' latent vector; 0: queries are projected directly."""

    kv_lora_rank: int | None = None
    """MLA: width of the latent vector of keys and values."""

    qk_head_dim: int | None = None
    """MLA: channels of a head's queries and keys that carry no position."""

    qk_pos_emb_head_dim: int | None = None
    """MLA: channels of a head's queries, and of the one key for all heads, that RoPE turns."""

    v_head_dim: int | None = None
    """MLA: channels of a head's values."""

    latent_norm_epsilon: float | None = None
    """MLA: norm_epsilon of the norms of latents. 0: norm_epsilon."""

    num_moe_experts: int | None = None
    """Experts of each mixture layer. 0: no mixture, a dense MLP everywhere."""

    moe_layer_freq: str | None = None
    """Blocks with experts: "N" (every N-th, from the first) or a list with 1 for them, e.g. "[0]*3+[1]*58"."""

    moe_ffn_hidden_size: int | None = None
    """Inner width of one expert. 0: ffn_hidden_size."""

    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of all shared experts together, which every token passes through. 0: none."""

    moe_shared_expert_gate: bool | None = None
    """Multiply what shared experts give by the sigmoid of a product of the token with one vector (Qwen2-MoE)."""

    moe_apply_probs_on_input: bool | None = None
    """An expert's weight multiplies what it reads, not what it gives (Llama-4). Needs moe_router_topk 1."""

    moe_router_topk: int | None = None
    """Experts that each token is sent to."""

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """What makes scores of the router's logits; sigmoid scores are normalised over the chosen experts."""

    moe_router_pre_softmax: bool | None = None
    """Softmax over all experts, before the choice, so that weights do not sum to 1. Off: over the chosen ones."""

    moe_router_num_groups: int | None = None
    """Groups that experts are divided into for group-limited routing. 0: no groups."""

    moe_router_group_topk: int | None = None
    """Groups that a token may choose experts from: with softmax those with the best expert (DeepSeek-V2), with sigmoid
    those whose best topk / group_topk experts add up to most (V3)."""

    moe_router_topk_scaling_factor: float | None = None
    """What the chosen experts' weights are multiplied by."""

    moe_router_enable_expert_bias: bool | None = None
    """A bias per expert, for the choice only, moved after each step against the load (arXiv:2408.15664). With softmax
    it is added to the softmax over all experts (ERNIE-4.5)."""

    moe_router_bias_update_rate: float | None = None
    """How far a step moves the expert bias."""

    moe_router_load_balancing_type: LoadBalancing | None = None
    """Balancing loss: over a microbatch (aux_loss), each sample, or the global batch so far (global_aux_loss)."""

    moe_aux_loss_coeff: float | None = None
    """Weight of the balancing loss."""

    moe_z_loss_coeff: float | None = None
    """Weight of the router's z loss, which keeps its logits small (arXiv:2202.08906). 0: off."""

    moe_expert_capacity_factor: float | None = None
    """An expert takes at most this many times its even share of a microbatch's tokens; more are dropped. 0: none is."""

    moe_pad_expert_input_to_capacity: bool | None = None
    """Fill every expert up to its capacity, for fixed sizes. Needs moe_expert_capacity_factor."""

    moe_token_drop_policy: Literal["probs", "position"] | None = None
    """Which tokens a full expert keeps: those with the highest weights, or the first."""

    hybrid_layer_pattern: str | None = None
    """One letter a layer, instead of blocks of attention and MLP: M (Mamba-2), *, + (latent attention), -, E (experts).
    Sets num_layers. "": blocks."""

    mamba_state_dim: int | None = None
    """Mamba-2: channels of a head's state (arXiv:2405.21060)."""

    mamba_head_dim: int | None = None
    """Mamba-2: channels of a head."""

    mamba_num_groups: int | None = None
    """Mamba-2: groups of heads that write and read states alike."""

    mamba_num_heads: int | None = None
    """Mamba-2: heads. 0: as many as make 2 x hidden_size channels."""

    attention_output_gate: bool | None = None
    """Multiply what each head of attention returns by the sigmoid of a projection of its own (arXiv:2505.06708)."""

    linear_attention_freq: str | None = None
    """Blocks with a gated delta net (arXiv:2412.06464) in place of attention: "N" (all but every N-th; "0": none) or a
    list with 1 for such blocks, e.g. "[1,1,1,0]*12"."""

    linear_key_head_dim: int | None = None
    """Gated delta net: channels of a head's queries and keys."""

    linear_value_head_dim: int | None = None
    """Gated delta net: channels of a head's values."""

    linear_num_key_heads: int | None = None
    """Gated delta net: heads of queries and keys."""

    linear_num_value_heads: int | None = None
    """Gated delta net: heads of values, each key's equally many."""

    mtp_num_layers: int | None = None
    """Depths of multi-token prediction, each a block that predicts one token further (arXiv:2412.19437). 0: off."""

    mtp_loss_scaling_factor: float | None = None
    """Weight of the mean loss of the multi-token-prediction depths."""

    untie_embeddings_and_output_weights: bool | None = None
    """Give the output layer a matrix of its own instead of the word embeddings."""

    vocab_size: int | None = None
    """Token ids; more than the tokenizer has is allowed. None: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """Embedding rows are rounded up to a multiple of this; TP never changes the padding."""

    hidden_dropout: float | None = None
    """Probability of dropping an element of the embedding's, attention's or MLP's output."""

    attention_dropout: float | None = None
    """Probability of dropping an attention weight."""

    init_method_std: float | None = None
    """Standard deviation of initial matrices; output projections get this / sqrt(2 num_layers)."""

    hf_model_type: str | None = None
    """transformers' model_type that an export writes where it fits, as an import leaves it. "": the first that fits."""

    megatron: tuple[str, ...] = ()
    """More of mcore's TransformerConfig, as "field=value" strings."""

    @property
    def title(self) -> str:
        """What the model is called."""
        return self.name or self.shape

    def problems(self) -> list[str]:
        """What is wrong within this section alone; ``shape_problems`` checks what results from it."""
        found = [*unknown_shape(self.shape), *range_problems(asdict(self))]
        if self.name is not None and (len(self.name) > MOST_NAME or not self.name.isprintable() or not self.name):
            found.append(f"model.name: expected 1 to {MOST_NAME} printable characters, found {len(self.name)}.")
        if not found:
            found += self._head_problems()
        found += megatron_field_problems("model.megatron", self.megatron, OWNED)
        values = parse(self.megatron)
        return found + [
            f"model.megatron: {name} is not supported: {why}. Leave it out."
            for name, why in UNSUPPORTED.items()
            if values.get(name) not in (None, False, "none")
        ]

    def _head_problems(self) -> list[str]:
        """Whether the derived head width is whole (see ``resolve``)."""
        if self.kv_channels is not None or (self.hidden_size is None and self.num_attention_heads is None):
            return []
        base = named(self.shape)
        hidden = self.hidden_size or base.hidden_size
        heads = self.num_attention_heads or base.num_attention_heads
        if hidden % heads == 0:
            return []
        below, above = hidden // heads * heads, -(-hidden // heads) * heads
        sizes = " or ".join(str(size) for size in (below, above) if size)
        return [
            f"model.hidden_size {hidden} is not divisible by model.num_attention_heads {heads}. "
            f"Use hidden_size {sizes}, or set model.kv_channels (the width of a head) yourself."
        ]
