"""Seconds that the host takes to launch a microbatch's kernels: where they are small, it sets the pace, not the GPU.

The host runs ahead of the GPU and waits for it once a step, so a microbatch takes what the slower of the two needs.
Launches are counted on the emulated device (``python -m tests.gpu_path.launches``), and what one takes is a figure of
the cluster's file (node.launch_us, node.collective_launch_us): nothing here is fitted.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.costs.cases import FORMATS, Column
from models.symbols import ATTENTIONS, MIXERS, MLPS
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.kinds import share_of


class Launches(NamedTuple):
    """Of one microbatch: kernels, or calls of Transformer Engine's extension."""

    forward: int
    backward: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """What modules launch. All but ``head`` are of one block, without collectives."""

    plain: Launches
    """Layer norms, biases, one product before the activation (gpt3_tiny)."""
    gated: Launches
    """RMS norms, rotary positions, grouped queries, a gated activation (llama3_tiny)."""
    experts: Launches
    """The same with a router and four experts (mixtral_tiny)."""
    latent: Launches
    """Experts and a shared one, with latent attention (deepseek_v3_tiny)."""
    head: Launches
    """Output layer and loss."""
    core_attention: int
    """Launched again where it is recomputed."""
    mlp: int
    """The same."""


ENGINE = Program(
    plain=Launches(12, 27), gated=Launches(14, 19), experts=Launches(87, 65), latent=Launches(112, 108),
    head=Launches(10, 12), core_attention=2, mlp=4,
)  # fmt: skip
"""Transformer Engine's."""
OWN = Program(
    plain=Launches(36, 58), gated=Launches(60, 66), experts=Launches(112, 120), latent=Launches(155, 193),
    head=Launches(25, 19), core_attention=29, mlp=3,
)  # fmt: skip
"""This project's, which fuse little; other programs that fuse little are taken to launch as many."""
COMPILED = Program(
    plain=Launches(10, 29), gated=Launches(14, 21), experts=Launches(87, 67), latent=Launches(98, 85),
    head=ENGINE.head, core_attention=2, mlp=4,
)  # fmt: skip
"""Transformer Engine's in blocks by torch.compile (train.compile): Megatron fuses most of the rest by itself."""
PROGRAMS = (ENGINE, OWN, COMPILED)
FP8 = Launches(4, 5)
"""More of a dense block that multiplies in fp8: casts and scales."""
WHOLE, SPLIT = Launches(2, 2), Launches(4, 6)
"""Collectives of a dense block on tensor ranks, without and with sequence parallelism, which gathers the inputs of two
products once more for the gradients of their weights."""
GATHER, REDUCE = 3, 4
"""Kernels of a unit of fully sharded data parallelism, each beside one collective: casts, and copies into its buffer
and out of it. Experts, a unit of their own, have more: a copy for each tensor."""


def launching_s(columns: PricedColumns) -> tuple[Column, Column]:
    """Host seconds of a microbatch: of the mean block, and of output layer and loss. CUDA graphs take them away."""
    software = columns.software
    which = np.where(software.fused > 0, np.where(software.compiled > 0, 2, 0), 1)
    kernel_s, collective_s = (
        np.where(software.graphed > 0, 0.0, own)
        for own in (columns.machine.launch_s, columns.machine.collective_launch_s)
    )
    kernels, collectives, kernels_of_ends, collectives_of_ends = _of_shards(columns)
    block = (_kernels(columns, which) + kernels) * kernel_s + (_collectives(columns) + collectives) * collective_s
    head = _pick(which, [sum(own.head) for own in PROGRAMS]) + kernels_of_ends
    return block, head * kernel_s + collectives_of_ends * collective_s


def _of_shards(columns: PricedColumns) -> tuple[Column, Column, Column, Column]:
    """Kernels and collectives of the mean block; and of the root, embedding and output layer, which are one unit where
    tied. ZeRO-2 gathers once a step, and the ends are gathered once a microbatch."""
    layout, model, by_unit = columns.layout, columns.model, columns.software.by_unit > 0
    apart = (layout.ep > 1) | (layout.etp != layout.tp)  # else experts are gathered with the rest of their block
    units = np.where(by_unit, 1 + apart * model.moe_layers / model.layers, 0.0)
    ends = np.where(by_unit, np.where(model.tied > 0, 1, np.where(layout.pp == 1, 3, 2)), 0)
    once = np.where(layout.zero == 2, 1 / layout.microbatches, 1.0)
    gathers = np.where(layout.zero == 2, once, 2.0)
    return (
        units * (gathers * GATHER + REDUCE), units * (gathers + 1), ends * (once * GATHER + REDUCE), ends * (once + 1),
    )  # fmt: skip


def _kernels(columns: PricedColumns, which: NDArray[np.intp]) -> Column:
    """Of the mean block, forward, again where it is recomputed, and backward; which: of ``PROGRAMS``."""
    model = columns.model
    table = [(own.plain, own.gated, own.experts, own.latent) for own in PROGRAMS]
    dense = np.where(model.gated > 0, 1, 0)
    routed = np.where(columns.matrices[3][0] > 0, 3, 2)
    share = model.moe_layers / model.layers
    small = (columns.format != FORMATS.index("16bit")) & (columns.format != FORMATS.index("fp32"))
    blocks = _whole_blocks(columns, mixer=1.0)

    def mean(direction: int) -> tuple[Column, Column]:
        counts = np.array([[kind[direction] for kind in row] for row in table], np.float64)
        of_dense, of_routed = counts[which, dense], counts[which, routed]
        plain = (of_dense + np.where(small, FP8[direction], 0.0)) * blocks
        return plain + share * (of_routed - of_dense), of_routed

    forward, routed_forward = mean(0)
    backward, _ = mean(1)
    core, mlp = (_pick(which, [getattr(own, name) for own in PROGRAMS]) for name in ("core_attention", "mlp"))
    again = np.select(
        [columns.recomputes(name) for name in ("full", "core_attn", "mlp", "operators", "moe")],
        [forward, core, mlp, mlp, share * routed_forward],
        0.0,
    )
    return np.asarray(forward + again + backward)


def _collectives(columns: PricedColumns) -> Column:
    """The same of tensor parallelism. Those that overlap with products are no calls of torch.distributed."""
    layout = columns.layout
    split = layout.sequence_parallel > 0
    forward, backward = (np.where(split, SPLIT[way], WHOLE[way]) for way in (0, 1))
    whole = forward * (1 + columns.recomputes("full")) + backward
    whole = whole * _whole_blocks(columns, mixer=0.5)
    return np.where((layout.tp > 1) & (columns.published.tp_overlap == 0), whole, 0.0)


def _whole_blocks(columns: PricedColumns, *, mixer: float) -> Column | float:
    """Dense blocks that launch as much as the mean block of a hybrid: a sublayer counts half a block. Mixers were not
    counted; their kernels are taken for as many as a whole block's."""
    if not columns.kinds:
        return 1.0
    layers = columns.model.layers
    return 0.5 * share_of(columns.kinds, ATTENTIONS + MLPS, layers) + mixer * share_of(columns.kinds, MIXERS, layers)


def _pick(which: NDArray[np.intp], values: list[int]) -> Column:
    return np.asarray(np.array(values, np.float64)[which])
