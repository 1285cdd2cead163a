"""Seconds that one rank of a pipeline stage computes in a step, where nothing is sent and no stage waits.

``step_times`` prices the slowest stage, with collectives and the bubble. This is the same of a stage that is asked for,
without them, for what one card can measure of a rank of many (tests/gpu/subjects/planned_layouts.py).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from models.costs.states import BlockStack
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.head import embedding_s, head_s
from tools.plan.cost.launches import launching_s
from tools.plan.cost.layer import mean_block
from tools.plan.cost.sharding import accumulate_s, optimizer_s

SENT = ("tp", "cp", "ep")
"""Of a block's times, those that nothing computes in."""


def computing_s(cases: Sequence[PricedCase], stacks: Sequence[BlockStack], stages: Sequence[int],
                constants: Constants) -> list[dict[str, float]]:  # fmt: skip
    """Of each case, by what takes them; their sum is the step. Blocks count as mean ones, as the planner prices them,
    and ``fixed`` is what it adds to every step."""
    columns, stage = PricedColumns(cases), np.array(stages, np.float64)
    count, last = columns.layout.microbatches, stage == columns.layout.pp - 1
    held = [
        sum(stack.blocks(case.layout)[own][:2]) for case, stack, own in zip(cases, stacks, stages, strict=True)
    ]  # fmt: skip
    blocks = np.array(held, np.float64) + columns.model.extra_heads * last
    block, _ = mean_block(columns, constants)
    parts = block.times(blocks)
    spent = {name: getattr(parts, name) for name in parts.__slots__ if name not in SENT}
    spent["head"] = last * head_s(columns, constants) + (stage == 0) * embedding_s(columns)
    spent["traffic"] = spent["traffic"] + accumulate_s(columns)
    of_block, of_head = launching_s(columns)
    device = sum(spent.values(), np.zeros(columns.count))
    spent["host"] = np.maximum(0.0, blocks * of_block + last * of_head - device)
    spent = {name: count * seconds for name, seconds in spent.items()}
    spent |= {"optimizer": optimizer_s(columns, constants), "fixed": np.full(columns.count, constants.fixed_s)}
    return [{name: float(seconds[number]) for name, seconds in spent.items()} for number in range(columns.count)]


def in_balance(case: PricedCase) -> PricedCase:
    """The same where routing gives every expert as many tokens."""
    return dataclasses.replace(case, published=dataclasses.replace(case.published, balanced_experts=True))
