"""Seconds that data parallelism and the optimizer add to a step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.costs.cases import Column, element_bytes
from models.symbols import ATTENTIONS, MIXERS
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.kinds import share_of
from tools.plan.cost.links import gather_s
from tools.plan.cost.mixers import widths
from tools.plan.cost.products import SUSTAINED_MEMORY

UPDATE_BYTES = 30
"""AdamW on fp32 state: gradient, main weight and two moments read, the last three and the weight written."""
AVERAGE_PASSES = 3
"""An average read and written, and the weight read, as wide as it."""
CAST_BYTES = 4
"""A 16-bit weight read, and written in fp8 twice: as it is, and transposed."""
ROOM = 0.9
"""Of the time that computes, what collectives can hide in."""


@dataclass(slots=True)
class RankParameters:
    """On the fullest rank."""

    dense: Column
    expert: Column
    tables: Column
    """Of the dense ones, embedding and output layer."""
    layers: Column
    """Blocks; multi-token depths count as one each."""
    moe_layers: Column
    """Those whose experts are apart from the rest: on other ranks."""

    @property
    def block(self) -> Column:
        return (self.dense - self.tables + self.expert) / self.layers


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
    apart = (layout.ep > 1) | (layout.etp != layout.tp)
    own = _of_kinds(columns, attention, mlp) if columns.kinds else attention + mlp * (1 - share)
    dense = layers * (own + shared * share) + tables
    return RankParameters(
        dense=dense, expert=layers * share * expert, tables=tables, layers=layers, moe_layers=layers * share * apart
    )


def _of_kinds(columns: PricedColumns, attention: Column, mlp: Column) -> Column:
    """Attention, mixers and MLPs of a hybrid's mean block."""
    parts = {ATTENTIONS: attention, "-": mlp}
    parts |= {symbol: columns.model.hidden * sum(widths(columns, symbol)) / columns.layout.tp for symbol in MIXERS}
    found = [share_of(columns.kinds, symbols, columns.model.layers) * size for symbols, size in parts.items()]
    return np.asarray(sum(found))


class Sharing(NamedTuple):
    """Ranks that the same parameters are split over, how far apart they are, and how many such groups there are."""

    shards: Column
    stride: Column
    copies: Column
    """HSDP's."""


def sharing(columns: PricedColumns) -> tuple[Sharing, Sharing]:
    """Of dense parameters, and of experts."""
    layout = columns.layout
    size = layout.dp * layout.cp
    experts = np.maximum(1, layout.tp * size / (layout.ep * layout.etp) / layout.copies)
    apart = np.minimum(layout.ep * layout.etp, layout.tp * size)
    return Sharing(size / layout.copies, layout.tp, layout.copies), Sharing(experts, apart, layout.copies)


