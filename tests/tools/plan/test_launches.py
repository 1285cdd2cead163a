"""Small kernels cost their launch on the host; large ones, and CUDA graphs, do not."""

import dataclasses

import pytest

from models.costs.candidate import Candidate, Recompute
from models.costs.program import AS_OURS, OURS, Published, Software, sharded
from models.costs.sizes import sizes
from models.families import named
from tests.tools.plan.test_layouts import question
from tools import clusters
from tools.clusters import Cluster
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import fitted
from tools.plan.cost.hardware import machine
from tools.plan.cost.launches import COMPILED, ENGINE, FP8, OWN, SPLIT, WHOLE, Program, launching_s
from tools.plan.cost.step import StepTimes, step_times
from tools.plan.search.pricing import price, program
from tools.plan.search.switches import switched

A100 = clusters.load("a100_ib")
BLOCKS = 16
"""Of llama32_1b."""
FEW_TOKENS = 64


def priced(
    layout: Candidate,
    cluster: Cluster = A100,
    seq: int = FEW_TOKENS,
    software: Software = OURS,
    published: Published = AS_OURS,
) -> StepTimes:
    """Of llama32_1b."""
    own = machine(cluster, layout.precision)
    case = PricedCase(
        model=sizes(named("llama32_1b"), seq), layout=layout, machine=own, software=software, published=published
    )
    return step_times(PricedColumns([case]), fitted())


def on_a_host(launch_us: float, collective_us: float = 89.0) -> Cluster:
    node = dataclasses.replace(A100.node, launch_us=launch_us, collective_launch_us=collective_us)
    return dataclasses.replace(A100, node=node)


def spent_beyond(times: StepTimes, layout: Candidate, microbatch_s: float) -> float:
    """Seconds that microbatches take beyond ``microbatch_s`` each."""
    once = times.dp + times.optimizer + times.other + times.bubble
    return float((times.total - once)[0]) - layout.microbatches * microbatch_s


@pytest.mark.parametrize("software, launched", [(OURS, ENGINE), (dataclasses.replace(OURS, fused=False), OWN)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_few_tokens_take_their_launches(software: Software, launched: Program, recompute: Recompute) -> None:
    """And nothing else: kernels of the blocks, of the output layer and the loss, one after the other."""
    layout = Candidate(microbatches=8, recompute=recompute)
    block = sum(launched.gated) + (launched.gated.forward if recompute == "full" else 0)
    microbatch_s = (BLOCKS * block + sum(launched.head)) * 100e-6
    times = priced(layout, on_a_host(100.0), software=software)
    assert times.host > 0
    assert spent_beyond(times, layout, microbatch_s) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "shape, layout, kernels",
    [
        ("gpt3_tiny", Candidate(), sum(ENGINE.plain)),
        ("llama3_tiny", Candidate(), sum(ENGINE.gated)),
        ("llama3_tiny", Candidate(precision="fp8"), sum(ENGINE.gated) + sum(FP8)),
        ("llama3_tiny", Candidate(recompute="core_attn"), sum(ENGINE.gated) + ENGINE.core_attention),
        ("llama3_tiny", Candidate(recompute="mlp"), sum(ENGINE.gated) + ENGINE.mlp),
        ("mixtral_tiny", Candidate(), sum(ENGINE.experts)),
        ("mixtral_tiny", Candidate(recompute="moe"), sum(ENGINE.experts) + ENGINE.experts.forward),
        ("deepseek_v3_tiny", Candidate(), (sum(ENGINE.gated) + 3 * sum(ENGINE.latent)) / 4),
    ],
)
def test_blocks_launch_what_was_counted(shape: str, layout: Candidate, kernels: float) -> None:
    """The mean block: deepseek_v3_tiny's first of four has no experts."""
    own = machine(clusters.load("h100_ib"), layout.precision)
    case = PricedCase(model=sizes(named(shape), FEW_TOKENS), layout=layout, machine=own, software=OURS)
    block, head = launching_s(PricedColumns([case]))
    assert block[0] == pytest.approx(kernels * own.launch_s)
    assert head[0] == pytest.approx(sum(ENGINE.head) * own.launch_s)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("split", [False, True])
def test_collectives_of_tensor_ranks_are_launched_too(split: bool, recompute: Recompute) -> None:
    """Those of a forward pass again where it is recomputed; none that overlap with products."""
    layout = Candidate(tp=8, microbatches=8, sequence_parallel=split, recompute=recompute)
    own = SPLIT if split else WHOLE
    number = sum(own) + (own.forward if recompute == "full" else 0)
    base, slow = (priced(layout, on_a_host(100.0, us)).host[0] for us in (100.0, 200.0))
    assert slow - base == pytest.approx(8 * BLOCKS * number * 100e-6)
    overlapped = Published(tp_overlap=True)
    base, slow = (priced(layout, on_a_host(100.0, us), published=overlapped).host[0] for us in (100.0, 200.0))
    assert slow == base > 0


def test_units_of_shards_are_launched_too() -> None:
    """A block's three collectives, and two of the root, which has the tied embeddings."""
    layout = Candidate(dp=2, microbatches=8, zero=3)
    (free, slow) = (
        priced(layout, on_a_host(0.0, collective_us), software=sharded(OURS, 3)).host for collective_us in (0.0, 10_000)
    )
    assert free == 0
    assert slow == pytest.approx(8 * (BLOCKS * 3 + 2) * 0.01, rel=0.1)


def test_a_pipeline_fills_at_the_pace_of_launches() -> None:
    """Each stage waits on its own host: for all microbatches, and for those that fill the pipeline."""
    layout = Candidate(pp=4, microbatches=8)
    slow, slower = (priced(layout, on_a_host(us)).host[0] for us in (100.0, 200.0))
    last = BLOCKS / 4 * sum(ENGINE.gated) + sum(ENGINE.head)
    assert slower - slow == pytest.approx((8 + 3) * last * 100e-6)


@pytest.mark.parametrize("cluster", ["a100_ib", "h100_ib"])
@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b", "mixtral_8x7b"])
def test_large_kernels_hide_their_launches_to_the_digit(model: str, cluster: str) -> None:
    """Their prices are those of a host that launches in no time."""
    asked = question(model, cluster, gpus=64, batch=256, seq=8192, tp=4, pp=2)
    node = dataclasses.replace(asked.cluster.node, launch_us=1e-9, collective_launch_us=1e-9)
    layouts = [Candidate(tp=4, pp=2, dp=8, mbs=2, microbatches=16), Candidate(tp=4, pp=2, dp=8, microbatches=32)]
    instant = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, node=node))
    for plan, bare in zip(price(asked, layouts), price(instant, layouts), strict=True):
        assert plan.spent_s == bare.spent_s and plan.spent_s["host"] == 0


