"""Which documents train, which validate and which test."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from data.config import split_weights

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


def split_documents(document_count: int, split: str) -> dict[SplitName, range]:
    """Contiguous document numbers of each split, in the order train, validation, test.

    Boundaries are Megatron's (cumulative weights, rounded), except that a split of weight above 0 gets at
    least one document while there are enough: first train, then validation, then test.
    """
    weights = split_weights(split)
    total, sum_so_far, bounds = sum(weights), 0.0, [0]
    for weight in weights:
        sum_so_far += weight / total
        bounds.append(round(sum_so_far * document_count))
    sizes = [stop - start for start, stop in pairwise(bounds)]
    _give_each_a_document(sizes, [weight > 0 for weight in weights])
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    return {name: range(start, start + size) for name, start, size in zip(SPLITS, starts, sizes, strict=True)}


def split_shards(counts: Sequence[int], split: str) -> Iterator[dict[SplitName, range]]:
    """The same within each of a source's shards, which hold `counts` documents: every split has its part of all.

    Boundaries are rounded over the shards so far, not shard by shard, where many small ones would each give away one
    document or none. Together each split has as many as of one shard with all documents.
    """
    total = sum(counts)
    sizes = [len(documents) for documents in split_documents(total, split).values()]
    wanted = sizes[0], sizes[0] + sizes[1]
    before, position = [0, 0], 0
    for count in counts:
        position += count
        bounds = [0]
        for number, documents in enumerate(wanted):
            due = round(documents * position / total) - before[number]
            bounds.append(min(max(due, bounds[-1]), count))
            before[number] += bounds[-1]
        yield {name: range(*pair) for name, pair in zip(SPLITS, pairwise([*bounds, count]), strict=True)}


def _give_each_a_document(sizes: list[int], wanted: list[bool]) -> None:
    """Fill empty but wanted splits, one document from the largest each time, while that keeps one."""
    for index, is_wanted in enumerate(wanted):
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if is_wanted and sizes[index] == 0 and sizes[largest] > 1:
            sizes[largest] -= 1
            sizes[index] += 1
