"""An architecture with nothing left open, and what follows from its numbers.

A *block* is attention + MLP and carries a global number from 0. With ``hybrid_layer_pattern`` it is one of these alone:
a letter of the pattern.
"""

import math
from dataclasses import dataclass
from typing import Literal

from models.activations import ACTIVATIONS, ActivationName
from models.frequencies import per_block
from models.norms import Normalization
from models.symbols import ATTENTIONS

PositionEmbedding = Literal["rope", "learned_absolute", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
NormPlacement = Literal["pre", "post", "both"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]


@dataclass(kw_only=True, slots=True, frozen=True)
class GPTShape:
    """One architecture with nothing left open. Fields mean what ``ModelConfig`` says of the same names."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    normalization: Normalization
    activation: ActivationName
    add_bias_linear: bool
    position_embedding_type: PositionEmbedding
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    hidden_dropout: float
    attention_dropout: float
    norm_epsilon: float = 1e-5
    add_qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    norm_placement: NormPlacement = "pre"
    layernorm_zero_centered_gamma: bool = False
    qk_layernorm: bool = False
    qk_layernorm_full_width: bool = False
    parallel_residual: bool = False
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float = 0.0
    attn_logit_softcapping: float = 0.0
    softmax_scale: float = 0.0
    qk_l2_norm: bool = False
    softmax_type: SoftmaxType = "vanilla"
    activation_func_clamp_value: float = 0.0
    glu_linear_offset: float = 0.0
    rotary_base: float = 10_000
    rotary_base_local: float = 0
    rotary_interleaved: bool = False
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling = "none"
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 8192
    rope_attention_factor: float = 0.0
    rope_short_factor: tuple[float, ...] = ()
    rope_long_factor: tuple[float, ...] = ()
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_correction_range_round_to_int: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    no_rope_freq: str = "0"
    window_size: tuple[int, int] = (-1, 0)
    window_attn_skip_freq: str = "0"
    attention_chunk_size: int = 0
    attn_scale: float = 0.0
    attn_scale_all_blocks: bool = False
    floor_scale: int = 8192
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_epsilon: float = 0.0
    num_moe_experts: int = 0
    moe_layer_freq: str = "1"
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_apply_probs_on_input: bool = False
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_load_balancing_type: LoadBalancing = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_expert_capacity_factor: float = 0.0
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    hybrid_layer_pattern: str = ""
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int = 0
    attention_output_gate: bool = False
    linear_attention_freq: str = "0"
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    init_method_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    hf_model_type: str = ""

    @property
    def qkv_bias(self) -> bool:
        """Whether the query-key-value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def proj_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.add_bias_linear or self.attention_out_bias

    @property
    def fc_bias(self) -> bool:
        """Whether both linear layers of a dense MLP have a bias."""
        return self.add_bias_linear or self.mlp_bias

    @property
    def pre_norm(self) -> bool:
        """Whether attention and MLP read a normed residual stream."""
        return self.norm_placement != "post"

    @property
    def post_norm(self) -> bool:
        """Whether what attention and MLP add to the residual stream is normed."""
        return self.norm_placement != "pre"

    @property
    def has_local_rope(self) -> bool:
        """Whether windowed blocks have rotary frequencies of their own."""
        return self.rotary_base_local > 0 and any(self.window_blocks)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Of each block, HybridModel's symbol of each of its sublayers: "*-" is attention, then an MLP; "G" is a gated
        delta net; "M" is a Mamba-2 mixer alone."""
        if self.hybrid_layer_pattern:
            return tuple(self.hybrid_layer_pattern)
        attention = "+" if self.multi_latent_attention else "*"
        kinds = zip(self.linear_blocks, self.moe_blocks, strict=True)
        return tuple(("G" if linear else attention) + ("E" if moe else "-") for linear, moe in kinds)

    @property
    def linear_blocks(self) -> tuple[bool, ...]:
        """Whether each block has a gated delta net (linear attention) in place of attention."""
        if self.hybrid_layer_pattern:
            return tuple(symbol == "G" for symbol in self.hybrid_layer_pattern)
        return per_block(self.linear_attention_freq, self.num_layers, every_nth=_linear)

    @property
    def moe_blocks(self) -> tuple[bool, ...]:
        """Whether each block's MLP is a mixture of experts."""
        if self.hybrid_layer_pattern:
            return tuple(symbol == "E" for symbol in self.hybrid_layer_pattern)
        if not self.num_moe_experts:
            return (False,) * self.num_layers
        return per_block(self.moe_layer_freq, self.num_layers, every_nth=_mixture)

    @property
    def window_blocks(self) -> tuple[bool, ...]:
        """Whether each block's attention sees ``window_size`` only."""
        if self.window_size[0] < 0:
            return (False,) * self.num_layers
        return per_block(self.window_attn_skip_freq, self.num_layers, every_nth=_windowed)

    @property
    def chunk_blocks(self) -> tuple[bool, ...]:
        """Whether each block's attention sees its own chunk of tokens only: those with RoPE."""
        return tuple(self.attention_chunk_size > 0 and not without for without in self.no_rope_blocks)

    @property
    def no_rope_blocks(self) -> tuple[bool, ...]:
        """Whether each block's attention goes without RoPE."""
        return per_block(self.no_rope_freq, self.num_layers, every_nth=_without_rope)

    @property
    def has_attention(self) -> bool:
        """Whether any block attends: a pattern may have none that does."""
        return any(set(symbols) & set(ATTENTIONS) for symbols in self.blocks)

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 mixer: as many as make it twice as wide as the residual stream, unless stated."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up, the same on every layout."""
        multiple = self.make_vocab_size_divisible_by
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels

    @property
    def query_size(self) -> int:
        """Width of all queries together, and of what attention hands to its output projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Width of all keys together, and of all values."""
        return self.num_query_groups * self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that RoPE turns."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (GLU), so that fc1 has 2f rows, the gate's f first."""
        return ACTIVATIONS[self.activation].gated

    @property
    def tied(self) -> bool:
        """Whether the word embeddings are also the output layer's weight."""
        return not self.untie_embeddings_and_output_weights


def _mixture(number: int, n: int) -> bool:
    """Megatron's rule: every n-th layer from the first is a mixture of experts; 0: none is."""
    return n > 0 and number % n == 0


def _without_rope(number: int, n: int) -> bool:
    """Megatron's rule: every n-th layer, counted from 1, goes without RoPE; 0: none does."""
    return n > 0 and (number + 1) % n == 0


def _linear(number: int, n: int) -> bool:
    """Megatron's rule: every n-th layer, counted from 1, attends, and the others have linear attention; 0: none has."""
    return n > 0 and (number + 1) % n != 0


def _windowed(number: int, n: int) -> bool:
    """Megatron's rule: every n-th layer, counted from 1, sees everything; 0: none does."""
    return n == 0 or (number + 1) % n != 0
