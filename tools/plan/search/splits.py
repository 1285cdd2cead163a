"""How blocks can be dealt to pipeline stages."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from models.costs.candidate import Candidate, Split, chunks, parallel_config
from parallel.stages import stage_problems

MOST_VPP = 16
SMALL = 4
"""Layers of a chunk of which every number is tried by layout strings. With all numbers DeepSeek-V3 on 512 GB200 has
430,576 layouts instead of 328,628, and its plan takes 5.4 s instead of 4.0 (2 virtual CPUs, 2026-11-22)."""
UNEVEN = 3
"""Dealings with ends of other sizes than the rest that are tried: those whose fullest stage has the least to do."""


@dataclass(slots=True, frozen=True)
class Stages:
    """How blocks are dealt to pipeline stages."""

    vpp: int = 1
    split: Split = "even"
    first_layers: int = 0
    last_layers: int = 0
    chunk_layers: tuple[int, ...] = ()


@cache
def stage_choices(layers: int, pp: int, depths: int = 0, head: float = 1.0) -> tuple[Stages, ...]:
    """Dealings that the program accepts, each once: where two splits deal the same, the one named first. Layout strings
    only where nothing else interleaves so many layers.

    head: blocks that take as long as what the last stage does besides its own.
    """
    if pp == 1:
        return (Stages(),)
    found = _accepted(layers, pp, depths, (*_counted(layers, pp), *_uneven(layers, pp, head)))
    if all(stages.vpp == 1 for stages in found.values()):
        found |= _accepted(layers, pp, depths, _laid_out(layers, pp, head))
    return tuple(found.values())


def _accepted(layers: int, pp: int, depths: int, tried: Iterable[Stages]) -> dict[tuple[int, ...], Stages]:
    """By the layers of their chunks."""
    found: dict[tuple[int, ...], Stages] = {}
    for stages in tried:
        layout = Candidate(pp=pp, **dataclasses.asdict(stages))
        if not stage_problems(parallel_config(layout), layers, depths):
            found.setdefault(tuple(chunks(layers, layout)), stages)
    return found


def _counted(layers: int, pp: int) -> Iterator[Stages]:
    """Equal stages, and those in which embedding and loss, or the loss, count as a block."""
    extras: tuple[tuple[Split, int, int], ...] = (("even", 0, 0), ("embedding_and_loss", 1, 1), ("loss", 0, 1))
    for split, first, last in extras:
        whole = layers + first + last
        if whole % pp or whole // pp < 1 + (split != "even"):
            continue
        share = whole // pp
        for vpp in (size for size in _interleavings(share) if share // size > 1 or split == "even"):
            yield Stages(vpp, split, share - first if first + last else 0, share - last if last else 0)


def _uneven(layers: int, pp: int, head: float) -> Iterator[Stages]:
    """Ends of their own sizes, the last no larger than the first, nor this than the stages between."""
    least = math.ceil(layers / pp)
    found = []
    for middle in range(least, least + math.ceil(head) + 1):
        ends = layers - (pp - 2) * middle
        for last in range(max(1, ends - middle), ends // 2 + 1):
            found.append((max(middle, last + head), ends - last, last, middle))
    for _, first, last, middle in sorted(found)[:UNEVEN]:
        for vpp in _interleavings(math.gcd(first, last, middle if pp > 2 else 0)):
            yield Stages(vpp, "ends", first, last)


def _laid_out(layers: int, pp: int, head: float) -> Iterator[Stages]:
    """Interleaved chunks of two sizes: the fewest chunks, and for each small size as few as there can be."""
    for vpp in range(2, min(layers // pp, MOST_VPP) + 1):
        size = math.ceil(layers / (pp * vpp))
        fewest = size < math.ceil(layers / (pp * (vpp - 1)))  # for chunks no larger than that
        if size > 1 and (vpp == 2 or (fewest and size <= SMALL)):
            chunks = _lightened([size] * (pp * vpp), size * pp * vpp - layers, pp, head)
            yield Stages(vpp, "layout", sum(chunks[::pp]), sum(chunks[pp - 1 :: pp]), tuple(chunks))


def _lightened(chunks: list[int], missing: int, pp: int, head: float) -> list[int]:
    """Without so many layers, each taken from the stage that then has the most to do: from its last whole chunk.

    Of stages with as much to do, the first comes first, which keeps the most microbatches, then those at the end. The
    last chunk of all may end with the head alone.
    """
    size, order = chunks[0], [0, *range(pp - 1, 0, -1)]
    for _ in range(missing):
        places = {stage: place for stage in order if (place := _place(chunks, stage, pp, size)) is not None}
        heaviest = max(places, key=lambda stage: sum(chunks[stage::pp]) + head * (stage == pp - 1))
        chunks[places[heaviest]] -= 1
    return chunks


def _place(chunks: list[int], stage: int, pp: int, size: int) -> int | None:
    """The chunk of a stage that gives up a layer."""
    whole = [place for place in range(stage, len(chunks), pp) if chunks[place] == size]
    if whole:
        return whole[-1]
    return len(chunks) - 1 if stage == pp - 1 and chunks[-1] > 0 and sum(chunks[stage::pp]) > 1 else None


def _interleavings(share: int) -> list[int]:
    return [size for size in range(1, min(share, MOST_VPP) + 1) if share % size == 0]
