"""Prices move as physics says when one thing changes."""

import dataclasses

import numpy as np
import pytest

from models.families import named
from models.sizes import sizes
from tools import clusters
from tools.plan.cases import Case, Columns
from tools.plan.cost.constants import Constants, fitted
from tools.plan.cost.step import StepTimes, step_times
from tools.plan.machine import machine
from training.memory.layouts import Candidate
from training.memory.peak import Memory, memory
from training.memory.software import OURS, Software


def priced(
    layout: Candidate, model: str = "llama3_70b", cluster: str = "h100_ib", seq: int = 8192, software: Software = OURS
) -> tuple[StepTimes, Memory]:
    """One case; columns of one element."""
    shape, layout = named(model), dataclasses.replace(layout, precision=HALF.get(cluster, layout.precision))
    case = Case(
        model=sizes(shape, seq),
        layout=layout,
        machine=machine(clusters.load(cluster), layout.precision),
        software=software,
    )
    columns = Columns([case])
    return step_times(columns, fitted()), memory(columns, [shape], [layout])


BASE = Candidate(tp=4, pp=4, dp=4, microbatches=32)
HALF = {"t4_ethernet": "fp16"}


def test_bubble_shrinks_with_microbatches_and_chunks() -> None:
    few, many = (priced(dataclasses.replace(BASE, microbatches=count))[0] for count in (8, 64))
    assert few.bubble / few.total > 3 * many.bubble / many.total
    chunked = priced(dataclasses.replace(BASE, vpp=4))[0]
    assert chunked.bubble < priced(BASE)[0].bubble / 2
    assert priced(dataclasses.replace(BASE, pp=1))[0].bubble == 0


def test_tensor_parallelism_beyond_a_node_is_slow() -> None:
    inside, outside = (
        priced(dataclasses.replace(BASE, tp=tp), cluster="t4_ethernet", model="gpt3_175b")[0] for tp in (4, 8)
    )
    assert outside.tp > 2 * inside.tp
    wide, eight = (priced(dataclasses.replace(BASE, tp=16), cluster=name)[0] for name in ("gb200", "h100_ib"))
    assert wide.tp < eight.tp / 2


def test_recomputation_buys_memory_with_time() -> None:
    kept, some, full = (priced(dataclasses.replace(BASE, recompute=word)) for word in ("none", "mlp", "full"))
    assert kept[0].total < some[0].total < full[0].total < 1.4 * kept[0].total
    assert kept[1].activations > some[1].activations > 2 * full[1].activations


def test_overlap_hides_gradients() -> None:
    plain = dataclasses.replace(BASE, overlap=False)
    assert priced(plain)[0].dp > 3 * priced(BASE)[0].dp > 0


def test_slow_network_costs_what_crosses_it() -> None:
    fast, slow = priced(BASE, cluster="h100_ib")[0], priced(BASE, cluster="h100_ethernet")[0]
    assert slow.dp >= fast.dp and slow.products == fast.products


def test_experts_pay_for_their_tokens_way() -> None:
    near = Candidate(tp=1, pp=4, ep=8, dp=16, microbatches=16)
    far = dataclasses.replace(near, ep=16)
    assert priced(far, "qwen3_235b_a22b", seq=4096)[0].ep > 1.2 * priced(near, "qwen3_235b_a22b", seq=4096)[0].ep > 0
    assert priced(near, "llama3_8b")[0].ep == 0


def test_fp8_is_faster_where_matrices_are_large() -> None:
    small = dataclasses.replace(BASE, precision="fp8")
    assert priced(small)[0].products < 0.75 * priced(BASE)[0].products


def test_numbers_of_four_bytes_take_twice_the_way() -> None:
    layout = dataclasses.replace(BASE, cp=2, dp=2, overlap=False)
    half, whole = (priced(dataclasses.replace(layout, precision=name))[0] for name in ("bf16", "fp32"))
    for name in ("tp", "p2p", "traffic"):
        assert 1.5 * getattr(half, name) < getattr(whole, name) <= 2 * getattr(half, name), name
    assert whole.dp > 1.2 * half.dp, "weights gathered; gradients are fp32 in both"


def test_columns_do_not_see_each_other() -> None:
    shape = named("llama3_8b")
    layouts = [Candidate(dp=8, microbatches=4), Candidate(tp=2, pp=2, dp=2, microbatches=16, vpp=2)]
    cases = [
        Case(model=sizes(shape, 8192), layout=layout, machine=machine(clusters.load("h100_ib"), "bf16"), software=OURS)
        for layout in layouts
    ]
    together = step_times(Columns(cases), Constants()).total
    apart = np.concatenate([step_times(Columns([case]), Constants()).total for case in cases])
    assert together == pytest.approx(apart)


def test_microbatches_in_flight() -> None:
    """Stage 0 of 1F1B holds PP of them; interleaving holds (PP - 1) / (PP VPP) more."""
    one = priced(dataclasses.replace(BASE, pp=1, microbatches=32))[1].activations
    plain = priced(BASE)[1].activations
    chunked = priced(dataclasses.replace(BASE, vpp=5))[1].activations
    assert plain == pytest.approx(one, rel=0.35)  # PP times a PP-th of the layers, without the logits
    assert chunked / plain == pytest.approx(1 + 3 / 20, rel=0.05)
