"""Batches as Megatron-LM's get_ltor_masks_and_position_ids defines them, from windows of tokens: written from its
definition, not from data/loader.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """b samples of s tokens."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    documents: list[list[tuple[int, int]]]
    """Of each sample the spans [first, last) of tokens that see one another."""
    positions: Tensor
    """[b, s]: they restart with a document, or do not."""


def microbatch(windows: np.ndarray, end: int, *, apart: bool, restart: bool, masked: bool) -> Microbatch:
    """windows: token ids [b, s + 1]. apart, restart, masked: Megatron's --reset-attention-mask, --reset-position-ids
    and --eod-mask-loss."""
    tokens, labels = torch.tensor(windows[:, :-1]).long(), torch.tensor(windows[:, 1:]).long()
    spans = [list(_documents(row.tolist(), end)) for row in tokens]
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    if restart:
        for row, of_row in enumerate(spans):
            for first, last in of_row:
                positions[row, first:last] = torch.arange(last - first)
    mask = torch.ones(tokens.shape)
    if masked:
        mask[tokens == end] = 0.0
    whole = [[(0, tokens.shape[1])]] * len(tokens)
    return Microbatch(
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        documents=spans if apart else whole,
        positions=positions,
    )


def _documents(tokens: list[int], end: int) -> Iterator[tuple[int, int]]:
    first = 0
    for place, token in enumerate(tokens):
        if token == end:
            yield first, place + 1
            first = place + 1
    if first < len(tokens):
        yield first, len(tokens)
