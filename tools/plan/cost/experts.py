"""Seconds of a layer's experts: products, the memory traffic of routed tokens, their way over the links.

No torch here.
"""

import numpy as np

from tools.plan.cases import Columns
from tools.plan.cost.constants import Constants
from tools.plan.cost.links import exchange_s, gather_s
from tools.plan.cost.products import gap_s, product_s
from training.memory.activations import element_bytes
from training.memory.cases import FORMATS, Column, tokens


def routed_products(columns: Columns, constants: Constants) -> Column:
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


def _copies(columns: Columns, constants: Constants) -> Column:
    """Of tokens, that the fullest rank sends to experts: one for each expert that a token goes to."""
    uneven = np.where(columns.software.balanced_experts > 0, 1.0, constants.imbalance)
    return np.asarray(tokens(columns) / columns.layout.tp * columns.model.topk * uneven)


def _grouped(columns: Columns, constants: Constants, count: Column, m: Column, n: Column, k: Column) -> Column:
    """``count`` products of the same shape: one after the other, or one kernel for all where experts are fused."""
    m = np.maximum(m, 1e-3)  # models without experts
    fused = columns.software.fused_experts > 0
    kernels = np.where(fused, 1.0, count)
    each = product_s(columns, constants, m * count / kernels, n, k) - gap_s(columns, constants)
    weights = element_bytes(columns) * count / kernels * n * k / (0.8 * columns.machine.memory_bytes_per_s)
    each = np.maximum(each, weights)
    share = np.where(fused, constants.expert_gemm_fused, constants.expert_gemm)
    return kernels * (each / share * _grouped_in_fp4(columns, constants) + gap_s(columns, constants))


def _grouped_in_fp4(columns: Columns, constants: Constants) -> Column:
    """Times that experts' products in fp4 take against a single one: no less than mxfp8's (TransformerEngine #2281).

    Cards have twice the fp8 FLOPS that they have in 16 bits.
    """
    fp4 = columns.machine.peak_flops * constants.gemm_blackwell_fp4
    fp8 = 2 * columns.machine.attention_flops * constants.gemm_blackwell_mxfp8
    return np.where(columns.format == FORMATS.index("fp4"), np.maximum(1.0, fp4 / fp8), 1.0)


def routed_traffic(columns: Columns, constants: Constants) -> Column:
    """Forward: copies of tokens sorted by expert and back, the activation between the products, and casts to fp8."""
    model = columns.model
    passes = np.where(columns.software.fused_dispatch > 0, 0, 4)  # read and written, before and after
    sorting = passes * model.expert_hidden
    activation = constants.traffic_fused * (2 + model.gated) * model.expert_ffn
    small = (columns.format >= 1) & (columns.format <= 3)
    casts = np.where(small, constants.traffic_cast * 2 * (model.expert_hidden + model.expert_ffn), 0.0)
    lean = np.where(columns.software.fused_experts > 0, constants.fused_experts, 1.0)
    channels = sorting + constants.expert_traffic * (activation + casts)
    moved = element_bytes(columns) * _copies(columns, constants) * channels
    return lean * moved / columns.machine.memory_bytes_per_s


def dispatch_s(columns: Columns, constants: Constants) -> Column:
    """Forward: the all-to-all of tokens to their experts and back, as far as nothing else hides it."""
    layout = columns.layout
    sent = element_bytes(columns) * _copies(columns, constants) * columns.model.expert_hidden
    stride = np.where(layout.etp > 1, layout.etp, 1)
    there = exchange_s(columns, constants, sent, layout.ep, stride, columns.model.topk)
    gathered = gather_s(columns, constants, sent * layout.etp, layout.etp, np.ones(columns.count))
    exposed = np.where(columns.software.overlaps_dispatch > 0, constants.tp_exposed, 1.0)
    return 2 * (there + gathered) * exposed


def host_s(columns: Columns, constants: Constants) -> tuple[Column, Column]:
    """Forward: what a layer takes at least where the host launches each kernel, and waiting for counts of tokens."""
    launches = np.where(columns.software.graphed > 0, 0.0, constants.expert_host_s)
    return launches, np.where(columns.software.waits_for_counts > 0, constants.expert_wait_s, 0.0)
