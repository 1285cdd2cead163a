"""Prices move as physics says when one thing changes."""

import dataclasses
import math

import numpy as np
import pytest

from models.costs.candidate import Candidate, Zero
from models.costs.cases import PeakBytes
from models.costs.predict import memory
from models.costs.program import AS_OURS, Published, Software, sharded
from models.costs.sizes import ModelSizes, sizes
from models.families import named
from tests.planner.programs import PublishedProgram
from tools import clusters
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import Constants, fitted
from tools.plan.cost.experts import routed_products, routed_traffic
from tools.plan.cost.hardware import machine
from tools.plan.cost.links import exchange_s, gather_s, latency
from tools.plan.cost.products import product_s
from tools.plan.cost.sharding import UPDATE_BYTES, rank_parameters
from tools.plan.cost.step import StepTimes, step_times

OURS = PublishedProgram(balanced_experts=False)


def priced(
    layout: Candidate, model: str = "llama3_70b", cluster: str = "h100_ib", seq: int = 8192, software: Software = OURS
) -> tuple[StepTimes, PeakBytes]:
    """One case; columns of one element."""
    shape, layout = named(model), dataclasses.replace(layout, precision=HALF.get(cluster, layout.precision))
    case = PricedCase(
        model=sizes(shape, seq),
        layout=layout,
        machine=machine(clusters.load(cluster), layout.precision),
        software=software,
        published=software if isinstance(software, Published) else AS_OURS,
    )
    columns = PricedColumns([case])
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


EXPERTS = Candidate(tp=1, pp=4, ep=8, dp=16, microbatches=16)
LARGE, SMALL = ("qwen3_235b_a22b", 4096), ("qwen3_30b_a3b", 512)


@pytest.mark.parametrize(
    "change, part, case",
    [
        ({"fused_dispatch": True}, "traffic", LARGE),
        ({"sends_once": True}, "ep", LARGE),
        ({"overlaps_dispatch": True}, "ep", LARGE),
        ({"waits_for_counts": False}, "traffic", LARGE),
        ({"fused_experts": True}, "products", LARGE),
        ({"fused_experts": True}, "traffic", LARGE),
        ({"fp8_attention": True}, "attention", LARGE),
        ({"graphed": True}, "traffic", SMALL),
    ],
)
def test_what_a_program_does_for_experts_saves_its_part(
    change: dict[str, bool], part: str, case: tuple[str, int]
) -> None:
    model, seq = case
    plain = priced(EXPERTS, model, seq=seq)[0]
    better = priced(EXPERTS, model, seq=seq, software=dataclasses.replace(OURS, **change))[0]
    assert getattr(better, part) < 0.97 * getattr(plain, part)


def test_an_all_to_all_is_a_send_to_each_rank() -> None:
    """Beside its bytes it grows with the ranks, those beyond NVLink most; kernels of their own need no sends."""
    for cluster, size, each in (("gb200", 64, (63 * 3.4e-6, 0.0)), ("h100_ib", 32, (7 * 3.4e-6, 24 * 14e-6))):
        own = machine(clusters.load(cluster), "bf16")
        model, layout = sizes(named("qwen3_235b_a22b"), 4096), Candidate(ep=size, dp=size)
        for once in (False, True):
            software = dataclasses.replace(OURS, sends_once=once)
            columns = PricedColumns(
                [PricedCase(model=model, layout=layout, machine=own, software=software, published=software)]
            )
            ranks, one = np.array([float(size)]), np.ones(1)
            found = exchange_s(columns, fitted(), np.zeros(1), ranks, one, one)
            expected = latency(columns, fitted(), ranks, one) if once else fitted().collective_s + sum(each)
            assert found == pytest.approx(expected)
            assert exchange_s(columns, fitted(), np.zeros(1), one, one, one) == 0


def test_tokens_travel_beside_another_microbatch_where_there_is_one() -> None:
    overlapped = dataclasses.replace(OURS, overlaps_dispatch=True)
    share = {}
    for count in (1, 4, 1000):
        layout = dataclasses.replace(EXPERTS, pp=1, microbatches=count)
        ours, plain = (priced(layout, *LARGE[:1], seq=LARGE[1], software=own)[0].ep[0] for own in (overlapped, OURS))
        share[count] = ours / plain
    assert share[1] == pytest.approx(1) and share[1000] == pytest.approx(fitted().tp_exposed, rel=0.01)
    assert share[4] == pytest.approx((share[1] + 3 * share[1000]) / 4, rel=0.01)


