"""Bytes of activations of blocks that are not attention and MLP: of hybrids, sublayer by sublayer.

Mixers in plain torch as saved tensors of models that differ in one width at a time have it, in bf16 and in fp32
(2026-11-25): bytes per token. With kernels, what these keep by their source: mamba_ssm's and flash-linear-attention's
backward passes compute states and convolutions again. No run on a GPU was measured.
"""

import numpy as np

from models.costs.activations import (
    BlockBytes,
    attention_sublayer_bytes,
    block_bytes,
    mlp_sublayer_bytes,
    norm_bytes,
    spared_bytes,
    stream_bytes,
)
from models.costs.cases import Column, MemoryColumns, element_bytes, tokens
from models.costs.flops import DELTA_CHUNK, MAMBA_CHUNK
from models.costs.sizes import ATTENTION_AND_MLP


def kind_bytes(columns: MemoryColumns, kind: str) -> BlockBytes:
    """Of a block of these sublayers, by the letters of ``GPTShape.blocks``. Of hybrids' recomputation "full" alone
    counts."""
    if kind in ATTENTION_AND_MLP:
        return block_bytes(columns, experts="E" in kind)
    whole, stream = sum(_sublayer(columns, symbol) for symbol in kind), stream_bytes(columns)
    full = columns.recomputes("full")
    width, rows = element_bytes(columns), tokens(columns)
    wide = width * rows * (columns.model.hidden + _widest(columns, kind) / columns.layout.tp)
    return BlockBytes(
        kept=np.where(full, stream, whole), working=np.where(full, whole - stream, 0.0) + wide + 2 * stream
    )


def spared_by_sublayer(columns: MemoryColumns, kind: str) -> tuple[Column, ...]:
    """Of each sublayer of a block, by the letters of ``GPTShape.blocks``: what it does not keep where it is computed
    again from its own input. columns: of layouts that recompute nothing."""
    if kind in ATTENTION_AND_MLP:
        return spared_bytes(columns, experts="E" in kind)
    return tuple(_sublayer(columns, symbol) - stream_bytes(columns) for symbol in kind)


def _sublayer(columns: MemoryColumns, symbol: str) -> Column:
    if symbol in "*+":
        return attention_sublayer_bytes(columns)
    if symbol in "-E":
        return mlp_sublayer_bytes(columns, experts=symbol == "E")
    mixer = _mamba if symbol == "M" else _gated_delta_net
    return norm_bytes(columns) + tokens(columns) * mixer(columns) / columns.layout.tp


def _mamba(columns: MemoryColumns) -> Column:
    """Per token, of all TP ranks: projections, convolution, scores and decays of a chunk, states, gate and norm."""
    model, width = columns.model, element_bytes(columns)
    inner, groups, heads = model.mamba_inner, model.mamba_groups, model.mamba_heads
    states, chunk = groups * model.mamba_state, np.minimum(MAMBA_CHUNK, model.seq_length)
    torchs = (45 + 3 * width) * inner + 12 * width * states + (8 * chunk + 32) * heads
    torchs = torchs + 4 * chunk * groups + 8 * inner * model.mamba_state / chunk
    kernels = width * (5 * inner + 2 * states + heads)
    return np.where(columns.software.transformer_engine == 0, torchs, kernels)


def _gated_delta_net(columns: MemoryColumns) -> Column:
    """Per token, of all TP ranks."""
    model, width = columns.model, element_bytes(columns)
    keys, values, heads = model.delta_keys, model.delta_values, model.delta_heads
    repeated, chunk = heads * model.delta_key_dim, np.minimum(DELTA_CHUNK, model.seq_length)
    torchs = 8 * width * keys + (29 + 5 * width) * values + 41 * repeated + (20 * chunk + 28) * heads
    kernels = width * (4 * keys + 6 * values + 2 * repeated + (2 + chunk) * heads)
    return np.where(columns.software.transformer_engine == 0, torchs, kernels)


def _widest(columns: MemoryColumns, kind: str) -> Column:
    """Channels of the widest gradient."""
    model = columns.model
    widths = {
        "M": 2 * model.mamba_inner + 2 * model.mamba_groups * model.mamba_state,
        "G": 2 * model.delta_keys + 2 * model.delta_values,
        "-": (1 + model.gated) * model.ffn,
        "E": (1 + model.gated) * model.expert_ffn * model.topk,
    }
    found = np.asarray([widths.get(symbol, model.attention_width) for symbol in kind], np.float64)
    return np.asarray(found.max(axis=0))
