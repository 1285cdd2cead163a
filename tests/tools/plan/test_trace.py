"""The real program with tensors that have no values: the bytes of real ones, and of the formulas."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # a trace loads it; once, not in every fork

import ranks  # noqa: F401  (imports torch and megatron once)
import tools.plan.trace.meta
import tools.plan.trace.spots  # noqa: F401  (as a trace's own process does before it forks)
from models.config import ModelConfig
from models.costs.activations import LARGEST_BLOCK
from models.costs.candidate import Candidate
from models.costs.predict import of_stage
from models.costs.states import BlockStack, states
from models.layers.blockwise_attention import BLOCK_ROWS
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Coordinates
from program.errors import UserError
from tools import clusters
from tools.plan.search.pricing import price
from tools.plan.search.recipe import configuration
from tools.plan.search.request import PlanRequest
from tools.plan.trace import balance, command, one_rank
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.memory.planned import Modules, as_case
from training.parts.model import build_parts


def question(model: str, layout: Candidate, seq: int) -> PlanRequest:
    batch = layout.dp * layout.mbs * layout.microbatches
    return PlanRequest(
        model=ModelConfig(shape=model, seq_length=seq),
        cluster=clusters.load("a100_ib"),
        num_gpus=layout.world_size,
        global_batch_size=batch,
    )


def traced(
    tmp_path: Path, asked: PlanRequest, layout: Candidate, stage: int, *, real: bool = False, **train_fields: Any
) -> dict[str, Any]:
    """In a fork, since megatron-core's groups are a process's own. Experts are chosen in balance in any case."""
    config = trained(asked, layout, **train_fields)
    recipe, answer = tmp_path / "traced.toml", tmp_path / "answer.json"
    recipe.write_text(dump(config))
    rank = config.layout(asked.num_gpus).rank(Coordinates(dp=0, pp=stage, cp=0, tp=0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            balance.install()
            found = one_rank.trace(recipe, asked.num_gpus, rank, command.rounds(layout), real=real)
            answer.write_text(json.dumps(found))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def trained(asked: PlanRequest, layout: Candidate, **fields: Any) -> RunConfig:
    config = command.traceable(configuration(asked, layout))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


CAMPAIGN = pytest.mark.campaign
CPU = Modules(cuda=False, transformer_engine=False)
TINY = Candidate(tp=2, pp=2, dp=2, microbatches=4)


@pytest.mark.parametrize(
    "model, layout, stage",
    [
        pytest.param("llama3_tiny", TINY, 0, marks=CAMPAIGN),
        pytest.param("llama3_tiny", TINY, 1, marks=CAMPAIGN),
        pytest.param("llama3_tiny", dataclasses.replace(TINY, vpp=2), 0, marks=CAMPAIGN),
        pytest.param("llama3_tiny", dataclasses.replace(TINY, recompute="full"), 0, marks=CAMPAIGN),
        pytest.param("llama3_tiny", dataclasses.replace(TINY, cp=2), 1, marks=CAMPAIGN),
        pytest.param("gpt2_tiny", TINY, 0, marks=CAMPAIGN),
        pytest.param("gpt2_tiny", dataclasses.replace(TINY, tp=1), 1, marks=CAMPAIGN),
        pytest.param("mistral_tiny", TINY, 0, marks=CAMPAIGN),
        ("llama3_tiny", dataclasses.replace(TINY, recompute="core_attn"), 0),
    ],
    ids=[
        "first",
        "last",
        "interleaved",
        "recomputed",
        "context",
        "learned-positions",
        "learned-positions-last",
        "window",
        "scores",
    ],
)
def test_without_values_as_much_is_held_as_with_them(tmp_path: Path, model: str, layout: Candidate, stage: int) -> None:
    asked = question(model, layout, 128)
    found, real = (traced(tmp_path, asked, layout, stage, real=real) for real in (False, True))
    assert found == real
    assert real["activations"] > 100_000


@pytest.mark.parametrize(
    "model, change",
    [
        pytest.param("mixtral_tiny", {}, marks=CAMPAIGN),
        pytest.param("mixtral_tiny", {"recompute": "full"}, marks=CAMPAIGN),
        ("mixtral_tiny", {"recompute": "moe"}),
        pytest.param("qwen3_moe_tiny", {"ep": 1}, marks=CAMPAIGN),
        pytest.param("mixtral_tiny", {"ep": 1, "etp": 2}, marks=CAMPAIGN),
        ("mixtral_tiny", {"etp": 2}),
        ("deepseek_v3_tiny", {"mbs": 2}),
    ],
    ids=str,
)
def test_so_do_experts(tmp_path: Path, model: str, change: dict[str, Any]) -> None:
    layout = dataclasses.replace(Candidate(tp=2, pp=2, ep=2, dp=2, microbatches=2), **change)
    asked = question(model, layout, 128)
    found, real = (traced(tmp_path, asked, layout, 0, real=real) for real in (False, True))
    assert found == real
    assert real["activations"] > 100_000


BIG = Candidate(tp=4, pp=4, dp=2, microbatches=4)


@pytest.mark.parametrize(
    "layout, stage",
    [
        pytest.param(BIG, 0, marks=CAMPAIGN),
        (BIG, 3),
        pytest.param(dataclasses.replace(BIG, pp=2, vpp=4), 0, marks=CAMPAIGN),
        pytest.param(dataclasses.replace(BIG, recompute="full"), 0, marks=CAMPAIGN),
        (dataclasses.replace(BIG, precision="fp32"), 0),
    ],
    ids=["first", "last", "interleaved", "recomputed", "fp32"],
)
def test_formulas_are_what_is_traced(tmp_path: Path, layout: Candidate, stage: int) -> None:
    asked = question("llama32_1b", layout, 4096)
    found, own = traced(tmp_path, asked, layout, stage), BlockStack(asked.shape).held(layout, stage)
    held = states(own, layout)
    assert (found["parameters"], found["weights"], found["gradients"]) == (own.dense, held.weights, held.gradients)
    assert command.optimizer_bytes(found) == held.optimizer
    assert command.by_formula(asked, layout, stage) == pytest.approx(found["activations"], rel=0.05)


@pytest.mark.campaign
def test_capped_scores_are_counted_once_with_dropout(tmp_path: Path) -> None:
    """Attention with soft caps is in blocks of queries: of its scores nothing is kept (2026-11-25: 1.12 of traced)."""
    layout = Candidate(pp=13, microbatches=13)
    asked = question("gemma2_2b", layout, 2048)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, attention_dropout=0.1))
    traced_bytes = traced(tmp_path, asked, layout, 0)["activations"]
    assert command.by_formula(asked, layout, 0) == pytest.approx(traced_bytes, rel=0.2)


@pytest.mark.parametrize("model", ["qwen3_8b", pytest.param("llama32_1b", marks=CAMPAIGN)])
@pytest.mark.campaign
def test_clipped_queries_are_kept_as_they_were(tmp_path: Path, model: str) -> None:
    """With norms of queries and without; 3 to 4 % of all."""
    asked = question(model, BIG, 2048)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, clip_qkv=8.0))
    traced_bytes = traced(tmp_path, asked, BIG, 0)["activations"]
    assert command.by_formula(asked, BIG, 0) == pytest.approx(traced_bytes, rel=0.01)


@pytest.mark.parametrize(
    "piece, precision",
    [(1024, "bf16"), *(pytest.param(*case, marks=CAMPAIGN) for case in [(1024, "fp32"), (256, "bf16"), (256, "fp32")])],
)
@pytest.mark.campaign
def test_so_are_losses_in_pieces(tmp_path: Path, piece: int, precision: str) -> None:
    """The last stage of 16 has a vocabulary of 128,256 and two blocks."""
    layout = Candidate(pp=16, microbatches=16, recompute="full", precision=precision)
    asked = question("llama3_8b", layout, 4096)
    pieces = {"cross_entropy_chunk_tokens": piece}
    expected = of_stage(as_case(trained(asked, layout, **pieces), 16, asked.shape, CPU), asked.shape, 15).activations
    assert traced(tmp_path, asked, layout, 15, **pieces)["activations"] == pytest.approx(expected, rel=0.05)


def test_experts_are_traced_in_balance(tmp_path: Path) -> None:
    layout = Candidate(tp=2, pp=2, ep=2, dp=2, microbatches=2)
    asked = question("mixtral_tiny", layout, 128)
    found, own = traced(tmp_path, asked, layout, 0), BlockStack(asked.shape).held(layout, 0)
    assert found["parameters"] == own.dense + own.expert
    assert found["collectives"]["alltoall_base"]["calls"] > 0


@pytest.mark.campaign
def test_all_stages_by_one_process() -> None:
    asked = question("llama3_tiny", TINY, 128)
    first, last = command.trace_stages(asked, TINY, [0, 1], None)
    for stage, found in enumerate((first, last)):
        assert found["parameters"] == BlockStack(asked.shape).held(TINY, stage).dense
    assert first["cpu_s"] > 0 and first["resident_bytes"] > 100e6
    assert last["activations"] < first["activations"], "it holds fewer microbatches"


@pytest.mark.parametrize(
    "model, layout, seq",
    [
        pytest.param("mixtral_tiny", Candidate(tp=2, pp=2, ep=2, dp=2, microbatches=2), 128, marks=CAMPAIGN),
        pytest.param("mixtral_8x7b", Candidate(tp=2, pp=8, ep=8, dp=8, microbatches=2), 4096, marks=CAMPAIGN),
        pytest.param("llama32_1b", dataclasses.replace(BIG, precision="fp32", recompute="full"), 1024, marks=CAMPAIGN),
        pytest.param("llama32_1b", dataclasses.replace(BIG, recompute="full"), 1024, marks=CAMPAIGN),
        pytest.param("qwen3_8b", BIG, 2048, marks=CAMPAIGN),
        pytest.param("minitron_4b", BIG, 2048, marks=CAMPAIGN),
        pytest.param("apertus_8b", BIG, 2048, marks=CAMPAIGN),
        ("gpt2", dataclasses.replace(BIG, tp=1), 1024),
        pytest.param("gpt2", dataclasses.replace(BIG, precision="fp32"), 1024, marks=CAMPAIGN),
        pytest.param("deepseek_v2_lite", Candidate(tp=2, pp=3, ep=16, dp=16, microbatches=3), 2048, marks=CAMPAIGN),
        ("deepseek_v2_lite", Candidate(pp=3, ep=16, dp=16, microbatches=3, precision="fp32"), 512),
    ],
    ids=[
        "experts", "one-expert-a-rank", "lookup-fp32", "lookup", "norms-of-queries", "norms-around-1",
        "learned-activation", "dropout", "dropout-fp32", "latent", "latent-fp32",
    ],
)  # fmt: skip
def test_formulas_know_what_kinds_of_models_keep(tmp_path: Path, model: str, layout: Candidate, seq: int) -> None:
    """On a first stage that keeps little, the peak is the word embeddings' gradient."""
    asked = question(model, layout, seq)
    found = traced(tmp_path, asked, layout, 0)
    assert command.by_formula(asked, layout, 0) == pytest.approx(found["activations"], rel=0.05)


