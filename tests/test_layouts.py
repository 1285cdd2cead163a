"""Every layout of ``layout_cases`` trains as one rank does, every impossible one is refused; docs/layouts.md says so.

``python -m pytest tests/test_layouts.py --campaign --write_layouts`` writes the table from what the run proved.
"""

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepared import Prepared
from layout_cases import MODELS, Model, drawn
from models.costs.recompute_plan import recompute_plans
from models.layers import compiled
from models.layers.compiled import Compiler
from models.resolve import resolve
from pairwise_layouts import ALL, SUITE
from refused_layouts import GPU_ONLY, REFUSED, Refused
from tests.oracle import muon_row
from tests.oracle.muon_row import muon_problems
from tools.parity.compare import Observed, compare, furthest, observe
from tools.parity.layouts import with_layout
from training.cli import parse
from training.memory.planned import Modules, as_case

MUON = [(model, layout) for model, layout, switches in ALL if not switches]
MUON_SUITE = {
    ("Llama: RMSNorm, SwiGLU, RoPE, 2 query groups", "tp2sppp2dp2"),
    ("MoE: a shard of the router without an element", "dp3zero3"),
    ("gated delta nets, gated attention in every other block", "tp2sp"),
    ("MLA with query latents", "cp2"),
}
"""Every kind of rank that a matrix is dealt over, and of matrix."""
TABLE = Path(__file__).resolve().parent.parent / "docs/layouts.md"


def named(layout: str, switches: Sequence[str]) -> str:
    """``tp2sp offload chunks``."""
    return " ".join([layout, *switches])


@pytest.fixture(scope="module")
def proven() -> dict[tuple[str, ...], str]:
    """(model, layout), of Muon ("muon", model, layout) -> "proven", or what differed; filled by the tests of this
    file."""
    return {}


@pytest.fixture(scope="module")
def references(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[functools.cache]:  # type: ignore[type-arg]
    """A model on one rank, trained when first asked for."""

    @functools.cache
    def reference(model: Model) -> Observed:
        return observe(model.config(), prepared, "tp1", tmp_path_factory.mktemp("one"))

    yield reference


@pytest.fixture(scope="module")
def muon_references(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[functools.cache]:  # type: ignore[type-arg]
    """The same with Muon, for more iterations."""

    @functools.cache
    def reference(model: Model) -> Observed:
        return muon_row.observed(model.config(), prepared, "tp1", tmp_path_factory.mktemp("muon"))

    yield reference


@pytest.mark.parametrize(
    ("model", "layout", "switches"),
    [pytest.param(*case, marks=() if case in SUITE else pytest.mark.campaign) for case in ALL],
    ids=[f"{model.name[:24]}-{named(layout, on)}" for model, layout, on in ALL],
)
def test_layout_trains_as_one_rank(
    model: Model,
    layout: str,
    switches: tuple[str, ...],
    prepared: Prepared,
    references: functools.cache,  # type: ignore[type-arg]
    proven: dict,  # type: ignore[type-arg]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the switches, which the one rank does not have."""
    monkeypatch.setattr(compiled, "Compiler", partial(Compiler, backend="aot_eager"))  # the ranks are forked from here
    verdict = compare(model.config(switches), prepared, layout, references(model), tmp_path)
    proven[model.name, named(layout, switches)] = "; ".join(verdict.problems) or "proven"
    assert not verdict.problems, verdict


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*row, marks=() if (row[0].name, row[1]) in MUON_SUITE else pytest.mark.campaign) for row in MUON],
    ids=[f"{model.name[:24]}-{layout}" for model, layout in MUON],
)
def test_muon_updates_as_plain_torch_does(
    model: Model,
    layout: str,
    prepared: Prepared,
    proven: dict,  # type: ignore[type-arg]
    tmp_path: Path,
) -> None:
    problems = muon_problems(model.config(), prepared, layout, tmp_path)
    proven["muon", model.name, layout] = "; ".join(problems) or "proven"
    assert not problems


