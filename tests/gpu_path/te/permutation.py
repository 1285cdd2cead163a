"""Transformer Engine's Triton kernels that sort tokens by expert, in plain torch: in Triton's interpreter a training of
seconds takes minutes. checks/triton_kernels.py compares the two.

row_id_map: int32 [tokens, 2 experts + 1], whose first columns have a token's row among those of all experts, -1 where
it is not sent; the kernels' own has more.
"""

from typing import Any

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    sent = routing_map.t().reshape(-1).to(torch.int32)  # expert by expert
    rows = torch.where(sent > 0, sent.cumsum(0) - 1, -1)
    found = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32, device=routing_map.device)
    found[:, :num_experts] = rows.view(num_experts, num_tokens).t()
    return found


def _padded(row_id_map: Tensor, pad_offsets: Tensor | None) -> Tensor:
    rows = row_id_map[:, : row_id_map.shape[1] // 2].long()
    return rows if pad_offsets is None else torch.where(rows >= 0, rows + pad_offsets, rows)


def _scattered(rows: Tensor, values: Tensor, length: int) -> Tensor:
    """values [tokens, experts, ...] at their rows; one row more takes what is not sent."""
    found = values.new_zeros(length + 1, *values.shape[2:])
    found[torch.where(rows >= 0, rows, length).flatten()] = values.flatten(0, 1)
    return found[:length].contiguous()


def permute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, scale: Tensor | None, pad_offsets: Tensor | None,
    num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int, scale_hidden_dim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(rows, their scales, their weights)."""
    rows = _padded(row_id_map, pad_offsets)

    def spread(each: Tensor) -> Tensor:
        return _scattered(rows, each[:, None].expand(-1, num_experts, -1), num_out_tokens)

    weights = None if probs is None else _scattered(rows, probs, num_out_tokens)
    return spread(inp), None if scale is None else spread(scale), weights


def unpermute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, permuted_probs: Tensor | None,
    pad_offsets: Tensor | None, num_tokens: int, num_experts: int, hidden_size: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(each token's rows summed up in fp32, weights [tokens, experts])."""
    if merging_probs is not None:
        raise NotImplementedError("weights that are applied as tokens come back are not emulated")
    rows = _padded(row_id_map, pad_offsets)
    sent = rows >= 0
    summed = (inp[rows.clamp(min=0)].float() * sent[..., None]).sum(1).to(inp.dtype)
    weights = None if permuted_probs is None else permuted_probs[rows.clamp(min=0)] * sent
    return summed, weights


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """int32 [tokens]: where each goes when chunks are put into the order of sorted_indices."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    starts, ends = sizes.cumsum(0) - sizes, sizes[order].cumsum(0)
    shifts = torch.empty_like(starts).scatter(0, order, ends - sizes[order]) - starts
    moved_by = shifts.repeat_interleave(sizes, output_size=num_tokens)  # of known size: the host does not wait
    return (torch.arange(num_tokens, device=sizes.device) + moved_by).to(torch.int32)


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    rows = row_id_map.long()

    def moved(each: Tensor) -> Tensor:
        return torch.empty_like(each).index_copy_(0, rows, each) if is_forward else each[rows]

    return moved(inp.contiguous()), None if probs is None else moved(probs.contiguous())


REPLACED: tuple[Any, ...] = (
    make_row_id_map, permute_with_mask_map, unpermute_with_mask_map, make_chunk_sort_map, sort_chunks_by_map
)  # fmt: skip