CHUNKS = (*(2,) * 15, 1, *((2,) * 7 + (1,)) * 2)
DEALT = {"pp": 8, "vpp": 4, "split": "layout", "microbatches": 16, "chunk_layers": CHUNKS}
DEEP = Candidate(pp=16, ep=64, dp=64, microbatches=16, split="ends", first_layers=4, last_layers=1)


@pytest.mark.parametrize(
    "stage, seq, more",
    [
        # one more than it holds
        pytest.param(8, 4096, {"recompute": "full", "microbatches": 9}, marks=CAMPAIGN),
        (15, 512, {"microbatches": 2}),
        pytest.param(15, 2048, {"recompute": "full", "precision": "fp32", "microbatches": 2}, marks=CAMPAIGN),
        pytest.param(0, 1024, DEALT | {"cp": 2, "dp": 32}, marks=CAMPAIGN),
    ],
    ids=["scores", "depths", "depths-fp32", "uneven-chunks-over-context-ranks"],
)
@pytest.mark.campaign
def test_formulas_know_the_moments_of_the_largest_models(
    tmp_path: Path, stage: int, seq: int, more: dict[str, Any]
) -> None:
    """DeepSeek-V3's: where one block's scores are most of all, and a last stage with few tokens, whose gradients of the
    vocabulary are."""
    layout = dataclasses.replace(DEEP, **more)
    asked = question("deepseek_v3", layout, seq)
    found = traced(tmp_path, asked, layout, stage)
    assert command.by_formula(asked, layout, stage) == pytest.approx(found["activations"], rel=0.05)