@pytest.mark.campaign
@pytest.mark.parametrize(("model", "layout"), MUON, ids=[f"{model.name[:24]}-{layout}" for model, layout in MUON])
def test_muon_trains_as_one_rank(
    model: Model,
    layout: str,
    prepared: Prepared,
    proven: dict,  # type: ignore[type-arg]
    muon_references: functools.cache,  # type: ignore[type-arg]
    tmp_path: Path,
) -> None:
    of_a_step = proven.get(("muon", model.name, layout), "proven")
    proven["muon", model.name, layout] = f"{muon_row.ITERATIONS} iterations failed"
    off = furthest(muon_row.observed(model.config(), prepared, layout, tmp_path).loss, muon_references(model).loss)
    proven["muon", model.name, layout] = of_a_step if off <= muon_row.LOSS_BOUND else f"losses differ by {off:.1e}"
    assert off <= muon_row.LOSS_BOUND


def test_the_budget_of_the_table_recomputes_a_part() -> None:
    config, world_size = with_layout(MODELS[0].config(["auto"]), "dp2zero2")
    shape, modules = resolve(config.model, None), Modules(cuda=False, transformer_engine=False)
    (plan,) = recompute_plans(as_case(config, world_size, shape, modules), shape)
    assert 0 < plan.flops < plan.most_flops


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(300))
def test_a_random_layout_trains_as_one_rank(
    seed: int, prepared: Prepared, references: functools.cache, tmp_path: Path
) -> None:  # type: ignore[type-arg]
    """Of four ranks, with every sharding strategy."""
    chosen, layout = drawn(seed)
    verdict = compare(chosen.config(), prepared, layout, references(chosen), tmp_path)
    assert not verdict.problems, (chosen.name, verdict)


@pytest.mark.parametrize("case", REFUSED, ids=[case.what for case in REFUSED])
def test_impossible_is_refused_before_start(case: Refused, proven: dict) -> None:  # type: ignore[type-arg]
    config = parse.parse_config(["slurm/recipes/debug.toml", *case.flags.split()])
    answer = "\n".join(config.problems(case.world_size))
    assert case.words in answer
    proven["refused", case.what] = answer


def test_the_table_says_what_was_proven(proven: dict, request: pytest.FixtureRequest) -> None:  # type: ignore[type-arg]
    """What this run left to the campaign counts as proven: it is another test of this file."""
    tried = {("refused", case.what) for case in REFUSED} | {(m.name, named(layout, on)) for m, layout, on in SUITE}
    tried |= {("muon", *row) for row in MUON_SUITE}
    if tried - proven.keys():
        pytest.skip(f"{len(tried - proven.keys())} of {len(tried)} combinations were not tried in this run")
    if request.config.getoption("--write_layouts"):
        TABLE.write_text(table(proven))
    left = {(model.name, named(layout, on)): "proven" for model, layout, on in ALL}
    left |= {("muon", model.name, layout): "proven" for model, layout in MUON}
    assert TABLE.read_text() == table(left | proven), "docs/layouts.md is out of date: --campaign --write_layouts"