@pytest.mark.parametrize("pp", [1, 4])
def test_depths_of_prediction_are_blocks_and_heads(pp: int) -> None:
    """A block each, beside the head, wherever the last stage is: no part of a step is left negative."""
    shape, layout = named("deepseek_v3"), Candidate(pp=pp, ep=64, dp=64, microbatches=8)
    own, found = machine(clusters.load("gb300"), "bf16"), []
    for depths in (0, 1, 2):
        model = sizes(dataclasses.replace(shape, mtp_num_layers=depths), 4096)
        times = step_times(
            PricedColumns([PricedCase(model=model, layout=layout, machine=own, software=OURS)]), fitted()
        )
        assert all(getattr(times, name) >= 0 for name in times.__slots__)
        found.append(times.total[0])
    assert found[2] - found[1] == pytest.approx(found[1] - found[0], rel=0.3 if pp > 1 else 0.02)
    assert found[1] - found[0] > 0.9 * found[0] / (shape.num_layers + 5) / pp


def test_hosts_hold_up_small_layers_of_experts_only() -> None:
    """Of 4,096 tokens a layer takes longer than its launches: graphs save nothing."""
    graphed = dataclasses.replace(OURS, graphed=True)
    small, large = (
        [priced(EXPERTS, model, seq=seq, software=own)[0].traffic for own in (OURS, graphed)]
        for model, seq in (SMALL, LARGE)
    )
    assert small[1] < 0.5 * small[0] and large[1] == pytest.approx(large[0], rel=0.3)


def test_each_expert_is_a_launch_but_where_one_kernel_does_all() -> None:
    """16 of 128 experts are on a rank, with a product each way; the router is one more."""
    own, shape = machine(clusters.load("b200_ib"), "bf16"), sizes(named("qwen3_235b_a22b"), 4096)
    for software, launches in ((OURS, 33), (dataclasses.replace(OURS, fused_experts=True), 3)):
        columns = PricedColumns(
            [PricedCase(model=shape, layout=EXPERTS, machine=own, software=software, published=software)]
        )
        slow, fast = (
            routed_products(columns, dataclasses.replace(fitted(), launch_s=launch_s)) for launch_s in (1.0, 0.0)
        )
        assert slow - fast == pytest.approx(launches)


def test_casts_of_each_expert_start_on_their_own() -> None:
    """Two a layer and expert forward, in fp8 alone."""
    layout = Candidate(dp=8, ep=8, microbatches=4)
    slower = dataclasses.replace(fitted(), launch_s=fitted().launch_s + 1e-3)
    for precision, kernels in (("bf16", 0), ("fp8", 2)):
        own = dataclasses.replace(layout, precision=precision)
        case = PricedCase(
            model=sizes(named("qwen3_30b_a3b"), 4096), layout=own, machine=machine(clusters.load("h100_ib"), precision),
            software=OURS,
        )  # fmt: skip
        columns = PricedColumns([case])
        more = routed_traffic(columns, slower) - routed_traffic(columns, fitted())
        assert more[0] == pytest.approx(kernels * 128 / 8 * 1e-3)


def test_products_take_what_their_bytes_take_beside_their_multiplications() -> None:
    """All of it in time where few rows leave little to multiply: never less than memory alone."""
    case = PricedCase(
        model=sizes(named("llama3_70b"), 8192), layout=BASE, machine=machine(clusters.load("h100_ib"), "bf16"),
        software=OURS,
    )  # fmt: skip
    columns = PricedColumns([case])
    n, k = np.array([8192.0]), np.array([8192.0])
    bare = dataclasses.replace(fitted(), product_bytes=0.0, launch_s=0.0)
    whole = dataclasses.replace(bare, product_bytes=1.0)
    rows = np.array([16384.0])
    moved = 2 * (rows * k + k * n + rows * n) / 3.35e12
    assert product_s(columns, whole, rows, n, k) - product_s(columns, bare, rows, n, k) == pytest.approx(moved)
    one = np.array([1.0])
    assert product_s(columns, bare, one, n, k) == pytest.approx(2 * (k + k * n + n) / (0.8 * 3.35e12))
    eight = product_s(columns, bare, one, n, k, matrices=8.0)
    assert eight == pytest.approx(2 * (k + 8 * k * n + n) / (0.8 * 3.35e12))


