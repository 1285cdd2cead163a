"""Seconds of one optimizer step, put together, and what they are spent on."""

from dataclasses import dataclass

import numpy as np

from models.costs.cases import Column, element_bytes, tokens
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.head import embedding_s, head_s
from tools.plan.cost.kinds import stages_of
from tools.plan.cost.launches import launching_s
from tools.plan.cost.layer import BlockTimes, block_of_kind, mean_block
from tools.plan.cost.links import within_domain
from tools.plan.cost.muon import muon_s
from tools.plan.cost.sharding import accumulate_s, data_parallel_s, optimizer_s


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step on the slowest stage; ``total`` is their sum."""

    products: Column
    attention: Column
    traffic: Column
    recompute: Column
    offload: Column
    head: Column
    tp: Column
    cp: Column
    ep: Column
    p2p: Column
    bubble: Column
    dp: Column
    optimizer: Column
    host: Column
    other: Column

    @property
    def total(self) -> Column:
        return np.asarray(sum(getattr(self, name) for name in self.__slots__))


def step_times(columns: PricedColumns, constants: Constants) -> StepTimes:
    """Of every case. The pipeline: every stage takes all microbatches; the others' first and last stand idle."""
    layout, count = columns.layout, columns.layout.microbatches
    block, forward = mean_block(columns, constants)
    first, middle, last = _by_kinds(columns, constants, block) if columns.kinds else stage_layers(columns)
    head, lookup = head_s(columns, constants), embedding_s(columns)
    alone = layout.pp == 1
    ends = np.maximum(first * block.total + lookup, middle * block.total)
    slow_is_last = last * block.total + head > ends
    slowest = np.maximum(last * block.total + head, ends) + np.where(alone, lookup, 0.0)
    layers = np.where(slow_is_last, last, np.maximum(first, middle))
    whole = (columns.model.layers + columns.model.extra_heads) * block.total + head + lookup
    accumulate = accumulate_s(columns)
    idle = np.where(alone, 0.0, (whole - slowest + (layout.pp - 1) * accumulate) / layout.vpp)
    steady = np.where(alone, whole, slowest)
    parts = block.times(layers * count)
    sent = _sends(columns, constants)
    compute_forward = forward * layers
    dp = data_parallel_s(columns, constants, compute_forward, steady - compute_forward)
    parts.traffic = parts.traffic + count * accumulate
    found = _assemble(
        parts, count * (steady - layers * block.total), count * sent, idle + _fill_seconds(columns, sent), dp
    )
    found.optimizer = optimizer_s(columns, constants) + muon_s(columns, constants)
    found.host = _host_bound(columns, (first, middle, last), steady + accumulate + sent)
    jitter = constants.jitter * np.log2(np.maximum(1.0, layout.tp * layout.cp * layout.pp * layout.dp / 8))
    more = jitter + columns.published.slow_host - 1
    found.other = constants.fixed_s + more * (found.total + constants.fixed_s)
    return found


def _host_bound(columns: PricedColumns, stages: tuple[Column, Column, Column], device: Column) -> Column:
    """What the GPUs wait for kernels to be launched. stages: blocks; device: a microbatch's seconds on the slowest.

    All stages launch at the same pace, so a pipeline takes as much longer to fill as a microbatch does.
    """
    (first, middle, last), layout = stages, columns.layout
    block, head = launching_s(columns)
    host = np.maximum(np.maximum(first, middle) * block, last * block + head)
    return np.maximum(0.0, host - device) * (layout.microbatches + (layout.pp - 1) / layout.vpp)


def _assemble(parts: BlockTimes, head: Column, p2p: Column, bubble: Column, dp: Column) -> StepTimes:
    nothing = np.zeros_like(head)
    return StepTimes(
        parts.products, parts.attention, parts.traffic, parts.recompute, parts.offload, head, parts.tp, parts.cp,
        parts.ep, p2p, bubble, dp, nothing, nothing, nothing,
    )  # fmt: skip


def stage_layers(columns: PricedColumns) -> tuple[Column, Column, Column]:
    """Blocks of the first stage, the fullest one between, and the last; multi-token depths are on the last."""
    layout, layers = columns.layout, columns.model.layers
    first = np.where(layout.first_layers > 0, layout.first_layers, np.ceil(layers / layout.pp))
    last = np.where(layout.last_layers > 0, layout.last_layers, np.floor(layers / layout.pp))
    uneven = (layout.first_layers > 0) | (layout.last_layers > 0)
    middle = np.where(uneven & (layout.pp > 2), np.ceil((layers - first - last) / np.maximum(1, layout.pp - 2)), first)
    return first, middle, last + columns.model.extra_heads


def _by_kinds(columns: PricedColumns, constants: Constants, mean: BlockTimes) -> tuple[Column, Column, Column]:
    """The same of hybrids: as many mean blocks as take the time of the stage's own."""
    takes = {kind: block_of_kind(columns, constants, kind)[0].total / mean.total for kind in columns.kinds}
    first, middle, last = stages_of(columns.kinds, takes, columns.layout.pp)
    return first, middle, last + columns.model.extra_heads


def _sends(columns: PricedColumns, constants: Constants) -> Column:
    """Exposed seconds per microbatch: an activation and its gradient cross to the next stage, chunk by chunk; each TP
    rank sends a piece (arXiv:2104.04473, section 4.1)."""
    layout, machine = columns.layout, columns.machine
    stride = layout.tp * layout.cp * layout.dp
    near = within_domain(columns, np.full(columns.count, 2.0), stride)
    rate = np.where(near, machine.scale_up_bytes_per_s * machine.nvlink_share, machine.nic_bytes_per_s * constants.nics)
    piece = element_bytes(columns) * tokens(columns) * columns.model.hidden / layout.tp
    once = piece / rate + np.where(near, machine.scale_up_latency_s, machine.nic_latency_s)
    exposed = np.where(columns.published.p2p_overlap * (layout.vpp > 1) > 0, constants.p2p_hidden, constants.p2p)
    return np.where(layout.pp > 1, 2 * layout.vpp * once * exposed, 0.0)


def _fill_seconds(columns: PricedColumns, sent: Column) -> Column:
    """Sends on the way through an empty pipeline: nothing hides these."""
    return np.where(columns.layout.pp > 1, (columns.layout.pp - 1) * sent / columns.layout.vpp, 0.0)
