"""A shape as the numbers that time and memory are computed from."""

from dataclasses import dataclass
from typing import NamedTuple

from models.costs.flops import mean_chunk_keys
from models.costs.parameters import active_parameters, num_parameters
from models.norms import NORMS
from models.shapes import GPTShape


class Matrix(NamedTuple):
    """A weight matrix [rows, columns] (torch.nn.Linear's orientation) and the dim that TP splits."""

    rows: int
    columns: int
    split: str

    def local(self, tp: int) -> tuple[float, float]:
        """Rows and columns on one TP rank."""
        return (
            self.rows / tp if self.split == "rows" else self.rows,
            self.columns / tp if self.split == "columns" else self.columns,
        )


ATTENTION_MATRICES = 5
"""As many as latent attention has; others leave the rest empty."""


ATTENTION_AND_MLP = frozenset({"*-", "+-", "*E", "+E"})
"""Kinds of blocks; those of hybrids are others."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSizes:
    """Of one architecture at one sequence length. Widths in channels, over all TP ranks."""

    layers: int
    moe_layers: int
    hidden: int
    seq_length: int
    kinds: tuple[str, ...]
    """Sublayers of each block (``GPTShape.blocks``)."""
    matrices: tuple[Matrix, ...]
    """Of attention: ``ATTENTION_MATRICES`` of them, empty ones [0, 0]."""
    query_width: int
    kv_width: int
    attention_width: int
    """Multiply-adds per query and key, all heads: of scores and of weighted values."""
    heads: int
    head_dim: int
    mean_keys: float
    """Keys that a query sees, averaged over positions and layers: half the sequence without windows."""
    ffn: int
    gated: bool
    gate_copies: int
    """Tensors as wide as the MLP that an unfused gate keeps beside those of swiglu: of a clamp, of an offset. As a
    trace of gpt_oss_20b has it, to 2 % (2026-11-25)."""
    norms: int
    """Of a block: before and behind attention and MLP."""
    capped_scores: bool
    """Attention's scores have a soft cap, so that no kernel computes them."""
    norm_inputs: int
    """Tensors of its input's shape that a norm keeps for the backward pass (models/norms.py)."""
    norm_bytes: int
    """Bytes per token and channel that it keeps beside those."""
    rotary: bool
    """Queries and keys are turned by their position."""
    query_norms: bool
    """Queries and keys are normalised, head by head."""
    clipped: bool
    """Queries, keys and values are clipped, which keeps them as they were besides."""
    softmax_offset: bool
    """Each head's softmax has one more logit, which Triplane's own attention computes in blocks of queries."""
    hidden_dropout: bool
    attention_dropout: bool
    experts: int
    topk: int
    expert_ffn: int
    expert_hidden: int
    """Channels that experts take and give: the hidden size, but where they work in a smaller space."""
    expert_biases: bool
    """Experts' products have biases."""
    shared_ffn: int
    vocab: int
    tied: bool
    """One table is embedding and output layer."""
    extra_heads: int
    """Depths of multi-token prediction: a block and logits each."""
    mamba_inner: int
    """Channels of a Mamba-2 mixer's heads together; 0: there is none."""
    mamba_heads: int
    mamba_groups: int
    mamba_state: int
    """Channels of a head's state."""
    delta_keys: int
    """Channels of a gated delta net's keys together; 0: there is none."""
    delta_values: int
    delta_heads: int
    """Of values."""
    delta_key_dim: int
    parameters: int
    active: int


