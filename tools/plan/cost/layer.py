"""Seconds of one block on one rank for one microbatch, forward and backward, by what takes them."""

from dataclasses import dataclass

import numpy as np

from models.costs.cases import Column, element_bytes, tokens
from models.symbols import ATTENTIONS, MIXERS
from tools.plan.cost.cases import GENERATIONS, PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.experts import activation_s, dispatch_s, host_s, routed_products, routed_traffic, slow_gradients_s
from tools.plan.cost.links import bandwidth, gather_s, latency
from tools.plan.cost.mixers import channels as mixer_channels
from tools.plan.cost.mixers import exchanged_s, projections_s, scan_s, widths
from tools.plan.cost.offload import offload_s
from tools.plan.cost.products import gap_s, product_s, tuned

BACKWARD_TRAFFIC = 1.6
"""Bytes of norms and activations backward against forward: their inputs are read again beside the gradients."""
NARROW_HEADS = 0.75
"""Flash attention's share of peak falls with this power of heads narrower than 128: their exponentials, as many as of
wide ones, take the time (0.7 of the share at 64 on Hopper, arXiv:2407.08608, figure 5; 0.5 where they take it all)."""
FLASH_BACKWARD = 2.5
"""Products of flash attention's backward pass against its forward (five against two, arXiv:2205.14135)."""

FUSED_KERNELS, PLAIN_KERNELS = 4, 20
"""Beside products and attention, of a block forward: norms, residuals, biases, activations, transpositions."""
MISALIGNED_HEADS = 8.0
"""Times that products of scores take where a head's 16-bit rows are no multiple of 16 bytes, as without tensor cores
(an A100's datasheet: 39 TFLOPS in bf16 beside 312). Seen on Jean Zay: a step of the 13824 channels wide model took
104 s with heads of 216 channels, and 147 s with heads of 108 (chronicles-prequel, "Another round of NHEADS")."""


