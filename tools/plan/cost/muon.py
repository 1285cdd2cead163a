"""Seconds that Muon adds to the optimizer of a step (training/muon): Newton-Schulz on whole matrices, and their way to
the ranks that have them and back, none of it hidden.

No run was measured. Products are priced in 16 bits (muon_fp32_matmul_prec "medium"), Q, K and V apart, the parts of
other fused projections together; routers, which are small, and norms are left out, and what is read and written per
element is taken for AdamW's.
"""

import numpy as np

from models.costs.cases import Column
from models.symbols import ATTENTIONS, MIXERS
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.kinds import share_of
from tools.plan.cost.links import exchange_s, sends_s
from tools.plan.cost.mixers import widths
from tools.plan.cost.products import product_s
from tools.plan.cost.sharding import Sharing, rank_parameters, sharing

ELEMENT_BYTES = 4
"""Of a momentum, and of an update, that travels."""

type Work = tuple[Column, Column]
"""Seconds of a parameter, and how many such ones a pipeline stage has."""


def muon_s(columns: PricedColumns, constants: Constants) -> Column:
    """Of the matrices of one stage; nothing with AdamW."""
    if not columns.software.muon_steps.any():
        return np.zeros(columns.count)
    layout, held = columns.layout, rank_parameters(columns)
    dense, experts = _work(columns, constants)
    own, of_experts = sharing(columns)
    found = _domain_s(columns, constants, dense, held.dense - held.tables, own, layout.tp)
    found = found + _domain_s(columns, constants, experts, held.expert, of_experts, layout.etp)
    return np.where(columns.software.muon_steps > 0, found, 0.0)


def _domain_s(
    columns: PricedColumns, constants: Constants, work: list[Work], elements: Column, own: Sharing, tp: Column
) -> Column:
    """elements: of all these parameters on a rank, were nothing sharded; tp: ranks that cut each of them."""
    shards = np.where(columns.layout.zero >= 1, own.shards, 1)
    count = np.asarray(sum(each for _, each in work))
    moved, found = ELEMENT_BYTES * elements / shards, _dealt(work, shards * tp)
    once = np.ones(columns.count)
    for size, stride, rounds in ((shards, own.stride, count / shards), (tp, once, count / (shards * tp))):
        starts = np.maximum(np.ceil(rounds) - 1, 0) * sends_s(columns, constants, size, stride)
        there = (size > 1) & (elements > 0)
        found = found + np.where(there, 2 * (exchange_s(columns, constants, moved, size, stride, once) + starts), 0.0)
    return found


def _dealt(work: list[Work], ranks: Column) -> Column:
    """The costliest first, one to a rank (training/muon/dealing.py): a round lasts as long as its costliest."""
    seconds, counts = (np.stack(parts) for parts in zip(*work, strict=True))
    order = np.argsort(-seconds, axis=0)
    seconds, counts = (np.take_along_axis(part, order, axis=0) for part in (seconds, counts))
    ends = np.round(np.cumsum(counts, axis=0), 6)
    begun = np.ceil(ends / ranks)
    rounds = np.diff(begun, axis=0, prepend=0.0)
    return np.asarray((seconds * rounds).sum(axis=0))


def _work(columns: PricedColumns, constants: Constants) -> tuple[list[Work], list[Work]]:
    """Of dense parameters, and of experts."""
    model, layout = columns.model, columns.layout
    layers = (model.layers + model.extra_heads) / layout.pp
    mixtures = layers * model.moe_layers / model.layers

    def of(symbols: str, otherwise: Column) -> Column:
        return layers * share_of(columns.kinds, symbols, model.layers) if columns.kinds else otherwise

    def parameter(rows: Column, width: Column) -> Column:
        return newton_schulz_s(columns, constants, rows, width)

    attention, mlp = of(ATTENTIONS, layers), of("-", layers - mixtures)
    first, *others = columns.whole_matrices
    fused = np.where(others[2][0] > 0, parameter(*first), _queries_keys_values_s(columns, constants, first[0]))
    dense = [(fused, attention), *((parameter(*one), attention * (one[0] > 0)) for one in others)]
    dense += _mlp(columns, constants, model.hidden, model.ffn, mlp)
    dense += _mlp(columns, constants, model.hidden, model.shared_ffn, mixtures * (model.shared_ffn > 0))
    for symbol in MIXERS if columns.kinds else "":
        entering, leaving = widths(columns, symbol)
        own = of(symbol, layers)
        dense += [(parameter(entering, model.hidden), own), (parameter(model.hidden, leaving), own)]
    of_experts = mixtures * model.experts / layout.ep
    return dense, _mlp(columns, constants, model.expert_hidden, model.expert_ffn, of_experts)


def _mlp(columns: PricedColumns, constants: Constants, hidden: Column, ffn: Column, count: Column) -> list[Work]:
    first = newton_schulz_s(columns, constants, (1 + columns.model.gated) * ffn, hidden)
    return [(first, count), (newton_schulz_s(columns, constants, hidden, ffn), count)]


def _queries_keys_values_s(columns: PricedColumns, constants: Constants, rows: Column) -> Column:
    """Of a fused projection of so many rows; what is beside Q, K and V is an output gate, as large as Q."""
    model = columns.model
    queries, keys = (
        newton_schulz_s(columns, constants, each, model.hidden) for each in (model.query_width, model.kv_width)
    )
    gated = rows > model.query_width + 2 * model.kv_width
    return np.asarray(queries * (1 + gated) + 2 * keys)


def newton_schulz_s(columns: PricedColumns, constants: Constants, rows: Column, width: Column) -> Column:
    """Of one matrix, m its smaller dim and n the other: of each iteration three products, 4 m² n + 2 m³ FLOPs."""
    m, n = np.minimum(rows, width), np.maximum(rows, width)
    wide = np.ones(columns.count, dtype=np.bool_)
    gram, squared, product = (product_s(columns, constants, *dims, wide) for dims in ((m, m, n), (m, m, m), (m, n, m)))
    return np.asarray(columns.software.muon_steps * (gram + squared + product))
