"""Which parameters are Muon's, the matrices in each, and their place in what the ranks of tensor parallelism hold.

A fused parameter is several matrices: a gated MLP's gate and up projection, the projections of a mixer, each expert's.
megatron-core's sharded state says which rows of the global tensor a rank holds (parallel/regions.py), so what is put
together here is the same on every layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.regions import HeldTensor


def is_matrix(param: Tensor) -> bool:
    """Whether it is Muon's, as megatron-core chooses: what has two dims, but embeddings and the output layer."""
    return param.ndim == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


class Rows(NamedTuple):
    """A rectangle that one rank of tensor parallelism holds."""

    row: int
    column: int
    height: int
    width: int
    start: int
    """Where it begins in the rank's part of the parameter, flat."""


@dataclass(slots=True, frozen=True)
class MatrixParameter:
    """One of Muon's parameters, on all ranks of tensor parallelism."""

    name: str
    rows: int
    columns: int
    """Of all ranks' parts together."""
    parts: tuple[tuple[Rows, ...], ...]
    """Of each rank that holds a part of its own; one, where every rank holds the same."""
    heights: tuple[int, ...]
    """Rows of each matrix, one below the other; of one matrix where it is not split."""
    groups: int = 1
    """How often ``heights`` are repeated: a fused QKV's query groups, each with its own rows of Q, K and V."""

    @property
    def is_cut(self) -> bool:
        return len(self.parts) > 1

    @property
    def cost(self) -> float:
        """FLOPs of a Newton-Schulz step, but for a factor that all have."""
        found = 0.0
        for height in self.heights:
            short, long = sorted((height * self.groups, self.columns))
            found += short * short * (2 * long + short)
        return found

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """[rows, columns] of what the ranks hold of it, each flat."""
        found = parts[0].new_empty(self.rows, self.columns)
        for part, places in zip(parts, self.parts, strict=True):
            for at in places:
                piece = part[at.start : at.start + at.height * at.width].view(at.height, at.width)
                found[at.row : at.row + at.height, at.column : at.column + at.width] = piece
        return found

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Inverse of ``whole`` for one rank; flat."""
        places = self.parts[rank if self.is_cut else 0]
        found = whole.new_empty(sum(at.height * at.width for at in places))
        for at in places:
            piece = whole[at.row : at.row + at.height, at.column : at.column + at.width]
            found[at.start : at.start + at.height * at.width] = piece.reshape(-1)
        return found

    def matrices(self, whole: Tensor) -> list[Tensor]:
        """Each [its rows, columns]; copies."""
        grouped = whole.view(self.groups, -1, self.columns).split(self.heights, dim=1)
        return [one.reshape(-1, self.columns) for one in grouped]

    def joined(self, matrices: Sequence[Tensor]) -> Tensor:
        """Inverse of ``matrices``."""
        grouped = [one.view(self.groups, -1, self.columns) for one in matrices]
        return torch.cat(grouped, dim=1).view(self.rows, self.columns)


def on_all_ranks(
    name: str, one: HeldTensor, group: dist.ProcessGroup, *, qkv: Sequence[int] = (), split: bool = False
) -> MatrixParameter:
    """Collective over ``group``, which cuts the parameter or holds it in copies.

    qkv: rows of a query group's Q, K and V, where it is to be split so. split: whether other fused parameters are.
    """
    own = tuple(
        Rows(at.offset[-2], at.offset[-1], at.shape[-2], at.shape[-1], at.start)
        for at in sorted(one.regions, key=lambda at: at.start)
    )
    parts: list[tuple[Rows, ...]] = [()] * group.size()
    dist.all_gather_object(parts, own, group=group)
    if all(part == parts[0] for part in parts):
        parts = parts[:1]
    rows, columns = one.regions[0].global_shape[-2:]
    if sum(at.height * at.width for part in parts for at in part) != rows * columns:
        raise NotImplementedError(f"{name}: its parts are not the whole of {rows} x {columns}")
    if qkv:
        return MatrixParameter(name, rows, columns, tuple(parts), tuple(qkv), groups=rows // sum(qkv))
    # The n-th piece of each rank is a part of the n-th matrix.
    by_matrix = sorted(zip(*parts, strict=True), key=lambda pieces: pieces[0].row)
    heights = [sum(at.height for at in pieces) if _in_rows(pieces) else pieces[0].height for pieces in by_matrix]
    return MatrixParameter(name, rows, columns, tuple(parts), tuple(heights) if split else (rows,))


def _in_rows(pieces: Sequence[Rows]) -> bool:
    """Whether the ranks hold different rows, not columns."""
    return len({at.row for at in pieces}) == len(pieces)


def elements(one: MatrixParameter, rank: int) -> int:
    """That a rank of tensor parallelism holds."""
    return sum(math.prod((at.height, at.width)) for at in one.parts[rank if one.is_cut else 0])