def test_waiting_for_each_kernel_costs_small_microbatches_most() -> None:
    blocked = dataclasses.replace(OURS, waits_for_kernels=True, fused=False)
    plain = dataclasses.replace(OURS, fused=False)
    share = {}
    for mbs in (1, 8):
        layout = dataclasses.replace(BASE, mbs=mbs, microbatches=64 // mbs)
        slow, fast = (priced(layout, seq=2048, software=own)[0].total[0] for own in (blocked, plain))
        share[mbs] = slow / fast - 1
    assert share[1] > 3 * share[8] > 0


def test_products_are_waited_for_as_all_kernels_are() -> None:
    layout = Candidate(tp=8, dp=8, microbatches=8)
    waiting = dataclasses.replace(OURS, waits_for_kernels=True)
    more = priced(layout, software=waiting)[0].products - priced(layout)[0].products
    gap = fitted().blocked_s - fitted().launch_s
    blocks = layout.microbatches * named("llama3_70b").num_layers
    assert more == pytest.approx(3 * 4 * gap * blocks)  # two products of attention, two of the MLP


def test_sharded_weights_that_stay_are_gathered_once() -> None:
    layout = Candidate(dp=64, zero=3, recompute="full")
    stays = dataclasses.replace(OURS, gathers_once=True)
    (again, freed), (once, kept) = (priced(layout, "llama3_8b", software=own) for own in (OURS, stays))
    assert once.dp < 0.8 * again.dp
    assert kept.activations - freed.activations == pytest.approx(2 * 8.03e9, rel=0.01)


@pytest.mark.parametrize(
    "name, model",
    [
        ("recomputes_norms", "llama3_70b"),
        ("recomputes_expert_activation", "qwen3_30b_a3b"),
        ("recomputes_latents", "deepseek_v3"),
    ],
)
def test_modules_that_are_recomputed_take_their_time_again(name: str, model: str) -> None:
    layout = Candidate(ep=8 if model != "llama3_70b" else 1, dp=8, microbatches=8)
    again = dataclasses.replace(OURS, **{name: True})
    kept, computed = (priced(layout, model, software=own)[0] for own in (OURS, again))
    assert kept.recompute == 0 < computed.recompute < 0.1 * kept.total
    other = "llama3_8b" if model != "llama3_70b" else ""
    assert not other or priced(Candidate(dp=8), other, software=again)[0].recompute == 0


def test_shared_experts_are_split_over_tp_as_an_mlp_is() -> None:
    layout = Candidate(tp=2, ep=8, dp=8)
    alone = sizes(named("qwen3_30b_a3b"), 4096)
    card = machine(clusters.load("h100_ib"), "bf16")
    seconds = [
        float(
            step_times(PricedColumns([PricedCase(model=own, layout=layout, machine=card, software=OURS)]), fitted()).tp[
                0
            ]
        )
        for own in (alone, dataclasses.replace(alone, shared_ffn=2048))
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_biases_of_experts_are_passes_of_their_own() -> None:
    """More of them where tokens' weights are in fp32, none in a fused kernel, whose slow version costs much."""
    model = dataclasses.replace(sizes(named("qwen3_30b_a3b"), 4096), expert_biases=True)
    layout, card = Candidate(ep=8, dp=8, mbs=4), machine(clusters.load("gb200"), "bf16")

    def seconds(software: PublishedProgram, shape: ModelSizes = model) -> float:
        return float(
            step_times(
                PricedColumns(
                    [PricedCase(model=shape, layout=layout, machine=card, software=software, published=software)]
                ),
                fitted(),
            ).total[0]
        )

    graphed = dataclasses.replace(OURS, graphed=True, waits_for_counts=False)
    flex = dataclasses.replace(graphed, fused_dispatch=True)
    fused = dataclasses.replace(graphed, fused_experts=True)
    none = dataclasses.replace(model, expert_biases=False)
    plain, wide = (seconds(own) - seconds(own, none) for own in (graphed, flex))
    assert 0 < 2 * plain < wide < 3 * plain
    assert seconds(fused) == seconds(fused, none)
    assert seconds(dataclasses.replace(fused, slow_bias_gradients=True)) > 1.2 * seconds(fused)


def test_a_badly_set_up_host_costs_its_share() -> None:
    slow, fast = (priced(BASE, software=dataclasses.replace(OURS, slow_host=own))[0].total for own in (1.03, 1.0))
    assert slow / fast == pytest.approx(1.03, abs=0.002)


@pytest.mark.parametrize(
    ("zero", "instances", "copies", "additions"),
    [(1, 1, 1 + 1, 0), (2, 1, 1 + 8, 7), (3, 1, 2 * 8 + 8, 7), (3, 2, 2 * 8 + 1, 0)],
)
def test_state_on_the_host_travels(zero: Zero, instances: int, copies: int, additions: int) -> None:
    """4 bytes for each gather and each reduction of 8 microbatches; the host adds their gradients, reading two and
    writing one."""
    own = machine(clusters.load("h100_ib"), "bf16")
    layout = Candidate(dp=8, microbatches=8, zero=zero, copies=instances)
    software = sharded(dataclasses.replace(OURS, main_param_bytes=0, moment_bytes=0, host_state=1.0), zero)
    case = PricedCase(model=sizes(named("llama3_8b"), 8192), layout=layout, machine=own, software=software)
    columns = PricedColumns([case])
    shard = rank_parameters(columns).dense[0] * instances / 8
    passes = UPDATE_BYTES + (8 + 12 * additions if zero > 1 else 0)
    host = shard * (4 * copies / own.host_link_bytes_per_s + passes / own.host_memory_bytes_per_s)
    gpu = fitted().optimizer * (8 * 8 * shard if zero == 1 else 0) / own.memory_bytes_per_s
    assert step_times(columns, fitted()).optimizer[0] == pytest.approx(host + gpu)


def test_heads_without_tensor_cores_are_slow() -> None:
    """108 channels are 216 bytes: no multiple of 16."""
    shape, unfused = named("gpt3_175b"), dataclasses.replace(OURS, flash_attention=False)
    own = machine(clusters.load("a100_ib"), "bf16")
    layout, found = dataclasses.replace(BASE, tp=8), []
    for channels in (104, 108):
        model = sizes(dataclasses.replace(shape, kv_channels=channels), 2048)
        columns = PricedColumns(
            [PricedCase(model=model, layout=layout, machine=own, software=unfused, published=unfused)]
        )
        found.append(step_times(columns, fitted()).attention)
    assert found[1] > 2 * found[0]


def test_exponentials_of_blackwell_ultra_speed_attention_up() -> None:
    ultra, first = (priced(BASE, cluster=name)[0] for name in ("gb300", "gb200"))
    assert ultra.attention < 0.85 * first.attention and ultra.products > 0.85 * first.products


def test_collectives_cost_their_start() -> None:
    own = machine(clusters.load("h100_ib"), "bf16")
    columns = PricedColumns([PricedCase(model=sizes(named("llama3_8b"), 256), layout=BASE, machine=own, software=OURS)])
    one, none, eight = np.ones(1), np.zeros(1), np.full(1, 8.0)
    begun, given = (dataclasses.replace(fitted(), collective_s=seconds) for seconds in (1.0, 0.0))
    for whole in (none, 1e9 * one):
        slow, fast = (gather_s(columns, constants, whole, eight, one) for constants in (begun, given))
        assert slow - fast == pytest.approx(1.0)
    assert gather_s(columns, begun, one, one, one) == 0, "alone there is nothing to collect"


def test_deepspeed_holds_ends_of_stages_and_buckets() -> None:
    ends, buckets = (dataclasses.replace(OURS, **own) for own in ({"keeps_stage_ends": True}, {"bucket_bytes": 2e9}))
    plain = priced(BASE)[1]
    assert priced(BASE, software=buckets)[1].workspace == plain.workspace + 2e9
    piece = 2 * 8192 * named("llama3_70b").hidden_size
    assert priced(BASE, software=ends)[1].activations == pytest.approx(plain.activations + 2 * 4 * piece)
    alone = dataclasses.replace(BASE, pp=1)
    assert priced(alone, software=ends)[1].total == priced(alone)[1].total


def test_a_head_is_multiplied_in_16_bits_unless_told_otherwise() -> None:
    layout = Candidate(tp=8, dp=8, microbatches=8)
    wide, head = (
        priced(layout)[0].head,
        {
            name: priced(dataclasses.replace(layout, precision="fp8"), software=own)[0].head
            for name, own in (("16", OURS), ("8", dataclasses.replace(OURS, fp8_head=True)))
        },
    )
    assert head["16"] == wide and head["8"] < 0.75 * wide


def test_kernels_that_are_new_to_a_card_are_slower() -> None:
    layout = Candidate(tp=8, dp=8, microbatches=8)
    new, old = (priced(layout, software=dataclasses.replace(OURS, card_age=age))[0] for age in (0.0, math.inf))
    for name in ("products", "attention", "traffic"):
        assert getattr(new, name) > 1.1 * getattr(old, name)


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
        PricedCase(
            model=sizes(shape, 8192), layout=layout, machine=machine(clusters.load("h100_ib"), "bf16"), software=OURS
        )
        for layout in layouts
    ]
    together = step_times(PricedColumns(cases), Constants()).total
    apart = np.concatenate([step_times(PricedColumns([case]), Constants()).total for case in cases])
    assert together == pytest.approx(apart)


def test_microbatches_in_flight() -> None:
    """Stage 0 of 1F1B holds PP of them; interleaving holds (PP - 1) / (PP VPP) more."""
    one = priced(dataclasses.replace(BASE, pp=1, microbatches=32))[1].activations
    plain = priced(BASE)[1].activations
    chunked = priced(dataclasses.replace(BASE, vpp=5))[1].activations
    assert plain == pytest.approx(one, rel=0.35)  # PP times a PP-th of the layers, without the logits
    assert chunked / plain == pytest.approx(1 + 3 / 20, rel=0.05)


def test_gradients_are_added_up_while_the_pipeline_fills_too() -> None:
    layout = Candidate(tp=2, pp=4, dp=4, microbatches=8)
    light, heavy = (
        priced(layout, software=dataclasses.replace(OURS, accumulate_bytes=moved))[0] for moved in (4.0, 20.0)
    )
    each = (heavy.traffic - light.traffic) / layout.microbatches
    assert heavy.bubble - light.bubble == pytest.approx(3 * each)


def test_muon_s_matrices_are_multiplied_and_travel() -> None:
    """Llama 3 70B on TP 4 with 4 shards: 16 ranks share a stage's matrices, each whole on one of them."""
    muon = dataclasses.replace(OURS, muon_steps=5)
    plain, found = priced(BASE)[0].optimizer, priced(BASE, software=muon)[0].optimizer
    h, f, kv = 8192, 28672, 1024
    dims = ((h, h), (h, h), (kv, h), (kv, h), (h, 2 * f), (h, f))  # the smaller one first
    products = 80 / BASE.pp * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in dims) / 16
    moved = 2 * 4 * (80 / BASE.pp * (2 * h * h + 2 * kv * h + 3 * h * f)) / (4 * 4)
    machine_of = machine(clusters.load("h100_ib"), "bf16")
    least = products / machine_of.peak_flops + moved * 3 / 4 / machine_of.scale_up_bytes_per_s
    assert 1.0 < (found - plain) / least < 3.0
    whole = dataclasses.replace(BASE, zero=0)
    every = priced(whole, software=muon)[0].optimizer - priced(whole)[0].optimizer
    assert every > 2 * (found - plain)  # each data rank has all of them
    assert priced(BASE, software=dataclasses.replace(muon, muon_steps=10))[0].optimizer > found


def test_an_average_is_read_and_written() -> None:
    plain = priced(BASE)[0].optimizer
    here, away = (
        priced(BASE, software=dataclasses.replace(OURS, **{name: 4.0}))[0].optimizer
        for name in ("average_bytes", "host_average_bytes")
    )
    assert plain < here < away