def data_parallel_s(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Exposed seconds of a step. forward, backward: computing seconds of one microbatch on a rank."""
    return np.where(
        columns.layout.zero >= 2,
        _fully_sharded(columns, constants, forward, backward),
        _replicated(columns, constants, forward, backward),
    )


def _weight_bytes(columns: PricedColumns) -> Column:
    """Of a weight as it is gathered."""
    small = (columns.format >= 1) & (columns.format <= 3) & (columns.software.gathers_fp8 > 0)
    return np.where(small, 1, element_bytes(columns))


def _replicated(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Once a step; overlapped with the last microbatch's backward and the next step's first forward pass.

    Interleaved stages finish one chunk for all of a round's PP microbatches before the next: more time to hide in.
    """
    layout = columns.layout
    rounds = np.maximum(1.0, np.minimum(layout.pp, layout.microbatches) * (layout.vpp - 1) / layout.vpp)
    wide = columns.software.gradient_bytes
    # Without the distributed optimizer gradients are all-reduced, and no weights gathered; some do both.
    weight_bytes = np.where(layout.zero == 0, wide, _weight_bytes(columns))
    weight_bytes = weight_bytes + np.where(columns.published.all_reduces * (layout.zero > 0) > 0, wide, 0)
    once = np.ones(columns.count)
    reduce, gather = (_collected_s(columns, constants, size, (once, once)) for size in (wide, weight_bytes))
    backward, forward = backward * rounds, forward * rounds
    hidden = np.minimum(reduce, ROOM * backward) + np.minimum(gather, ROOM * forward)
    exposed = reduce + gather - hidden + constants.contention * hidden
    return np.where(layout.overlap > 0, exposed, constants.dp_plain * (reduce + gather))


def _collected_s(columns: PricedColumns, constants: Constants, element: Column, calls: tuple[Column, Column]) -> Column:
    """All gradients reduced, or all weights gathered, over the ranks that share them, in so many collectives of dense
    parameters and of experts. element: bytes of one."""
    held, seconds = rank_parameters(columns), np.zeros(columns.count)
    for parameters, own, count in zip((held.dense, held.expert), sharing(columns), calls, strict=True):
        seconds = seconds + gather_s(columns, constants, parameters * element, own.shards, own.stride, count)
    return seconds


def _fully_sharded(columns: PricedColumns, constants: Constants, forward: Column, backward: Column) -> Column:
    """Weights gathered, and gradients reduced, while others compute.

    ZeRO-3 gathers weights for each pass of each microbatch, or for both at once; ZeRO-2 once a step. Gradients are
    reduced for each microbatch, or once, and all-reduced over HSDP's copies once a step, in 16 bits as often.

    Unit by unit, each collective starts by itself, a pass hides its own ones alone, and nothing hides the first: a
    microbatch begins with the weights of embedding and first block, and a step ends with their gradients. Published
    runs are priced without that (torchtitan's would be missed by 6.5 % in place of 6.3 %, so they do not ask for it).
    """
    layout, software, count = columns.layout, columns.software, columns.layout.microbatches
    held, by_unit = rank_parameters(columns), software.by_unit > 0
    calls = np.where(by_unit, held.layers + np.where(layout.pp == 1, 2, 1), 1), np.where(by_unit, held.moe_layers, 1)
    gather = _collected_s(columns, constants, _weight_bytes(columns), calls)
    reduce = _collected_s(columns, constants, software.gradient_bytes, calls)
    ahead = np.where(layout.zero == 2, 1, count)
    again = np.where((layout.zero == 2) | (columns.published.gathers_once > 0), 0, count)
    reductions = np.where(software.reduces_every_microbatch > 0, count, 1)
    moved, room = ahead * gather, ROOM * ahead * forward
    # Of a whole model on each rank, embedding and output layer are gathered once a microbatch.
    ends = np.where(by_unit & (layout.pp == 1), held.tables / (held.dense + held.expert), 0.0)
    summed = np.where(columns.software.gradient_bytes < 4, reductions, 1) * _copies_s(columns, constants, calls)
    moved_back = again * (1 - ends) * gather + reductions * reduce + summed
    room_back = ROOM * np.maximum(again, reductions) * backward
    apart = np.minimum(moved, room) + np.minimum(moved_back, room_back)
    hidden = np.where(by_unit, apart, np.minimum(moved + moved_back, ROOM * count * (forward + backward)))
    hidden = np.where(layout.overlap > 0, hidden, 0.0)
    share = (held.tables / np.where(layout.pp == 1, 2, 1) + held.block) / (held.dense + held.expert)
    first = np.where(by_unit, share * (ahead * gather + reduce), 0.0)
    return np.maximum(moved + moved_back - hidden, first) + constants.contention * hidden


def _copies_s(columns: PricedColumns, constants: Constants, calls: tuple[Column, Column]) -> Column:
    """An all-reduce of shards of gradients over HSDP's copies, unit by unit."""
    held, seconds = rank_parameters(columns), np.zeros(columns.count)
    for parameters, own, count in zip((held.dense, held.expert), sharing(columns), calls, strict=True):
        shard = parameters * columns.software.gradient_bytes / own.shards
        seconds = seconds + 2 * gather_s(columns, constants, shard, own.copies, own.shards * own.stride, count)
    return seconds


def accumulate_s(columns: PricedColumns) -> Column:
    """Of one microbatch: its gradients are added to those of the others; of ZeRO-2 and -3 they are reduced instead.

    Unit by unit, weights are copied out of the buffer that they were gathered in, in ZeRO-3 for both passes, products
    in fp8 cast them for both, and gradients are copied into the buffer that they are reduced in.
    """
    held, layout, software = rank_parameters(columns), columns.layout, columns.software
    element, small = element_bytes(columns), (columns.format >= 1) & (columns.format <= 3)
    out = np.where(layout.zero == 2, 1 / layout.microbatches, 2.0) * 2 * element
    casts = np.where(small, 2 * CAST_BYTES, 0)
    by_unit = np.where(software.by_unit > 0, out + casts + element + software.gradient_bytes, 0.0)
    moved = np.where(layout.zero >= 2, by_unit, software.accumulate_bytes) * (held.dense + held.expert)
    return np.asarray(moved / (SUSTAINED_MEMORY * columns.machine.memory_bytes_per_s))


def optimizer_s(columns: PricedColumns, constants: Constants) -> Column:
    """The update of this rank's shard, and the passes over all its gradients (norm, scaling, zeroing). What is updated
    on the host is priced by the datasheets' bandwidths, as if its cores kept up with its memory, and of shards that lie
    there (ZeRO-2 and -3) as if no copy were hidden; no run was measured.
    """
    parameters = rank_parameters(columns)
    dense, experts = (np.where(columns.layout.zero >= 1, own.shards, 1) for own in sharing(columns))
    updated = parameters.dense / dense + parameters.expert / experts
    held = np.where(columns.layout.zero >= 2, updated, parameters.dense + parameters.expert)
    software, machine = columns.software, columns.machine
    away = software.host_state * updated
    fewer = 2 * (12 - software.main_param_bytes - software.moment_bytes) * (software.host_state == 0)
    sharded = columns.layout.zero >= 2
    moved = (UPDATE_BYTES - fewer) * (updated - away) + 8 * (held - away * sharded)
    moved = moved + AVERAGE_PASSES * software.average_bytes * updated
    here = moved / machine.memory_bytes_per_s
    down = software.host_average_bytes * updated
    averages = down / machine.host_link_bytes_per_s + AVERAGE_PASSES * down / machine.host_memory_bytes_per_s
    return np.asarray(constants.optimizer * here + _on_host_s(columns, away) + averages)


def _on_host_s(columns: PricedColumns, away: Column) -> Column:
    """Of ZeRO-1: gradients down, then the update, then fp32 weights up; none waits for less than all of the one before.
    Of ZeRO-2 and -3 weights go up for each gather and gradients come down for each microbatch, to be added; HSDP's
    copies add fp32 ones up on the GPU, and they come down once."""
    layout, machine, count = columns.layout, columns.machine, columns.layout.microbatches
    once = (layout.zero < 2) | ((layout.copies > 1) & (columns.software.gradient_bytes == 4))
    up, down = np.where(layout.zero == 3, 2 * count, 1), np.where(once, 1, count)
    passes = UPDATE_BYTES + np.where(layout.zero >= 2, 8, 0) + 12 * (down - 1)
    return np.asarray(
        away * (4 * (up + down) / machine.host_link_bytes_per_s + passes / machine.host_memory_bytes_per_s)
    )