def test_the_fullest_stage_is_traced_too() -> None:
    (plan,) = price(question("deepseek_v3", DEEP, 4096), [DEEP])
    assert command.stages_of(dataclasses.replace(plan, fullest_stage=2)) == [0, 2, 8, 15]
    assert command.stages_of(dataclasses.replace(plan, fullest_stage=15)) == [0, 8, 15]


def test_formulas_know_how_many_queries_attention_looks_at_together() -> None:
    """They are used where torch is not imported, and so have the number themselves."""
    assert LARGEST_BLOCK == BLOCK_ROWS


@pytest.mark.parametrize(
    "model, stage, seq, recompute",
    [
        pytest.param("llama32_1b", 1, 8192, "none", marks=CAMPAIGN),
        ("llama32_1b", 3, 2048, "full"),
        pytest.param("deepseek_v2_lite", 1, 8192, "none", marks=CAMPAIGN),
        pytest.param("deepseek_v2_lite", 1, 8192, "full", marks=CAMPAIGN),
        pytest.param("gpt2", 0, 1024, "none", marks=CAMPAIGN),
        pytest.param("gpt2", 3, 1024, "none", marks=CAMPAIGN),
    ],
)
def test_formulas_know_what_context_ranks_keep(
    tmp_path: Path, model: str, stage: int, seq: int, recompute: str
) -> None:
    """All keys and values, gathered; scores of one block of queries; a last stage with few tokens, whose gradient of
    the vocabulary is the most of all."""
    deep = {"pp": 3, "ep": 8, "dp": 8} if model == "deepseek_v2_lite" else {"pp": 4, "dp": 2}
    layout = Candidate(**deep, cp=8, microbatches=4, recompute=recompute)  # type: ignore[arg-type]
    asked = question(model, layout, seq)
    found = traced(tmp_path, asked, layout, stage)
    assert command.by_formula(asked, layout, stage) == pytest.approx(found["activations"], rel=0.05)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=CAMPAIGN), 3])
