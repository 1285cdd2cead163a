"""Seconds of a layer's experts: products, the memory traffic of routed tokens, their way over the links."""

import numpy as np

from models.costs.cases import FORMATS, Column, element_bytes, tokens
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.links import exchange_s, gather_s
from tools.plan.cost.products import gap_s, product_s, tuned

BIAS_CHANNELS, BIAS_CHANNELS_FP32 = 6, 14
"""16-bit passes over experts' outputs to add biases, forward: each bias times its token's weight written, the sum of
both written, experts' parts put together, and turned back into 16 bits, as megatron-core's TEGroupedMLP does outside
its fused kernels (_apply_bias, 0.15 to 0.18). All but the outputs are in the type of the weights: the router's 16 bits
for its plain all-to-all, fp32 for DeepEP and HybridEP."""
SLOW_BIAS_GRADIENTS = 1362.8 / 155.6
"""Times that the kernel of fused experts' activation gradient takes with biases in cudnn-frontend 1.24: its spilled
reduction before and after the fix (NVIDIA/cudnn-frontend issue #256 and pull request #322)."""


def routed_products(columns: PricedColumns, constants: Constants) -> Column:
    """Forward: the router, in 16 bits, and a product each way of each local expert."""
    model, layout = columns.model, columns.layout
    experts = np.maximum(model.experts, 1)
    local = experts / layout.ep
    each = _copies(columns, constants) * layout.ep * layout.etp / experts
    width, hidden = model.expert_ffn / layout.etp, model.expert_hidden
    grouped = _grouped(columns, constants, local, each, (1 + model.gated) * width, hidden)
    grouped = grouped + _grouped(columns, constants, local, each, hidden, width)
    wide = np.ones(columns.count, dtype=np.bool_)
    return grouped + product_s(columns, constants, tokens(columns) / layout.tp, experts, model.hidden, wide)


def _copies(columns: PricedColumns, constants: Constants) -> Column:
    """Of tokens, that the fullest rank sends to experts: one for each expert that a token goes to."""
    uneven = np.where(columns.published.balanced_experts > 0, 1.0, constants.imbalance)
    return np.asarray(tokens(columns) / columns.layout.tp * columns.model.topk * uneven)


def _grouped(columns: PricedColumns, constants: Constants, count: Column, m: Column, n: Column, k: Column) -> Column:
    """``count`` products of the same shape: one after the other, or one kernel for all where experts are fused."""
    m = np.maximum(m, 1e-3)  # models without experts
    fused = columns.published.fused_experts > 0
    kernels = np.where(fused, 1.0, count)
    each = product_s(columns, constants, m * count / kernels, n, k, matrices=count / kernels)
    each = each - gap_s(columns, constants)
    share = np.where(fused, constants.expert_gemm_fused, constants.expert_gemm)
    return kernels * (each / share * _grouped_in_fp4(columns, constants) + gap_s(columns, constants))


def _grouped_in_fp4(columns: PricedColumns, constants: Constants) -> Column:
    """Times that experts' products in fp4 take against a single one: no less than mxfp8's (TransformerEngine #2281).

    Cards have twice the fp8 FLOPS that they have in 16 bits.
    """
    fp4 = columns.machine.peak_flops * constants.gemm_blackwell_fp4
    fp8 = 2 * columns.machine.attention_flops * constants.gemm_blackwell_mxfp8
    return np.where(columns.format == FORMATS.index("fp4"), np.maximum(1.0, fp4 / fp8), 1.0)


def routed_traffic(columns: PricedColumns, constants: Constants) -> Column:
    """Forward: copies of tokens sorted by expert and back, the activation between the products, and casts to fp8; by
    kernels that are as new to a card as all others (``tuned``)."""
    model = columns.model
    passes = np.where(columns.published.fused_dispatch > 0, 0, 4)  # read and written, before and after
    sorting = passes * model.expert_hidden
    small = (columns.format >= 1) & (columns.format <= 3)
    biased = (model.expert_biases > 0) & (columns.published.fused_experts == 0)
    adding = np.where(columns.published.fused_dispatch > 0, BIAS_CHANNELS_FP32, BIAS_CHANNELS)
    sorting = sorting + np.where(biased, adding * model.expert_hidden, 0.0)
    casts = np.where(small, constants.traffic_cast * 2 * (model.expert_hidden + model.expert_ffn), 0.0)
    lean = np.where(columns.published.fused_experts > 0, constants.fused_experts, 1.0)
    moved = element_bytes(columns) * _copies(columns, constants) * (sorting + constants.expert_traffic * casts)
    launches = np.where(small & (columns.published.fused_experts == 0), 2 * model.experts / columns.layout.ep, 0.0)
    starts = launches * gap_s(columns, constants)  # a cast of each expert's tokens for each of its products
    routed = lean * moved / columns.machine.memory_bytes_per_s / tuned(columns, constants)
    return routed + starts + activation_s(columns, constants)


def activation_s(columns: PricedColumns, constants: Constants) -> Column:
    """Forward: the memory traffic of the activation between the products, alone."""
    channels = constants.traffic_fused * (2 + columns.model.gated) * columns.model.expert_ffn
    lean = np.where(columns.published.fused_experts > 0, constants.fused_experts, 1.0)
    moved = element_bytes(columns) * _copies(columns, constants) * constants.expert_traffic * channels
    return lean * moved / columns.machine.memory_bytes_per_s / tuned(columns, constants)


def slow_gradients_s(columns: PricedColumns, constants: Constants, activation: Column) -> Column:
    """Backward: what one kernel of the second product's gradient, the activation's and the biases' takes too long.

    activation: backward seconds of the activation alone.
    """
    model, layout = columns.model, columns.layout
    experts = np.maximum(model.experts, 1)
    each = _copies(columns, constants) * layout.ep * layout.etp / experts
    product = _grouped(
        columns, constants, experts / layout.ep, each, model.expert_ffn / layout.etp, model.expert_hidden
    )
    more = (SLOW_BIAS_GRADIENTS - 1) * (product + activation)
    return np.where(columns.published.slow_bias_gradients > 0, more, 0.0)


def dispatch_s(columns: PricedColumns, constants: Constants) -> Column:
    """Forward: the all-to-all of tokens to their experts and back, as far as nothing else hides it."""
    layout = columns.layout
    sent = element_bytes(columns) * _copies(columns, constants) * columns.model.expert_hidden
    stride = np.where(layout.etp > 1, layout.etp, 1)
    there = exchange_s(columns, constants, sent, layout.ep, stride, columns.model.topk)
    gathered = gather_s(columns, constants, sent * layout.etp, layout.etp, np.ones(columns.count))
    # A microbatch's forward pass hides in another one's backward: the first ones on a stage have none, nor the last.
    alone = np.minimum(1.0, layout.pp / (layout.microbatches * layout.vpp))
    exposed = constants.tp_exposed + (1 - constants.tp_exposed) * alone
    return 2 * (there + gathered) * np.where(columns.published.overlaps_dispatch > 0, exposed, 1.0)


def host_s(columns: PricedColumns, constants: Constants) -> tuple[Column, Column]:
    """Forward: what a layer takes at least where the host launches each kernel, and waiting for counts of tokens."""
    launches = np.where(columns.software.graphed > 0, 0.0, constants.expert_host_s)
    return launches, np.where(columns.published.waits_for_counts > 0, constants.expert_wait_s, 0.0)
