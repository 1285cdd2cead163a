"""Which sublayers are computed again in the backward pass (train.recompute = "auto:70GiB"): those whose second forward
pass costs least FLOPs, so that no rank is predicted to hold more than the budget.

A sublayer (attention, an MLP, experts, a mixer) that is computed again keeps its input alone. Each pipeline stage is
solved by itself: early ones hold more microbatches. The first sublayers of a kind are chosen: a backward pass comes to
them last, when what others have kept is free, so that there is room for what comes back. Where all sublayers together
spare too little, whole blocks are recomputed, which keep one input each, not two, for as many FLOPs.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.costs.candidate import Candidate
from models.costs.cases import Column, MemoryCase, MemoryColumns
from models.costs.flops import depth_flops, sublayer_flops
from models.costs.mixers import spared_by_sublayer
from models.costs.peak import Recomputed, stage_memory
from models.costs.states import BlockStack
from models.shapes import GPTShape
from program.errors import SharedMistake

WORDS = {"*": "attention", "+": "attention", "-": "MLPs", "E": "experts", "M": "Mamba-2 mixers", "G": "delta nets"}
HALVINGS = 40
"""Of what could be spared, to find what must be: to bytes."""
ROUNDING = 1e-9
"""Share that a sum of the same sizes in another order may lack."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """One sublayer of a pipeline stage."""

    chunk: int
    """Of this stage's chunks."""
    number: int
    """Within the chunk's stack, as HybridModel counts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Kind:
    """Sublayers that spare, and cost, the same: one of each of the stage's chunks together, which then hold alike."""

    symbol: str
    """Of ``models.symbols``."""
    groups: tuple[tuple[Place, ...], ...]
    """In the order of a forward pass."""
    spared: float
    """Bytes of one sublayer, of one microbatch."""
    flops: float
    """Of its forward pass, per token."""

    @property
    def width(self) -> int:
        """Sublayers of a group."""
        return len(self.groups[0])

    def most(self, limit: float) -> int:
        """Groups that may be chosen where no more bytes than a limit may come back beside all that others keep: all, or
        all but the last."""
        return len(self.groups) - (self.spared > limit)


@dataclass(kw_only=True, slots=True, frozen=True)
class StagePlan:
    """What one stage computes again."""

    places: frozenset[Place]
    whole_blocks: bool
    """Every block, of which its input alone is kept; no single places."""
    flops: float
    """More FLOPs per token."""
    most_flops: float
    """The same, if everything were computed again that may be."""
    memory: Recomputed
    """As ``stage_memory`` takes it."""
    words: str

    def numbers(self, chunks: int) -> tuple[frozenset[int], ...]:
        """Of each of this stage's chunks: its sublayers' numbers."""
        return tuple(
            frozenset(place.number for place in self.places if place.chunk == chunk) for chunk in range(chunks)
        )


def recompute_plans(case: MemoryCase, shape: GPTShape) -> tuple[StagePlan, ...]:
    """Of each stage, within the program's budget; none where it has none.

    Raises SharedMistake where a stage holds more than the budget although it recomputes everything.
    """
    budget = case.software.recompute_budget
    if math.isinf(budget):
        return ()
    stages = _Stages(case, shape)
    kinds = [stages.kinds(number) for number in range(case.layout.pp)]
    limits = [(number, limit) for number, own in enumerate(kinds) for limit in sorted({0.0, *(k.spared for k in own)})]
    needed = stages.needed(budget, kinds, limits)
    found = []
    for number, own in enumerate(kinds):
        choices = [
            counts
            for (at, limit), least in zip(limits, needed, strict=True)
            if at == number and least < math.inf
            and (counts := cheapest([(kind, kind.most(limit)) for kind in own], float(least))) is not None
        ]  # fmt: skip
        plans = [_plan(own, counts) for counts in choices]
        found.append(min(plans, key=lambda plan: plan.flops) if plans else stages.whole_blocks(number, budget))
    return tuple(found)


def recomputed_flops(case: MemoryCase, shape: GPTShape) -> float:
    """Per token, of what train.recompute has chosen; 0 without it."""
    return sum((plan.flops for plan in recompute_plans(case, shape)), 0.0)


def described_plans(plans: Sequence[StagePlan]) -> str:
    """``stage 0: MLPs of 8 of 8 blocks; stages 1-3: nothing``."""
    runs = [(words, [number for number, _ in own]) for words, own in itertools.groupby(enumerate(plans), _words)]
    return "; ".join(
        (f"stage {own[0]}" if len(own) == 1 else f"stages {own[0]}-{own[-1]}") + f": {words}" for words, own in runs
    )


def _words(numbered: tuple[int, StagePlan]) -> str:
    return numbered[1].words


