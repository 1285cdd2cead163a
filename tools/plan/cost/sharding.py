"""Seconds that data parallelism and the optimizer add to a step."""

from dataclasses import dataclass

import numpy as np

from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.links import gather_s
from tools.plan.cost.products import SUSTAINED_MEMORY
from training.memory.activations import element_bytes
from training.memory.cases import Column

UPDATE_BYTES = 30
"""AdamW on fp32 state: gradient, main weight and two moments read, the last three and the weight written."""


@dataclass(slots=True)
class RankParameters:
    """On the fullest rank."""

    dense: Column
    expert: Column


def rank_parameters(columns: PricedColumns) -> RankParameters:
    """Parameters of a rank of the last or first stage, near enough for time; ``memory`` counts them exactly."""
    model, layout = columns.model, columns.layout
    attention = sum((n * k for n, k in columns.matrices), np.zeros(columns.count))
    mlp = (2 + model.gated) * model.hidden * model.ffn / layout.tp
    shared = (2 + model.gated) * model.hidden * model.shared_ffn / layout.tp
    expert = (2 + model.gated) * model.expert_hidden * model.expert_ffn * model.experts / (layout.ep * layout.etp)
    share = model.moe_layers / model.layers
    layers = (model.layers + model.extra_heads) / layout.pp
    tables = model.vocab * model.hidden / layout.tp * np.where(layout.pp == 1, 2, 1)
    dense = layers * (attention + mlp * (1 - share) + shared * share) + tables
    return RankParameters(dense=dense, expert=layers * share * expert)


def data_parallel_s(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Exposed seconds of a step. forward, backward: computing seconds of one microbatch on a rank."""
    return np.where(
        columns.layout.zero >= 3,
        _fully_sharded(columns, constants, forward, backward),
        _replicated(columns, constants, forward, backward),
    )


def _group(columns: PricedColumns) -> tuple[Column, Column]:
    """Ranks that hold the same weights, and how far apart they are."""
    return columns.layout.dp * columns.layout.cp, columns.layout.tp


def _reduce_and_gather(
    columns: PricedColumns, constants: Constants, parameters: RankParameters
) -> tuple[Column, Column]:
    """Seconds to reduce all gradients, and to gather all weights, over the ranks that share them."""
    size, stride = _group(columns)
    weight_bytes = np.where((columns.format >= 1) & (columns.format <= 3), 1, element_bytes(columns))
    wide = columns.software.gradient_bytes
    experts = np.maximum(1, columns.layout.tp * size / (columns.layout.ep * columns.layout.etp))
    apart = np.minimum(columns.layout.ep * columns.layout.etp, columns.layout.tp * size)
    reduce = gather_s(columns, constants, parameters.dense * wide, size, stride)
    # Without the distributed optimizer gradients are all-reduced, and no weights gathered; some do both.
    weight_bytes = np.where(columns.layout.zero == 0, wide, weight_bytes)
    weight_bytes = weight_bytes + np.where(columns.software.all_reduces * (columns.layout.zero > 0) > 0, wide, 0)
    gather = gather_s(columns, constants, parameters.dense * weight_bytes, size, stride)
    reduce = reduce + gather_s(columns, constants, parameters.expert * wide, experts, apart)
    gather = gather + gather_s(columns, constants, parameters.expert * weight_bytes, experts, apart)
    return reduce, gather


def _replicated(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Once a step; overlapped with the last microbatch's backward and the next step's first forward pass.

    Interleaved stages finish one chunk for all of a round's PP microbatches before the next: more time to hide in.
    ZeRO-2 has no room for whole gradients to be added up in: each microbatch's are reduced.
    """
    layout = columns.layout
    rounds = np.maximum(1.0, np.minimum(layout.pp, layout.microbatches) * (layout.vpp - 1) / layout.vpp)
    reduce, gather = _reduce_and_gather(columns, constants, rank_parameters(columns))
    times = np.where(layout.zero == 2, layout.microbatches, 1)
    reduce, backward, forward = reduce * times, backward * np.maximum(rounds, times), forward * rounds
    hidden = np.minimum(reduce, 0.9 * backward), np.minimum(gather, 0.9 * forward)
    exposed = reduce + gather - hidden[0] - hidden[1] + constants.contention * (hidden[0] + hidden[1])
    return np.where(columns.layout.overlap > 0, exposed, constants.dp_plain * (reduce + gather))


def _fully_sharded(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Weights gathered for each pass of each microbatch, or for both at once, gradients reduced for each or once."""
    reduce, gather = _reduce_and_gather(columns, constants, rank_parameters(columns))
    count = columns.layout.microbatches
    reductions = np.where(columns.software.reduces_every_microbatch > 0, count, 1)
    gathers = np.where(columns.software.gathers_once > 0, 1, 2) * count
    moved = gathers * gather + reductions * reduce
    room = 0.9 * count * (forward + backward)
    hidden = np.where(columns.layout.overlap > 0, np.minimum(moved, room), 0.0)
    return moved - hidden + constants.contention * hidden


def accumulate_s(columns: PricedColumns) -> Column:
    """Of one microbatch: its gradients are added to those of the others; those of ZeRO-3 are reduced instead."""
    held = rank_parameters(columns)
    moved = columns.software.accumulate_bytes * (held.dense + held.expert)
    return np.where(columns.layout.zero >= 3, 0.0, moved / (SUSTAINED_MEMORY * columns.machine.memory_bytes_per_s))


def optimizer_s(columns: PricedColumns, constants: Constants) -> Column:
    """The update of this rank's shard, and the passes over all its gradients (norm, scaling, zeroing)."""
    parameters = rank_parameters(columns)
    size, _ = _group(columns)
    shards = np.where(columns.layout.zero >= 1, size, 1)
    experts = np.maximum(1, columns.layout.tp * size / (columns.layout.ep * columns.layout.etp))
    expert_shards = np.where(columns.layout.zero >= 1, experts, 1)
    updated = parameters.dense / shards + parameters.expert / expert_shards
    held = np.where(columns.layout.zero >= 2, updated, parameters.dense + parameters.expert)
    moved = UPDATE_BYTES * updated + 8 * held
    return constants.optimizer * moved / columns.machine.memory_bytes_per_s
