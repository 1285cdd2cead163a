"""Bytes of a block that fine-grained activation offloading (train.offload_modules) sends to the host.

Counted from megatron-core's own table of what each module has sent, on the emulated device (2026-11-27): what
Transformer Engine saves within it. A tensor that two modules save is sent twice, and leaves the GPU once both have let
it go.
"""

from typing import NamedTuple

import numpy as np

from models.costs.activations import (
    SOFTMAX_BYTES,
    product_input_bytes,
    returned_bytes,
    sent_tokens,
    stream_bytes,
    through_bytes,
)
from models.costs.cases import Column, MemoryColumns, element_bytes, tokens
from models.costs.program import OFFLOADED_MODULES


class OffloadedBytes(NamedTuple):
    """Of one block, one microbatch."""

    freed: Column
    """That the GPU no longer holds."""
    sent: Column
    """That the host holds."""


def offloaded_bytes(columns: MemoryColumns, *, experts: bool) -> OffloadedBytes:
    """Tensors below min_offloaded_tensor_size are counted as if they went, too: small beside the others."""
    stream, read, width = stream_bytes(columns), product_input_bytes(columns), element_bytes(columns)
    is_latent, normed = columns.matrices[3][0] > 0, stream * read / width
    scale = SOFTMAX_BYTES * tokens(columns) * columns.model.heads / columns.layout.tp
    through, latents = through_bytes(columns)
    returned = returned_bytes(columns)
    qkv_linear, core_attn = _on(columns, "qkv_linear"), _on(columns, "core_attn")
    freed = _on(columns, "attn_norm") * is_latent * stream + _on(columns, "attn_proj") * returned
    freed = freed + qkv_linear * (normed + np.where(is_latent, latents, stream)) + core_attn * (through + scale)
    # twice: what both down-projections of latent attention have read, and what attention returns
    sent = freed + qkv_linear * is_latent * normed + core_attn * returned
    of_experts = _expert_bytes(columns) if experts else 0.0
    share = columns.software.offloaded_module_share
    return OffloadedBytes((freed + of_experts) * share, (sent + of_experts) * share)


def _expert_bytes(columns: MemoryColumns) -> Column:
    """The norm before them, tokens sent, first products."""
    model, tokens_sent = columns.model, sent_tokens(columns)
    inner = element_bytes(columns) * (1 + model.gated) * model.expert_ffn / columns.layout.etp
    norm = _on(columns, "mlp_norm") * stream_bytes(columns)
    first = _on(columns, "expert_fc1") * tokens_sent * product_input_bytes(columns) * model.expert_hidden
    return norm + first + _on(columns, "moe_act") * tokens_sent * inner


def _on(columns: MemoryColumns, module: str) -> Column:
    """1 where it is offloaded, else 0."""
    mask = columns.software.offloaded_modules.astype(np.int64)
    return (mask >> OFFLOADED_MODULES.index(module) & 1).astype(np.float64)