class _Stages:
    """Of one case."""

    def __init__(self, case: MemoryCase, shape: GPTShape) -> None:
        self.case, self.shape, self.layout = case, shape, case.layout
        self.stack, self.seq_length = BlockStack(shape), case.model.seq_length
        columns = MemoryColumns([case])
        self.spared = {
            kind: [float(each[0]) for each in spared_by_sublayer(columns, kind)] for kind in dict.fromkeys(shape.blocks)
        }

    def kinds(self, stage: int) -> list[Kind]:
        """Of one stage. None where a block's MLP reads what its attention has read: these two recompute as one."""
        if self.shape.parallel_residual:
            return []
        chunks: dict[tuple[str, float, float], dict[int, list[Place]]] = {}
        for chunk, number, block, part in self._sublayers(stage):
            symbol = self.shape.blocks[block][part]
            flops = sublayer_flops(self.shape, block, self.seq_length)[part]
            same = chunks.setdefault((symbol, self.spared[self.shape.blocks[block]][part], flops), {})
            same.setdefault(chunk, []).append(Place(chunk=chunk, number=number))
        found = []
        for (symbol, spared, flops), of_chunk in chunks.items():
            rows = itertools.zip_longest(*of_chunk.values())
            groups = [tuple(place for place in row if place is not None) for row in rows]
            for _, alike in itertools.groupby(groups, len):
                found.append(Kind(symbol=symbol, spared=spared, flops=flops, groups=tuple(alike)))
        return found

    def _sublayers(self, stage: int) -> Iterator[tuple[int, int, int, int]]:
        """Chunk of the stage, number within it, block of the model, part of the block."""
        ends = list(itertools.accumulate(self.stack.chunks(self.layout), initial=0))
        for chunk, position in enumerate(range(stage, len(ends) - 1, self.layout.pp)):
            blocks = range(ends[position], ends[position + 1])
            parts = [(block, part) for block in blocks for part in range(len(self.shape.blocks[block]))]
            yield from ((chunk, number, block, part) for number, (block, part) in enumerate(parts))

    def needed(self, budget: float, kinds: Sequence[Sequence[Kind]], limits: Sequence[tuple[int, float]]) -> Column:
        """Bytes that each stage must spare, while no sublayer that comes back is larger than a limit; inf: more than
        those together do."""
        stages, largest = [stage for stage, _ in limits], np.array([limit for _, limit in limits])
        high = np.array([
            sum(kind.spared * kind.width * kind.most(limit) for kind in kinds[stage])
            for stage, limit in limits
        ], np.float64)  # fmt: skip
        low, most = np.zeros(len(limits)), high.copy()
        total = functools.partial(self._totals, self.layout, stages, largest)
        at_once, never = total(low) <= budget, total(most) > budget
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = total(middle) <= budget
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return np.select([at_once, never], [0.0, np.inf], high)

    def _totals(self, layout: Candidate, stages: Sequence[int], largest: Column, spared: Column) -> Column:
        count, case = len(stages), replace(self.case, layout=layout)
        columns = MemoryColumns([case] * count)
        return stage_memory(columns, [self.stack] * count, [layout] * count, stages, Recomputed(spared, largest)).total

    def whole_blocks(self, stage: int, budget: float) -> StagePlan:
        """Every block of a stage."""
        layout, nothing = replace(self.layout, recompute="full"), np.zeros(1)
        least = float(self._totals(layout, [stage], nothing, nothing)[0])
        if least > budget:
            raise SharedMistake(
                f"train.recompute, {budget / 2**30:.2f} GiB: stage {stage} is predicted to hold "
                f"{least / 2**30:.2f} GiB on a rank although it recomputes every block. Give at least "
                f'"auto:{math.ceil(least / 2**20)}MiB", or hold less by TP, PP, CP, a sharding strategy or a smaller '
                "micro batch."
            )
        blocks = {block for _, _, block, _ in self._sublayers(stage)}
        flops = sum(sum(sublayer_flops(self.shape, block, self.seq_length)) for block in blocks)
        words = f"all {len(blocks)} blocks"
        if self.shape.mtp_num_layers and stage == self.layout.pp - 1:
            flops += depth_flops(self.shape, self.seq_length)
            words += " and multi-token prediction"
        return StagePlan(
            places=frozenset(), whole_blocks=True, flops=flops, most_flops=flops, memory=Recomputed(), words=words
        )


def cheapest(kinds: Sequence[tuple[Kind, int]], needed: float) -> dict[Kind, int] | None:
    """How many groups of each kind to compute again, at most so many, for the least FLOPs that spare so many bytes;
    None: all spare less.

    Branch and bound over counts, what spares most for a FLOP first; a branch is left when even a fraction of the next
    kind would cost more than the best that is known.
    """
    order = sorted((each for each in kinds if each[0].spared > 0), key=lambda each: each[0].flops / each[0].spared)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())

    def descend(counts: tuple[int, ...], left: float, flops: float) -> None:
        nonlocal best
        if left <= 0:
            best = min(best, (flops, counts))
            return
        if len(counts) == len(order):
            return
        kind, most = order[len(counts)]
        if flops + left * kind.flops / kind.spared >= best[0]:
            return
        for count in range(min(most, math.ceil(left / (kind.width * kind.spared))), -1, -1):
            many = count * kind.width
            descend((*counts, count), left - many * kind.spared, flops + many * kind.flops)

    descend((), needed * (1 - ROUNDING), 0.0)
    return {kind: count for (kind, _), count in zip(order, best[1], strict=False)} if best[0] < math.inf else None


def _plan(kinds: Sequence[Kind], counts: dict[Kind, int]) -> StagePlan:
    chosen = {kind: kind.groups[:count] for kind, count in counts.items()}
    many = {kind: count * kind.width for kind, count in counts.items()}
    words = []
    for symbol in dict.fromkeys(kind.symbol for kind in kinds):
        own = [kind for kind in kinds if kind.symbol == symbol]
        if count := sum(many.get(kind, 0) for kind in own):
            words.append(f"{WORDS[symbol]} of {count} of {sum(kind.width * len(kind.groups) for kind in own)} blocks")
    return StagePlan(
        places=frozenset(place for groups in chosen.values() for group in groups for place in group),
        whole_blocks=False,
        flops=sum(kind.flops * count for kind, count in many.items()),
        most_flops=sum(kind.flops * kind.width * len(kind.groups) for kind in kinds),
        memory=Recomputed(
            spared=sum(kind.spared * count for kind, count in many.items()),
            largest=max((kind.spared for kind, count in counts.items() if count == len(kind.groups)), default=0.0),
        ),
        words=", ".join(words) or "nothing",
    )