def test_cuda_graphs_take_launches_away() -> None:
    layout = Candidate(tp=8, microbatches=8)
    plain, graphed = (priced(layout, software=program(A100, cuda_graphs=on)) for on in (False, True))
    assert plain.host > 0.2 * plain.total and graphed.host == 0
    assert plain.total - graphed.total == pytest.approx(plain.host)
    asked = question("llama32_1b", "a100_ib", gpus=8, batch=8, seq=512)
    (plan,) = price(asked, [layout])
    words = {words: (other.step_s, accepted) for words, other, accepted in switched(asked, plan)}
    assert words["with CUDA graphs"][0] < plan.step_s and words["with CUDA graphs"][1]
    recomputing = Candidate(tp=8, microbatches=8, recompute="full")
    (again,) = price(asked, [recomputing])
    accepted = {words: accepted for words, _, accepted in switched(asked, again)}
    assert not accepted["with CUDA graphs"]
    asked = question("llama3_70b", gpus=64, batch=256, seq=8192)
    (plan,) = price(asked, [Candidate(tp=8, pp=4, dp=2, microbatches=128)])
    assert "with CUDA graphs" not in [words for words, *_ in switched(asked, plan)]


def test_compiled_blocks_launch_what_was_counted() -> None:
    """More of a dense block with a gate, fewer of latent attention; where kernels are large, none of it matters."""

    def gain(model: str, **asking: int) -> float:
        asked = question(model, "a100_ib", **asking)
        layout = Candidate(tp=8, microbatches=8, precision="bf16")
        compiled = dataclasses.replace(asked, compile=True)
        (plain,), (other,) = (price(each, [layout]) for each in (asked, compiled))
        rows = {words: (plan, accepted) for words, plan, accepted in switched(asked, plain)}
        back = {words: plan for words, plan, _ in switched(compiled, other)}
        assert rows["with compiled blocks"] == (other, True) and back["without compiled blocks"] == plain
        assert other.held_bytes == plain.held_bytes
        return plain.step_s - other.step_s

    saved = gain("llama32_1b", gpus=8, batch=8, seq=512)
    more = sum(COMPILED.gated) - sum(ENGINE.gated)
    assert saved == pytest.approx(-8 * 16 * more * 13.5e-6, rel=0.01) and saved < 0
    assert gain("llama3_70b", gpus=8, batch=8, seq=8192) == 0
    latent, layout, own = sizes(named("deepseek_v3_tiny"), FEW_TOKENS), Candidate(), machine(A100, "bf16")
    plain, compiled = (
        launching_s(PricedColumns([PricedCase(model=latent, layout=layout, machine=own, software=software)]))[0]
        for software in (OURS, dataclasses.replace(OURS, compiled=True))
    )
    assert 0 < compiled < plain


def test_neither_fp8_nor_cuda_graphs_are_compiled() -> None:
    asked = question("llama32_1b", "h100_ib", gpus=8, batch=8, seq=512)
    graphed = dataclasses.replace(asked, cuda_graphs=True)
    for own, precision in ((asked, "fp8"), (graphed, "bf16")):
        (plan,) = price(own, [Candidate(tp=8, microbatches=8, precision=precision)])
        assert not [words for words, *_ in switched(own, plan) if "compiled" in words]


def test_hosts_differ() -> None:
    """Grace takes nearly three times a DGX H100's Xeon; a CPU that computes itself launches nothing."""
    assert machine(clusters.load("gb200"), "bf16").launch_s == pytest.approx(37.1e-6)
    assert machine(A100, "bf16").launch_s == pytest.approx(13.5e-6)
    own = dataclasses.replace(A100, gpu=dataclasses.replace(A100.gpu, name="CPU x86_64"))
    assert machine(own, "fp32").launch_s == machine(own, "fp32").collective_launch_s == 0
