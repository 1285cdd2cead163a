"""Attention of packed documents by torch's flash kernels for rows of unequal lengths, where they are proved right.

``torch.nn.attention.varlen.varlen_attn`` takes all documents of a microbatch as one row and ``cu_seqlens``, where each
begins: it computes no mask, and no score that is masked. It runs on CUDA alone, in 16 bits. What the tests hold
to the last digit is attention in blocks (models/layers/blockwise_attention.py), so each machine compares the kernel
with that once, on a small example; where it differs or fails, a line says so and it is not used.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self, cast

import torch
from torch import Tensor

from models.layers.blockwise_attention import AttentionMask, attend_in_blocks
from models.layers.documents import Documents
from models.shapes import GPTShape
from parallel.layout import Layout

Kernel = Callable[..., Tensor]
"""varlen_attn, or what has its arguments."""
LENGTH, SAMPLES = 384, 2
WORSE = 4.0
"""How many times the kernel's error against float32 may be that of blocks in the same dtype: both round every product,
in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """A rank's heads of attention."""

    heads: int
    groups: int
    """Of keys and values."""
    width: int
    """Of queries and keys."""
    value_width: int
    """Another one in latent attention."""

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Self:
        """Those of [..., heads, width] and [..., groups, width]."""
        return cls(heads=query.shape[-2], groups=key.shape[-2], width=query.shape[-1], value_width=value.shape[-1])


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, left: int | None, scale: float | None,
    kernel: Kernel | None = None,
) -> Tensor:  # fmt: skip
    """query [s, b, n, d], key and value [s, b, g, d] of whole samples -> [b, n, s, d].

    left: tokens before its own that a query sees; None: all of its document. kernel: torch's, or one for a test.
    """
    s, b, heads, width = query.shape
    rows = [tensor.transpose(0, 1).reshape(b * s, -1, width) for tensor in (query, key, value)]
    bounds = documents.cu_seqlens
    window = (-1 if left is None else left, 0)  # 0 after its own: causal
    out = (kernel or _torchs())(
        *rows, bounds, bounds, s, s, scale=scale, window_size=window, enable_gqa=heads != key.shape[2]
    )
    return out.view(b, s, heads, width).transpose(1, 2)


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    sizes: HeadSizes,
    left: int | None,
    dropout: float = 0.0,
    context_parallel_size: int = 1,
) -> str:
    """Why documents are attended to in blocks instead; "" where the kernel does it."""
    if device.type != "cuda":
        return f"the kernel needs CUDA, this is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel needs 16 bits, this is {str(dtype).removeprefix('torch.')}"
    if dropout:
        return "the kernel has no dropout of attention"
    if context_parallel_size > 1:
        return "documents that lie on several context ranks need each key's position"
    if sizes.width != sizes.value_width:
        return f"keys are {sizes.width} wide and values {sizes.value_width}"
    return disproof(device, dtype, sizes, left)


def how(shape: GPTShape, device: torch.device, dtype: torch.dtype, layout: Layout) -> str:
    """In words: "by torch's flash kernel ..." or "in blocks of queries (why)"; of windowed layers, too, where it is
    another one."""
    whole = _how(shape, device, dtype, layout, None)
    left = shape.window_size[0]
    windowed = whole if left < 0 else _how(shape, device, dtype, layout, left)
    return whole if windowed == whole else f"{whole}; in windowed layers {windowed}"


def _how(shape: GPTShape, device: torch.device, dtype: torch.dtype, layout: Layout, left: int | None) -> str:
    latent, width = shape.multi_latent_attention, shape.kv_channels
    if shape.attn_logit_softcapping:
        return "in blocks of queries (the kernel has no soft cap of scores)"
    sizes = HeadSizes(
        heads=shape.num_attention_heads // layout.tp,
        groups=(shape.num_attention_heads if latent else shape.num_query_groups) // layout.tp,
        width=shape.qk_head_dim + shape.qk_pos_emb_head_dim if latent else width,
        value_width=shape.v_head_dim if latent else width,
    )
    reason = why_not(device, dtype, sizes, left, shape.attention_dropout, layout.cp)
    return f"in blocks of queries ({reason})" if reason else "by torch's flash kernel for rows of unequal lengths"


@lru_cache
def disproof(
    device: torch.device, dtype: torch.dtype, sizes: HeadSizes, left: int | None, kernel: Kernel | None = None
) -> str:
    """What the kernel gets wrong of output and gradients on a small example; "" where nothing. Draws from its own
    generator; takes some milliseconds, once."""
    draw = torch.Generator().manual_seed(0)
    counts = (sizes.heads, sizes.groups, sizes.groups)
    inputs = [torch.randn((LENGTH, SAMPLES, count, sizes.width), generator=draw).to(device, dtype) for count in counts]
    grad = torch.randn((SAMPLES, sizes.heads, LENGTH, sizes.width), generator=draw).to(device, dtype)
    ends = torch.rand((SAMPLES, LENGTH), generator=draw) < 0.02
    starts = (ends * torch.arange(1, LENGTH + 1)).roll(1, dims=1)
    starts[:, 0] = 0
    starts = starts.cummax(dim=1).values.to(device)
    documents = Documents(starts, torch.arange(LENGTH, device=device) - starts)
    sight = AttentionMask(left=left, documents=documents)
    try:
        found = _with_gradients(lambda q, k, v: attend_packed(q, k, v, documents, left, None, kernel), inputs, grad)
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"the kernel failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    in_blocks = partial(attend_in_blocks, sight=sight)
    blocks = _with_gradients(in_blocks, inputs, grad)
    exact = _with_gradients(in_blocks, [one.float() for one in inputs], grad.float())
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, mine, ours, true in zip(names, found, blocks, exact, strict=True):
        off, usual = (mine.float() - true).abs().max().item(), (ours.float() - true).abs().max().item()
        if not off <= WORSE * usual:  # not a number is no less than anything
            return f"the kernel's {name} is off by {off:.2g} where attention in blocks is by {usual:.2g}"
    return ""


def _with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        output = attend(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _torchs() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11: heads that share keys, unasked
        return lambda *rows, enable_gqa, **settings: cast(Tensor, varlen_attn(*rows, **settings))
    return cast(Kernel, varlen_attn)  # which returns more only where it is asked to