@dataclass(slots=True)
class BlockTimes:
    """Forward and backward seconds of one block, or of a chunk of blocks."""

    products: Column
    attention: Column
    traffic: Column
    tp: Column
    cp: Column
    ep: Column
    recompute: Column
    offload: Column

    @property
    def total(self) -> Column:
        return np.asarray(sum(getattr(self, name) for name in self.__slots__))

    def times(self, count: Column) -> "BlockTimes":
        """Of ``count`` such blocks."""
        return BlockTimes(*(getattr(self, name) * count for name in self.__slots__))

    def plus(self, other: "BlockTimes") -> "BlockTimes":
        return BlockTimes(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def mean_block(columns: PricedColumns, constants: Constants) -> tuple[BlockTimes, Column]:
    """The mean of the model's blocks, and its forward seconds alone."""
    if columns.kinds:
        return _mean_of_kinds(columns, constants)
    share = columns.model.moe_layers / columns.model.layers
    dense, dense_forward = block_of_kind(columns, constants, "*-")
    if not np.any(share > 0):
        return dense, dense_forward
    moe, moe_forward = block_of_kind(columns, constants, "*E")
    return dense.times(1 - share).plus(moe.times(share)), dense_forward * (1 - share) + moe_forward * share


def _mean_of_kinds(columns: PricedColumns, constants: Constants) -> tuple[BlockTimes, Column]:
    """Of hybrids."""
    nothing = np.zeros(columns.count)
    mean, forward = BlockTimes(*(nothing for _ in BlockTimes.__slots__)), nothing
    for kind, own in columns.kinds.items():
        share = own.sum(axis=1) / columns.model.layers
        block, block_forward = block_of_kind(columns, constants, kind)
        mean, forward = mean.plus(block.times(share)), forward + share * block_forward
    return mean, forward


def block_of_kind(columns: PricedColumns, constants: Constants, kind: str) -> tuple[BlockTimes, Column]:
    """Of these sublayers, by the letters of ``GPTShape.blocks``, and its forward seconds alone."""
    none, experts = np.zeros(columns.count), "E" in kind
    attend, core, core_backward, ring, swap = none, none, none, none, none
    if kind[0] in MIXERS:
        attend = projections_s(columns, constants, kind[0])
        core, core_backward = scan_s(columns, constants, kind[0])
        swap = exchanged_s(columns, constants, kind[0])
    elif kind[0] in ATTENTIONS:
        attend = _attention_products(columns, constants)
        core, core_backward = _core_attention(columns, constants)
        ring = _context_parallel(columns, constants, core)
    width = columns.model.shared_ffn if experts else columns.model.ffn if "-" in kind else none
    mlp = _mlp_products(columns, constants, width) if kind[-1] in "-E" else none
    moved = _traffic(columns, constants, width, kind)
    whole = (columns.layout.etp > 1) | (columns.model.shared_ffn > 0)
    tp = _tensor_parallel(columns, constants) * sum(0.5 * whole if symbol == "E" else 0.5 for symbol in kind)
    routed, routing, ep = none, none, none
    if experts:
        routed, routing = routed_products(columns, constants), routed_traffic(columns, constants)
        ep = dispatch_s(columns, constants)
    forward = attend + mlp + routed + core + moved + routing + tp + ring + ep + swap
    again = _again(columns, forward, core, mlp, moved, mlp + routed + routing + ep if experts else none)
    again = again + _modules_again(columns, constants, experts=experts)
    if kind[-1] == "-":
        spared = columns.recomputes("full") & (columns.published.stops_early > 0)
        again = again - np.where(spared, _last_product(columns, constants, width), 0.0)
    times = BlockTimes(
        products=3 * (attend + mlp + routed),
        attention=core + core_backward,
        traffic=(1 + BACKWARD_TRAFFIC) * (moved + routing),
        tp=2 * tp,
        cp=3 * ring + 2 * swap,
        ep=2 * ep,
        recompute=again,
        offload=none,
    )
    if experts:
        host, wait = host_s(columns, constants)
        reads = 1 + (columns.recomputes("full") | columns.recomputes("moe"))
        idle = np.maximum(0.0, (1 + BACKWARD_TRAFFIC) * host - times.total) + reads * wait
        times.traffic = times.traffic + idle
        activation = BACKWARD_TRAFFIC * activation_s(columns, constants)
        times.products = times.products + slow_gradients_s(columns, constants, activation)
        forward = np.maximum(forward, host) + wait
    times.offload = offload_s(columns, kind, forward, times.total - forward)
    return times, forward


def _again(
    columns: PricedColumns, forward: Column, core: Column, mlp: Column, moved: Column, of_experts: Column
) -> Column:
    """What is computed a second time. A dense MLP's share of the traffic is most of it."""
    return np.select(
        [columns.recomputes(name) for name in ("full", "core_attn", "operators", "moe", "mlp")],
        [forward, core, 0.5 * mlp + 0.5 * moved, of_experts, np.where(of_experts > 0, 0.0, mlp + 0.5 * moved)],
        0.0,
    )


def _modules_again(columns: PricedColumns, constants: Constants, *, experts: bool) -> Column:
    """Modules that a recipe recomputes one by one: norms, experts' activation, latent attention's up-projections."""
    published, rows = columns.published, tokens(columns)
    whole = np.where(columns.layout.sequence_parallel > 0, columns.layout.tp, 1)
    norms = element_bytes(columns) * rows * 4 * columns.model.hidden / whole * constants.traffic_fused
    found = np.where(published.recomputes_norms > 0, norms / columns.machine.memory_bytes_per_s, 0.0)
    if experts:
        found = found + np.where(published.recomputes_expert_activation > 0, activation_s(columns, constants), 0.0)
    up = sum(product_s(columns, constants, rows, n, k) for n, k in columns.matrices[1:3])
    latent = (published.recomputes_latents > 0) & (columns.matrices[3][0] > 0)
    return found + np.where(latent, up, 0.0)


def _attention_products(columns: PricedColumns, constants: Constants) -> Column:
    rows = tokens(columns)
    found = [product_s(columns, constants, rows, n, k) for n, k in columns.matrices]
    return np.asarray(sum(found, np.zeros(columns.count)))


def _mlp_products(columns: PricedColumns, constants: Constants, width: Column) -> Column:
    first = (1 + columns.model.gated) * width / columns.layout.tp
    last = _last_product(columns, constants, width)
    return product_s(columns, constants, tokens(columns), first, columns.model.hidden) + last


def _last_product(columns: PricedColumns, constants: Constants, width: Column) -> Column:
    return product_s(columns, constants, tokens(columns), columns.model.hidden, width / columns.layout.tp)


def _core_attention(columns: PricedColumns, constants: Constants) -> tuple[Column, Column]:
    """Forward and backward seconds of scores, softmax and weighted values."""
    model, layout, machine = columns.model, columns.layout, columns.machine
    queries = tokens(columns) / layout.tp
    flops = 2 * queries * model.mean_keys * model.attention_width
    by_generation = (
        0.5 * constants.flash_ampere, constants.flash_ampere, constants.flash_hopper, constants.flash_blackwell,
    )  # fmt: skip
    piece = model.seq_length / layout.cp  # a ring attends to one context rank's keys after the other
    share = np.array(by_generation)[columns.generation]
    older = (columns.published.newest_attention == 0) & (columns.generation >= GENERATIONS.index("hopper"))
    narrow = np.minimum(1.0, (model.head_dim / 128) ** NARROW_HEADS)
    share = np.where(older, constants.flash_2, share) * narrow
    share = share * np.where(machine.fast_exponentials > 0, constants.flash_ultra, 1.0)
    share = share * np.where(columns.published.fp8_attention > 0, constants.fp8_attention, 1.0)
    share = share * tuned(columns, constants) * piece / (piece + constants.flash_ramp)
    share = share * columns.published.power_share * machine.sustained
    flash = flops / (machine.attention_flops * share) + gap_s(columns, constants)
    scores = 2.0 * model.heads * queries * model.seq_length
    short = model.head_dim / (model.head_dim + 64)  # inner dim of the scores' product
    slower = np.where(np.mod(model.head_dim, 8) > 0, MISALIGNED_HEADS, 1.0)
    plain = 2 * slower * flops / (machine.attention_flops * constants.gemm_ampere * short)
    plain = plain + constants.score_passes * scores / machine.memory_bytes_per_s + 5 * gap_s(columns, constants)
    kept = columns.published.flash_attention > 0
    return np.where(kept, flash, plain), np.where(kept, FLASH_BACKWARD * flash, 2 * plain)


def _traffic(columns: PricedColumns, constants: Constants, inner: Column, kind: str) -> Column:
    """A norm and a residual of each sublayer, RoPE and the activation, a mixer's scan; casts to fp8. Forward."""
    model, layout, rows = columns.model, columns.layout, tokens(columns)
    whole = np.where(layout.sequence_parallel > 0, layout.tp, 1)
    queries, between = np.zeros(columns.count), np.zeros(columns.count)
    if kind[0] in ATTENTIONS:
        queries, between = model.query_width, 2 * (model.query_width + model.kv_width)
    elif kind[0] in MIXERS:
        queries, between = widths(columns, kind[0])[1], mixer_channels(columns, kind[0])
    channels = 5 * len(kind) * model.hidden / whole + between / layout.tp
    channels = channels + (2 + model.gated) * inner / layout.tp
    times = np.where(columns.software.fused > 0, constants.traffic_fused, constants.traffic_plain)
    small = (columns.format >= 1) & (columns.format <= 3)
    read = len(kind) * model.hidden + (queries + inner) / layout.tp
    casts = np.where(small, constants.traffic_cast * 2 * read, 0.0)
    moved = element_bytes(columns) * rows * (channels * times + casts) / tuned(columns, constants)
    kernels = np.where(columns.software.fused > 0, FUSED_KERNELS, PLAIN_KERNELS) * (len(kind) / 2)
    return moved / columns.machine.memory_bytes_per_s + kernels * gap_s(columns, constants)


def _tensor_parallel(columns: PricedColumns, constants: Constants) -> Column:
    """Two all-gathers and two reduce-scatters forward (two all-reduces without sequence parallelism)."""
    layout = columns.layout
    whole = element_bytes(columns) * tokens(columns) * columns.model.hidden
    once = gather_s(columns, constants, whole, layout.tp, np.ones(columns.count))
    return 4 * once * np.where(columns.published.tp_overlap > 0, constants.tp_exposed, 1.0)


def _context_parallel(columns: PricedColumns, constants: Constants, core: Column) -> Column:
    """Keys and values around the ring, as far as attention on the piece at hand does not hide them."""
    layout = columns.layout
    piece = 2 * element_bytes(columns) * tokens(columns) * columns.model.kv_width / layout.tp
    steps = layout.cp - 1
    hop = piece / bandwidth(columns, constants, layout.cp, layout.tp)
    hop = hop + latency(columns, constants, layout.cp, layout.tp)
    return np.where(layout.cp > 1, np.maximum(0.15 * steps * hop, steps * hop - core * steps / layout.cp), 0.0)
