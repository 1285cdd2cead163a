"""Bytes of activations at the peak, stage by stage. No torch here.

Of each block, what its backward pass needs (Transformer Engine's modules; x of arXiv:2205.05198's sbh notation):
both norms' inputs and outputs, queries, keys, values and what attention returns, the first MLP product and the
activation after it. Two bytes an element.
"""

from typing import NamedTuple

import numpy as np

from tools.plan.cases import Column, Columns
from tools.plan.cost.layer import tokens

SOFTMAX_BYTES = 4
"""Log-sum-exp of each query and head, which flash attention keeps in fp32."""


class BlockBytes(NamedTuple):
    """Of one block, one microbatch."""

    kept: Column
    """From its forward to its backward pass."""
    working: Column
    """Besides, while the backward pass is in it: what is recomputed, and gradients of the widest tensors."""


def block_bytes(columns: Columns, *, experts: bool) -> BlockBytes:
    """Of a dense block or one of experts."""
    model, layout, rows = columns.model, columns.layout, tokens(columns)
    stream = 2 * rows * model.hidden / np.where(layout.sequence_parallel > 0, layout.tp, 1)
    attention = _attention_bytes(columns)
    if experts:
        mlp = _expert_bytes(columns)
        wide = mlp / 2
    else:
        mlp = 2 * rows * (2 + model.gated) * model.ffn / layout.tp
        wide = 2 * rows * (1 + model.gated) * model.ffn / layout.tp
    own = columns.software.transformer_engine == 0
    if not experts:
        mlp = np.where(own, rows * (8 + 2 * model.gated) * model.ffn / layout.tp, mlp)
    whole = np.where(own, _own_bytes(columns) + mlp, 4 * stream + attention + mlp)
    names = ("full", "mlp", "moe", "operators", "core_attn")
    of_mlp, of_moe = (mlp * 0, mlp) if experts else (mlp, mlp * 0)
    scores = _score_bytes(columns)
    again = np.select(
        [columns.recomputes(name) for name in names],
        [whole + scores - stream, of_mlp, of_moe, (whole - stream) * 0.5, scores],
        0.0,
    )
    wide = np.where(own, 2.5, 1.0) * wide  # gate, value and product each have a gradient of their own
    gathered = 2 * rows * model.hidden  # a sequence piece of each TP rank, gathered for a product's weight gradient
    return BlockBytes(kept=whole + scores - again, working=again + wide + gathered)


def _own_bytes(columns: Columns) -> Column:
    """But for the MLP, of this project's own modules: norms in fp32, rotary tables of each block, copies before SDPA.

    Counted from traces of models that differ in one width at a time (2026-11-21): bytes per token and channel.
    """
    model, layout = columns.model, columns.layout
    split = 20 * model.hidden + 6 * (model.query_width + model.kv_width) + SOFTMAX_BYTES * model.heads
    return tokens(columns) * (split / layout.tp + 8 * model.head_dim)


def _attention_bytes(columns: Columns) -> Column:
    model, layout, rows = columns.model, columns.layout, tokens(columns)
    latent = sum((n for n, _ in columns.matrices[:3:2]), np.zeros(columns.count))  # down-projected, before the norms
    latent = np.where(columns.matrices[3][0] > 0, 4 * latent, 0.0)
    values = np.minimum(model.query_width, model.attention_width / 2) * 2
    through = 2 * (model.query_width + 2 * model.kv_width) + values
    return rows * (through / layout.tp + latent + SOFTMAX_BYTES * model.heads / layout.tp)


def _score_bytes(columns: Columns) -> Column:
    """Scores and probabilities that attention without flash keeps: 5 a s^2 b with its dropout mask."""
    model, layout = columns.model, columns.layout
    scores = model.heads / layout.tp * model.seq_length * tokens(columns)
    return np.where(columns.software.flash_attention > 0, 0.0, 5 * scores)


def _expert_bytes(columns: Columns) -> Column:
    """The permuted copies that its experts read, their first product and activation, shared experts, the router."""
    model, layout = columns.model, columns.layout
    sent = tokens(columns) / layout.tp * model.topk * layout.etp
    inner = (2 + model.gated) * model.expert_ffn / layout.etp
    own = sent * (2 * model.hidden + 2 * inner + 2 * model.hidden)
    shared = 2 * tokens(columns) * (2 + model.gated) * model.shared_ffn / layout.tp
    return own + shared + 4 * tokens(columns) / layout.tp * 2 * model.experts


def in_flight(columns: Columns, stage: Column) -> Column:
    """Chunk-microbatches that a stage holds at most, in units of its whole stack of blocks.

    1F1B: PP - stage. Interleaved: 2 (PP - stage - 1) + (VPP - 1) PP + 1 chunks (Megatron's warm-up, arXiv:2104.04473,
    section 2.2).
    """
    layout = columns.layout
    chunks = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    interleaved = np.minimum(chunks, layout.microbatches * layout.vpp) / layout.vpp
    plain = np.minimum(layout.pp - stage, layout.microbatches)
    return np.where(layout.vpp > 1, interleaved, plain)


def loss_bytes(columns: Columns) -> Column:
    """On the last stage: the final norm; logits in 16 bits, and in fp32 for the softmax, then its gradient."""
    model, layout = columns.model, columns.layout
    stream = np.where(columns.software.transformer_engine > 0, 6, 20) * model.hidden
    return tokens(columns) * (6 * model.vocab + stream) / layout.tp