def sizes(shape: GPTShape, seq_length: int) -> ModelSizes:
    """What follows from a shape at one sequence length."""
    latent = shape.multi_latent_attention
    heads, query_dim = shape.num_attention_heads, shape.qk_head_dim + shape.qk_pos_emb_head_dim
    width = heads * (query_dim + shape.v_head_dim) if latent else 2 * shape.query_size
    kept_inputs, kept_bytes = NORMS[shape.normalization].kept(shape.layernorm_zero_centered_gamma)
    return ModelSizes(
        layers=shape.num_layers,
        moe_layers=sum(shape.moe_blocks),
        hidden=shape.hidden_size,
        seq_length=seq_length,
        kinds=shape.blocks,
        matrices=_latent(shape) if latent else _grouped(shape),
        query_width=heads * query_dim if latent else shape.query_size,
        kv_width=heads * query_dim if latent else shape.kv_size,
        attention_width=width,
        heads=heads,
        head_dim=query_dim if latent else shape.kv_channels,
        mean_keys=_mean_keys(shape, seq_length),
        ffn=shape.ffn_hidden_size,
        gated=shape.gated,
        gate_copies=(shape.activation_func_clamp_value > 0) + (shape.glu_linear_offset != 0),
        norms=2 * (shape.pre_norm + shape.post_norm),
        capped_scores=shape.attn_logit_softcapping > 0,
        norm_inputs=kept_inputs,
        norm_bytes=kept_bytes,
        rotary=shape.position_embedding_type == "rope",
        query_norms=shape.qk_layernorm,
        clipped=shape.clip_qkv > 0,
        softmax_offset=shape.softmax_type != "vanilla",
        hidden_dropout=shape.hidden_dropout > 0,
        attention_dropout=shape.attention_dropout > 0,
        experts=shape.num_moe_experts,
        topk=shape.moe_router_topk if shape.num_moe_experts else 0,
        expert_ffn=shape.expert_ffn_hidden_size if shape.num_moe_experts else 0,
        expert_hidden=shape.hidden_size,
        expert_biases=shape.add_bias_linear and shape.num_moe_experts > 0,
        shared_ffn=shape.moe_shared_expert_intermediate_size,
        vocab=shape.padded_vocab_size,
        tied=shape.tied,
        extra_heads=shape.mtp_num_layers,
        **_mixers(shape),
        parameters=num_parameters(shape),
        active=active_parameters(shape),
    )


def _mixers(shape: GPTShape) -> dict[str, int]:
    mamba, delta = "M" in shape.hybrid_layer_pattern, any(shape.linear_blocks)
    return {
        "mamba_inner": mamba * shape.mamba_heads * shape.mamba_head_dim,
        "mamba_heads": mamba * shape.mamba_heads,
        "mamba_groups": mamba * shape.mamba_num_groups,
        "mamba_state": mamba * shape.mamba_state_dim,
        "delta_keys": delta * shape.linear_num_key_heads * shape.linear_key_head_dim,
        "delta_values": delta * shape.linear_num_value_heads * shape.linear_value_head_dim,
        "delta_heads": delta * shape.linear_num_value_heads,
        "delta_key_dim": delta * shape.linear_key_head_dim,
    }


def _grouped(shape: GPTShape) -> tuple[Matrix, ...]:
    h, q = shape.hidden_size, shape.query_size
    gates = q if shape.attention_output_gate else 0
    own = (Matrix(q + 2 * shape.kv_size + gates, h, "rows"), Matrix(h, q, "columns"))
    return own + (Matrix(0, 0, ""),) * (ATTENTION_MATRICES - len(own))


def _latent(shape: GPTShape) -> tuple[Matrix, ...]:
    """arXiv:2405.04434, section 2.1; the down projections are whole on every TP rank, as in Transformer Engine."""
    h, n, rank = shape.hidden_size, shape.num_attention_heads, shape.q_lora_rank
    queries = n * (shape.qk_head_dim + shape.qk_pos_emb_head_dim)
    return (
        Matrix(shape.kv_lora_rank + shape.qk_pos_emb_head_dim, h, ""),
        Matrix(n * (shape.qk_head_dim + shape.v_head_dim), shape.kv_lora_rank, "rows"),
        Matrix(rank, h, "") if rank else Matrix(0, 0, ""),
        Matrix(queries, rank or h, "rows"),
        Matrix(h, n * shape.v_head_dim, "columns"),
    )


def _mean_keys(shape: GPTShape, seq_length: int) -> float:
    if shape.attention_chunk_size:
        share = sum(shape.chunk_blocks) / shape.num_layers
        chunk = mean_chunk_keys(shape.attention_chunk_size, seq_length)
        return share * chunk + (1 - share) * seq_length / 2
    window = min(seq_length, shape.window_size[0] + 1) if shape.window_size[0] >= 0 else seq_length
    share = sum(shape.window_blocks) / shape.num_layers
    return share * (window - window**2 / (2 * seq_length)) + (1 - share) * seq_length / 2