@pytest.mark.campaign
def test_formulas_know_of_the_layers_that_embedding_and_loss_take_the_place_of(tmp_path: Path, stage: int) -> None:
    """Interleaved, the ends have one small chunk among larger ones."""
    layout = Candidate(pp=4, vpp=2, dp=2, microbatches=8, split="embedding_and_loss")
    asked = question("llama32_1b", layout, 4096)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, num_layers=22))
    found = traced(tmp_path, asked, layout, stage)
    assert command.by_formula(asked, layout, stage) == pytest.approx(found["activations"], rel=0.05)


def kept_graphs(tmp_path: Path, recompute: str) -> list[str]:
    """Attributes of the dispatchers that hold a graph after a step of a mixture; in a fork."""
    layout = Candidate(tp=2, pp=2, ep=2, dp=2, microbatches=2, recompute=recompute)  # type: ignore[arg-type]
    asked = question("mixtral_tiny", layout, 128)
    config = command.traceable(configuration(asked, layout))
    answer = tmp_path / "answer.json"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            balance.install()
            with groups.pretend(config.layout(asked.num_gpus), Identity(rank=0, world_size=asked.num_gpus)) as ranks:
                chunks = build_parts(config, resolve(config.model, None), ranks).chunks
                one_rank._step(config, chunks, ranks, 2)
                layers = [part for chunk in chunks for part in chunk.modules() if hasattr(part, "token_dispatcher")]
                kept = [
                    name
                    for layer in layers
                    for name, value in vars(layer.token_dispatcher).items()
                    if isinstance(value, torch.Tensor) and value.requires_grad
                ]
                answer.write_text(json.dumps([len(layers), kept]))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    layers, kept = json.loads(answer.read_text())
    assert layers > 0
    return list(kept)


@pytest.mark.parametrize("recompute", ["none", "moe", pytest.param("full", marks=CAMPAIGN)])
def test_no_graph_outlives_its_backward_pass(tmp_path: Path, recompute: str) -> None:
    """models/layers/routing.py: mcore's dispatchers would keep the last routing weights, and by them the graph."""
    assert kept_graphs(tmp_path, recompute) == []


