"""An architecture with nothing left open, and what follows from its numbers.

A *block* is attention + MLP and carries a global number from 0. With ``hybrid_layer_pattern`` it is one of these alone:
a letter of the pattern.
"""

import math
from dataclasses import dataclass

from models.activations import ACTIVATIONS
from models.frequencies import per_block
from models.shape_fields import ShapeFields
from models.symbols import ATTENTIONS


@dataclass(kw_only=True, slots=True, frozen=True)
class GPTShape(ShapeFields):
    """One architecture with nothing left open: its fields (models/shape_fields.py), and what follows from them."""

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
    def width_mult(self) -> float:
        """muP: how many times the base model's width this one has; 1 without it."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def logits_divisor(self) -> float:
        """What logits are divided by: Granite's number, and muP's."""
        if not self.use_mup:
            return self.logits_scaling
        return self.logits_scaling * (self.width_mult if self.mup_output_mult == 1 else 1 / self.mup_output_mult)

    @property
    def scores_mult(self) -> float | None:
        """What queries times keys are multiplied by. None: 1 / sqrt(kv_channels), or as latent attention has it."""
        if self.softmax_scale or not self.use_mup or self.multi_latent_attention:
            return self.softmax_scale or None
        return math.sqrt(self.mup_base_head_dim or 1.0) / self.kv_channels**self.mup_attn_scale_power

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
