"""Whole tensors for ranks that each hold a slice of them: dealt by cost, collected, and given back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

type Group = dist.ProcessGroup | None
"""None: this rank alone."""


class FlatRange(NamedTuple):
    """Elements [start, end) of a flat tensor, which a rank holds."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


type FlatRanges = Sequence[Sequence[FlatRange]] | Mapping[int, Sequence[FlatRange]]
"""Of each number, what each rank of a group holds."""


def size_of(group: Group) -> int:
    return 1 if group is None else group.size()


def rank_in(group: Group) -> int:
    return 0 if group is None else group.rank()


def rounds(costs: Sequence[float], ranks: int) -> Iterator[list[int | None]]:
    """For each round, the number of the piece of work that each rank has, if any.

    Work of like cost is done at the same time, the costliest first: a round lasts as long as its costliest, and a rank
    has one tensor in memory.
    """
    order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    for first in range(0, len(order), ranks):
        found: list[int | None] = [*order[first : first + ranks]]
        yield found + [None] * (ranks - len(found))


def collect(
    dealt: Sequence[int | None],
    spans: FlatRanges,
    mine: Callable[[int], Tensor],
    group: Group,
    like: Tensor,
) -> Tensor | None:
    """What this rank was dealt, flat and whole; None where that is nothing. Collective over ``group``.

    mine: this rank's elements of a number, flat. like: says dtype and device.
    """
    out = [like if number is None else mine(number) for number in dealt]
    number = dealt[rank_in(group)]
    lengths = [0] * size_of(group) if number is None else [span.length for span in spans[number]]
    pieces = _exchange(out, lengths, group)
    if number is None:
        return None
    whole = like.new_empty(max(span.end for span in spans[number]))
    for span, piece in zip(spans[number], pieces, strict=True):
        whole[span.start : span.end] = piece
    return whole


def give_back(
    dealt: Sequence[int | None],
    spans: FlatRanges,
    whole: Tensor | None,
    group: Group,
    like: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """Inverse of ``collect``: (number, this rank's elements of it) of all that were dealt."""
    rank, number = rank_in(group), dealt[rank_in(group)]
    if number is None or whole is None:
        out = [like] * size_of(group)
    else:
        out = [whole[span.start : span.end] for span in spans[number]]
    lengths = [0 if each is None else spans[each][rank].length for each in dealt]
    pieces = _exchange(out, lengths, group)
    yield from ((each, piece) for each, piece in zip(dealt, pieces, strict=True) if each is not None)


def _exchange(out: Sequence[Tensor], lengths: Sequence[int], group: Group) -> list[Tensor]:
    """``out``: for each rank, flat. Returns what comes from each rank, of these lengths."""
    if group is None or group.size() == 1:
        return list(out)
    given = torch.cat(list(out))
    taken = given.new_empty(sum(lengths))
    dist.all_to_all_single(taken, given, list(lengths), [each.numel() for each in out], group=group)
    return list(taken.split(list(lengths)))