@pytest.mark.parametrize(
    "model, recompute, layout, stage",
    [
        ("llama32_1b", "full", BIG, 1),
        pytest.param("llama32_1b", "mlp", BIG, 1, marks=CAMPAIGN),
        ("llama3_8b", "full", Candidate(tp=2, pp=4, vpp=4, microbatches=4), 0),
        pytest.param("llama32_1b", "full", Candidate(tp=2, pp=2, vpp=8, mbs=4, microbatches=16), 0, marks=CAMPAIGN),
        pytest.param("qwen3_30b_a3b", "full", Candidate(pp=8, ep=8, dp=8, microbatches=4), 5, marks=CAMPAIGN),
        pytest.param("qwen3_30b_a3b", "moe", Candidate(pp=8, ep=8, dp=8, microbatches=4), 5, marks=CAMPAIGN),
        ("mixtral_8x7b", "moe", Candidate(tp=2, pp=4, ep=8, dp=8, microbatches=2), 0),
        pytest.param("mixtral_8x7b", "full", Candidate(tp=2, pp=4, ep=8, dp=8, microbatches=4), 0, marks=CAMPAIGN),
        ("mixtral_8x7b", "full", Candidate(tp=4, pp=2, ep=2, etp=4, dp=2, microbatches=2), 0),
    ],
    ids=[
        "dense",
        "mlp",
        "interleaved",
        "a-layer-a-chunk",
        "experts",
        "experts-alone",
        "large-experts-alone",
        "one-expert-a-rank",
        "shared-experts",
    ],
)
def test_formulas_know_what_recomputation_needs(
    tmp_path: Path, model: str, recompute: str, layout: Candidate, stage: int
) -> None:
    """Where little is kept, so that what is at work tells. A pipeline's outputs are let go of once they are sent, and
    a chunk's input with its pass (models/layers/spec.py)."""
    layout = dataclasses.replace(layout, recompute=recompute)
    asked = question(model, layout, 2048)
    found = traced(tmp_path, asked, layout, stage)
    assert command.by_formula(asked, layout, stage) == pytest.approx(found["activations"], rel=0.05)


@pytest.mark.parametrize(
    "model, layout, stage, keeps",
    [
        pytest.param("llama32_1b", BIG, 0, 0.7, marks=CAMPAIGN),
        pytest.param("llama32_1b", BIG, 0, 0.3, marks=CAMPAIGN),
        pytest.param("llama32_1b", dataclasses.replace(BIG, pp=2, vpp=4), 0, 0.5, marks=CAMPAIGN),
        pytest.param("gemma3_1b", Candidate(tp=1, pp=2, microbatches=4), 0, 0.5, marks=CAMPAIGN),
        pytest.param("qwen3_30b_a3b", Candidate(pp=8, ep=8, dp=8, microbatches=8), 0, 0.6, marks=CAMPAIGN),
        ("nemotron_h_8b", Candidate(tp=2, pp=4, microbatches=4), 0, 0.5),
    ],
    ids=["some", "most", "interleaved", "windows", "experts", "hybrid"],
)
@pytest.mark.campaign
def test_formulas_know_what_is_chosen_to_be_recomputed(
    tmp_path: Path, model: str, layout: Candidate, stage: int, keeps: float
) -> None:
    """keeps: share that the budget leaves of what recomputation would spare."""
    asked = question(model, layout, 2048)
    ends = [
        of_stage(as_case(trained(asked, end), asked.num_gpus, asked.shape, CPU), asked.shape, stage)
        for end in (dataclasses.replace(layout, recompute="full"), layout)
    ]
    budget = ends[0].tensors + keeps * (ends[1].tensors - ends[0].tensors)
    chosen = {"recompute": f"auto:{budget / 2**20:.3f}MiB"}
    expected = of_stage(as_case(trained(asked, layout, **chosen), asked.num_gpus, asked.shape, CPU), asked.shape, stage)
    assert 0.8 * budget < expected.tensors <= budget
    assert traced(tmp_path, asked, layout, stage, **chosen)["activations"] == pytest.approx(
        expected.activations, rel=0.05
    )


def test_what_cannot_be_traced_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank of the first stage answers, the next one's process ends with a traceback."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho '{}'\necho 'ValueError: 32 heads, TP 3' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(program))
    with pytest.raises(UserError, match="stage 1 cannot be traced: ValueError: 32 heads, TP 3"):
        command.trace_stages(question("llama3_tiny", TINY, 128), TINY, [0, 1], None)