def table(proven: dict[tuple[str, ...], str]) -> str:
    """docs/layouts.md."""
    lines = [HEAD]
    for model in MODELS:
        cells = (model.layouts, [named(layout, switches) for layout, switches in model.switched])
        shown = (" ".join(cell_of(proven[model.name, each], each) for each in cell) for cell in cells)
        of_muon = {each: proven["muon", model.name, each] for each in model.layouts}
        off = [cell_of(found, each) for each, found in of_muon.items() if found != "proven"]
        lines.append(f"| {model.name} | {' | '.join(shown)} | {'all but ' + ' '.join(off) if off else 'all'} |")
    lines += ["", "## Refused, before anything starts", "", "| Combination | Answer |", "|---|---|"]
    for case in REFUSED:
        lines.append(f"| {case.what} | {escaped(proven['refused', case.what].splitlines()[0])} |")
    lines += ["", "## Only on a GPU: written, not run on a CPU", "", "| What | Why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in GPU_ONLY]
    return "\n".join([*lines, "", TAIL])


def cell_of(found: str, name: str) -> str:
    return f"`{escaped(name)}`" + ("" if found == "proven" else f" ({found})")


def escaped(text: str) -> str:
    """In a table, | ends a cell."""
    return text.replace("|", "\\|")


HEAD = f"""# Which combinations are proven

Generated by `python -m pytest tests/test_layouts.py --campaign --write_layouts`, and compared with every run of the
suite, which tries {len(SUITE)} of {len(ALL)} rows: as many as have every pair of two axes that change the same thing,
and every trait of a model on the axis that splits it (`tests/support/pairwise_layouts.py`). `make test-all` tries all.

## Proven equal to one rank

On CPU ranks (gloo), fp32, 2 to 6 layers of width 64, 3 iterations of 2 or 4 samples of 64 tokens: the losses, the
gradient norms, the gradient of **every parameter** at step 1, the samples and their order (not with CP, where a rank
sees slices of samples), and the losses after a checkpoint of this layout was resumed on **one** rank, weights and
optimizer, all within 1e-5 relative of one rank that ran straight through. A layout's name spells its sizes: `tp2` is
TP 2, `sp` sequence parallelism, `pp` pipeline, `vpp` chunks per stage, `dp` replicas, `cp` context, `ep` experts,
`etp` expert TP; `mbs` micro-batch, `overlap` of gradient reduction and parameter gather, `bucket` gradient elements
per bucket, `zero0` without distributed optimizer, `zero2` gradients and `zero3` weights in shards, `hsdp` copies of
them, `first`/`last` layers of the end stages, `account` embedding and
loss counted as layers, `[Et|tL]` what each chunk holds in Megatron's letters, `allgather` the all-gather dispatcher of
experts (otherwise all-to-all). Try your own:
`python -m tools.parity RECIPE --layouts tp2spep2etp1 ...`.

Switches hold less memory, or compile, against one rank without: `recompute` is full recomputation, `selective` that of
`core_attn` and `mlp`, `auto` what pays within 4.5 MiB a rank (`train.recompute`), `offload` one block of each chunk
whose activations wait on the host, `chunks` logits of 16 tokens at a time, `compile` compiled blocks (`train.compile`)
before Inductor's kernels, which have [their own tests](../tests/models/test_compiled.py). What a GPU alone leaves to
its host, or keeps in fewer bits, is compared on the emulated device
([state and shards](../tests/gpu_path/test_optimizer_state.py), [activations](../tests/gpu_path/test_training.py),
[by module](../tests/gpu_path/test_fine_grained_offload.py), [compiled blocks](../tests/gpu_path/test_compiled.py)).

Muon: one step from random weights, on the gradients that a layout had, is what Muon in plain PyTorch and fp64 makes of
whole matrices ([tests/oracle](../tests/oracle/muon.py)), each element within 3e-5 of its update's largest singular
value: fp32's rounding, times the 500 by which five iterations multiply a direction in which a gradient is nothing. The
suite tries {len(MUON_SUITE)} of the {len(MUON)} layouts. The losses of {muon_row.ITERATIONS} iterations at a rate of
0.002 are within 1e-5 relative of one rank's (`make test-all`).

| Model | Layouts | With switches | Muon |
|---|---|---|---|"""

TAIL = """## Layouts drawn at random

`python -m pytest tests/test_layouts.py --campaign -k random` draws 300 layouts of four ranks that `RunConfig.problems`
accepts, with every sharding strategy, copies of shards and experts among them, and compares each in the same way. All
300 were equal to one rank (2026-11-25, 2 cores, 14 minutes beside other work).

## Equal by definition on some axes only

- **Capacity factors** (`moe_expert_capacity_factor`): a rank counts an expert's capacity over its own tokens of a
  microbatch, so which tokens are dropped depends on TP (with sequence parallelism), CP and the micro-batch, not on EP,
  PP or DP. With `moe_token_drop_policy = "probs"`, tokens of nearly equal probability may change places by rounding.
- **`global_aux_loss`** balances over the samples that all replicas have seen of this iteration so far, microbatch by
  microbatch; so it depends on DP and the micro-batch, not on TP, CP, PP or EP. `aux_loss` depends on the micro-batch,
  `seq_aux_loss` on nothing.
"""
