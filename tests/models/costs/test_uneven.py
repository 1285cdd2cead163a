"""What a stage holds of chunks of different sizes: counted pass by pass."""

import pytest

from campaign import param
from models.costs.peak import crowding, stage_memory
from models.costs.states import BlockStack
from tests.tools.plan.test_layouts import question
from tools.plan.cost.cases import PricedColumns
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import planned_cases, price


def counted(sizes: tuple[int, ...], stage: int, pp: int, microbatches: int) -> tuple[int, int, int]:
    """Most blocks; most while the last chunk is given back, and after the first was: by walking Megatron's schedule."""
    vpp = len(sizes)
    passes = [(number // (pp * vpp), number // pp % vpp) for number in range(microbatches * vpp)]
    forward, backward = [chunk for _, chunk in passes], [vpp - 1 - chunk for _, chunk in passes]
    warm_up = min(2 * (pp - stage - 1) + (vpp - 1) * pp, len(forward))
    held, most, at_the_end, at_the_start = sum(sizes[chunk] for chunk in forward[:warm_up]), 0, 0, 0
    for number, back in enumerate(backward):
        if warm_up + number < len(forward):
            held += sizes[forward[warm_up + number]]
        most = max(most, held)
        at_the_end = max(at_the_end, held * (back == vpp - 1))
        held -= sizes[back]
        at_the_start = max(at_the_start, held * (back == 0))
    return most, at_the_end, at_the_start


@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (3, 1), (1, 3), (2, 2), (4, 4, 0)], ids=str)
@pytest.mark.parametrize("stage, microbatches", [(0, 4), (0, 16), (3, 8), (1, 64)])
def test_as_many_as_the_schedule_holds(sizes: tuple[int, ...], stage: int, microbatches: int) -> None:
    pp = 4
    units = min(2 * (pp - stage - 1) + (len(sizes) - 1) * pp + 1, microbatches * len(sizes))
    mean = units * sum(sizes) / len(sizes)
    assert [share * mean for share in crowding(sizes, stage, pp, microbatches)] == pytest.approx(
        counted(sizes, stage, pp, microbatches)
    )


@pytest.mark.parametrize("sizes, microbatches", [((2, 1), 2), ((0, 0), 8), ((1, 0), 1)])
def test_any_row_of_a_table_has_an_answer(sizes: tuple[int, ...], microbatches: int) -> None:
    assert all(share >= 0 for share in crowding(sizes, 0, 4, microbatches))


@pytest.mark.parametrize("model, gpus, fixed", [("deepseek_v3", 1024, {"pp": 16}), param(("llama31_405b", 512, {}))])
def test_no_stage_holds_more_than_the_fullest(model: str, gpus: int, fixed: dict[str, int]) -> None:
    """DeepSeek-V3's first three blocks are dense: its fullest stage may be the first without them."""
    asked = question(model, gpus=gpus, batch=4096, zero=1, **fixed)
    plans = [plan for plan in price(asked, candidates(asked), keep=30) if plan.layout.pp > 1]
    stack, found = BlockStack(asked.shape), 0
    for plan in plans:
        columns = PricedColumns(planned_cases(asked, [plan.layout]))
        for stage in range(plan.layout.pp):
            held = float(stage_memory(columns, [stack], [plan.layout], [stage]).total[0])
            assert held <= plan.total_bytes * (1 + 1e-9), (plan.layout, stage)
            found += stage == plan.fullest_stage
    assert found == len(plans) > 20
