"""This rank's batches: which ranks read, reading ahead, and what a model takes."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from data.config import DataConfig
from data.order import global_batch_indices, rank_indices
from data.prefetch import Prefetcher, Ring
from data.prepared import Samples
from data.source import TokenSource, build_source
from data.streaming.source import StreamedSource

__all__ = [
    "Batch",
    "Packing",
    "Prefetcher",
    "Ring",
    "Samples",
    "StreamedSource",
    "TokenSource",
    "build_source",
    "global_batch_indices",
    "needs_batch",
    "rank_indices",
    "to_batch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the documents within a sample are kept apart."""

    eod: int
    """The id that ends a document; it belongs to the document it ends."""
    reset_attention: bool = False
    """Documents do not see one another."""
    reset_positions: bool = False
    """Positions restart with each document."""
    eod_mask_loss: bool = False
    """No loss for what is predicted from ``eod``."""

    @classmethod
    def from_config(cls, config: DataConfig, eod: int) -> Self:
        """What the data section asks for, with the tokenizer's ``eod``."""
        return cls(
            eod=eod,
            reset_attention=config.reset_attention_mask,
            reset_positions=config.reset_position_ids,
            eod_mask_loss=config.eod_mask_loss,
        )

    @property
    def by_document(self) -> bool:
        """Whether every stage computes with where documents start."""
        return self.reset_attention or self.reset_positions


class Batch(NamedTuple):
    """One microbatch; every tensor is [b, s]."""

    tokens: Tensor
    """int64"""
    labels: Tensor
    """int64; the token after each token"""
    loss_mask: Tensor
    """float32; 1 where the loss counts"""
    position_ids: Tensor
    """int64; in the sample, or in the document where positions restart"""
    starts: Tensor | None = None
    """int64; where in the sample each token's document starts. None: documents see one another."""


def to_batch(window: Tensor, device: torch.device, packing: Packing | None = None) -> Batch:
    """Derive a microbatch on `device` from its tokens [b, s+1] int32: a seventh of the bytes goes there.

    Without `packing` a sample is one text. With it, Megatron's meaning: get_ltor_masks_and_position_ids.
    """
    window = window.to(device, non_blocking=True)
    tokens, labels = window[:, :-1].long(), window[:, 1:].long()
    positions = torch.arange(tokens.shape[1], device=device)
    position_ids, starts = positions.expand_as(tokens).contiguous(), None
    if packing and packing.by_document:
        begins = document_starts(window[:, :-1], packing.eod)
        starts = begins if packing.reset_attention else None
        position_ids = positions - begins if packing.reset_positions else position_ids
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    if packing and packing.eod_mask_loss:
        loss_mask[tokens == packing.eod] = 0.0
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=position_ids,
        starts=starts,
    )


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Position in the sample at which each token's document starts: tokens [b, s], whole numbers, -> [b, s] int64.

    The first document starts at 0, wherever it was cut.
    """
    starts = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    positions = torch.arange(1, tokens.shape[1], device=tokens.device)
    torch.mul(tokens[:, :-1] == eod, positions, out=starts[:, 1:])
    return starts.cummax(dim=1).values


def needs_batch(pipeline_rank: int, pipeline_size: int, tensor_rank: int, every_stage: bool = False) -> bool:
    """Whether this rank reads tokens: the first stage embeds them and the last is scored on them; the other
    tensor ranks receive them from tensor rank 0. every_stage: so do those between, to learn where documents start.
    """
    return tensor_rank == 0 and (every_stage or pipeline_rank in (0, pipeline_size - 1))
