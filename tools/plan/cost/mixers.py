"""Seconds of hybrids' mixers: Mamba-2 (M) and gated delta nets (G).

Their projections are products like all others. The scan between them is priced by its chunks' products, at an assumed
share of peak, and by what its kernels read and write, as mamba_ssm and flash-linear-attention have them. No constant
was fitted to it.
"""

import numpy as np

from models.costs.cases import Column, element_bytes, tokens
from models.costs.flops import DELTA_CHUNK, MAMBA_CHUNK
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.links import exchange_s
from tools.plan.cost.products import gap_s, product_s, tuned

SCAN_SHARE = 0.15
"""Share of the 16-bit peak that a scan's products reach. Assumed, not fitted: with it, and its memory traffic, a scan
takes as long on an A100 as FlashAttention 2 on 2,048 keys (arXiv:2405.21060, figure 10, where the two cross)."""
SCAN_BACKWARD = 2.5
"""Its products backward against forward: states are computed again, as flash attention's scores are."""
SCAN_KERNELS = 8
"""Forward: convolution, running sums, scores, states, their passing, outputs, norm, gate."""


def projections_s(columns: PricedColumns, constants: Constants, symbol: str) -> Column:
    """Into a mixer and out of it, forward."""
    rows, tp, hidden = tokens(columns), columns.layout.tp, columns.model.hidden
    entering, leaving = widths(columns, symbol)
    first = product_s(columns, constants, rows, entering / tp, hidden)
    return first + product_s(columns, constants, rows, hidden, leaving / tp)


def widths(columns: PricedColumns, symbol: str) -> tuple[Column, Column]:
    """Channels that the first projection makes, and that the last one reads, of all TP ranks."""
    model = columns.model
    if symbol == "M":
        states = model.mamba_groups * model.mamba_state
        return 2 * model.mamba_inner + 2 * states + model.mamba_heads, model.mamba_inner
    return 2 * (model.delta_keys + model.delta_values + model.delta_heads), model.delta_values


def scan_s(columns: PricedColumns, constants: Constants, symbol: str) -> tuple[Column, Column]:
    """Forward and backward seconds of the products between the projections. Kernels multiply whole chunks, and mask."""
    flops = _mamba_flops(columns) if symbol == "M" else _delta_flops(columns)
    share = SCAN_SHARE * tuned(columns, constants) * columns.published.power_share * columns.machine.sustained
    products = tokens(columns) / columns.layout.tp * flops / (columns.machine.attention_flops * share)
    starts = SCAN_KERNELS * gap_s(columns, constants)
    return products + starts, SCAN_BACKWARD * products + 2 * starts


def _mamba_flops(columns: PricedColumns) -> Column:
    """Per token, forward (models/costs/flops.py)."""
    model, chunk = columns.model, np.minimum(MAMBA_CHUNK, columns.model.seq_length)
    scores = chunk * (model.mamba_groups * model.mamba_state + model.mamba_inner)
    return np.asarray(2 * (scores + 2 * model.mamba_state * model.mamba_inner))


def _delta_flops(columns: PricedColumns) -> Column:
    """The same of a gated delta net."""
    model, chunk = columns.model, np.minimum(DELTA_CHUNK, columns.model.seq_length)
    key, value = model.delta_key_dim, model.delta_values / model.delta_heads
    return np.asarray(2 * model.delta_heads * (chunk * (3 * key + 2 * value) + 3 * key * value))


def channels(columns: PricedColumns, symbol: str) -> Column:
    """16-bit numbers per token, of all TP ranks, that kernels between the projections read and write forward. States of
    a chunk are in fp32: written, passed on (read and written), read."""
    model = columns.model
    if symbol == "M":
        chunk, inner = np.minimum(MAMBA_CHUNK, model.seq_length), model.mamba_inner
        states = model.mamba_groups * model.mamba_state
        convolution = 2 * (inner + 2 * states)
        scan = 3 * inner + 4 * states + 2 * chunk * model.mamba_groups + 8 * inner * model.mamba_state / chunk
        return np.asarray(convolution + scan + 3 * inner)
    chunk, values = np.minimum(DELTA_CHUNK, model.seq_length), model.delta_values
    repeated = model.delta_heads * model.delta_key_dim
    convolution = 2 * (2 * model.delta_keys + values)
    scan = 7 * repeated + 6 * values + 6 * model.delta_heads * chunk
    return np.asarray(
        convolution + scan + 2 * repeated * values / np.maximum(1, model.delta_heads) / chunk + 3 * values
    )


def exchanged_s(columns: PricedColumns, constants: Constants, symbol: str) -> Column:
    """Forward: context ranks swap pieces of the sequence for heads before the scan, and back behind it."""
    sent = element_bytes(columns) * tokens(columns) / columns.layout.tp
    size, stride, once = columns.layout.cp, columns.layout.tp, np.ones(columns.count)
    ways = [exchange_s(columns, constants, sent * width, size, stride, once) for width in widths(columns, symbol)]
    return ways[0] + ways[1]
