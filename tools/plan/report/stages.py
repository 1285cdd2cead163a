"""What each pipeline stage does with a step: its own layers, embedding or head, and its idle time.

From the parts that the layout was priced with (tools/plan/cost/step.py), so that the slowest stage spends what the
table says of the step.
"""

from dataclasses import dataclass

from models.costs.candidate import Candidate, chunks
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.head import embedding_s, head_s
from tools.plan.cost.layer import BlockTimes, mean_block
from tools.plan.cost.sharding import accumulate_s
from tools.plan.report.schedule import Seconds
from tools.plan.search.pricing import PricedLayout, constants, planned_cases
from tools.plan.search.request import PlanRequest

BACKWARD = 2 / 3
"""Of the embedding's and the head's time: two of a matrix's three products are its gradients'."""
COMMUNICATION = ("tp", "cp", "ep", "p2p", "dp")


@dataclass(slots=True, frozen=True)
class StageTimeline:
    """One pipeline stage over a whole step."""

    layers: int
    spent_s: dict[str, float]
    """By what takes them, as in ``PricedLayout.spent_s``; their sum is the step's time."""

    def share(self, *names: str) -> float:
        """Of the step."""
        return sum(self.spent_s[name] for name in names) / sum(self.spent_s.values())


@dataclass(slots=True, frozen=True)
class _Parts:
    """Seconds of one microbatch."""

    block: BlockTimes
    block_forward: float
    embedding: float
    head: float
    accumulate: float
    """Its gradients, added to those of the others."""


def pass_seconds(question: PlanRequest, plan: PricedLayout) -> Seconds:
    """Of every chunk: the first looks words up, the last computes the loss."""
    layout, parts = plan.layout, _parts(question, plan.layout)
    layers = _layers(question, layout)
    forward = [count * parts.block_forward for count in layers]
    backward = [count * (float(parts.block.total[0]) - parts.block_forward) for count in layers]
    for place, seconds in ((0, parts.embedding), (-1, parts.head)):
        forward[place] += (1 - BACKWARD) * seconds
        backward[place] += BACKWARD * seconds
    exchanges = 2 * layout.vpp * layout.microbatches
    return Seconds(
        forward,
        [seconds + parts.accumulate / layout.vpp for seconds in backward],
        plan.spent_s["p2p"] / exchanges,
    )


def stages(question: PlanRequest, plan: PricedLayout) -> list[StageTimeline]:
    """First to last, with all microbatches of the step. What a stage does not use of the step's time is its bubble."""
    layout, parts = plan.layout, _parts(question, plan.layout)
    layers = _layers(question, layout)
    return [
        _stage(plan, parts, number, sum(layers[number :: layout.pp]))
        for number in range(layout.pp)
    ]  # fmt: skip


def _stage(plan: PricedLayout, parts: _Parts, number: int, layers: int) -> StageTimeline:
    count = plan.layout.microbatches
    spent = {name: count * layers * float(getattr(parts.block, name)[0]) for name in BlockTimes.__slots__}
    spent["traffic"] += count * parts.accumulate
    first, last = number == 0, number == plan.layout.pp - 1
    spent["head"] = count * (first * parts.embedding + last * parts.head)
    spent |= {name: plan.spent_s[name] for name in ("p2p", "dp", "optimizer", "host", "other")}
    spent["bubble"] = max(0.0, plan.step_s - sum(spent.values()))
    return StageTimeline(layers, spent)


def _parts(question: PlanRequest, layout: Candidate) -> _Parts:
    columns, numbers = PricedColumns(planned_cases(question, [layout])), constants(question.cluster)
    block, forward = mean_block(columns, numbers)
    return _Parts(
        block=block,
        block_forward=float(forward[0]),
        embedding=float(embedding_s(columns)[0]),
        head=float(head_s(columns, numbers)[0]),
        accumulate=float(accumulate_s(columns)[0]),
    )


def _layers(question: PlanRequest, layout: Candidate) -> list[int]:
    """Of each chunk; depths of multi-token prediction come after the last."""
    found = chunks(question.shape.num_layers, layout)
    return [*found[:-1], found[-1] + question.shape.mtp_num_layers]
