"""compare: runs pretrain_gpt.py in a handful of layouts on this machine, and holds the planner against it.

The cluster is one that calibrate wrote here; ranks are started as pretrain_gpt.py starts local ones.

    torchrun --nproc-per-node 2 -m tools.plan calibrate here.toml
    python -m tools.plan compare --cluster ./here.toml

2026-11-21, 2 virtual CPUs of an x86_64 machine that others used at the same time (load 5 to 6, so that both sides moved
by a factor of two and more from minute to minute), the demo's model: predicted over measured 1.12 on one rank, DP2
2.00, TP2 0.89, PP2 1.21; at load 11, 35 minutes before, 0.70, 0.52, 0.30, 0.39. Not run on GPUs.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from models.costs.candidate import Candidate
from program.errors import UserError
from program.printing import columns
from tools import clusters
from tools.plan.calibrate.one_rank import made_up_links
from tools.plan.cost.hardware import on_cpu, precisions
from tools.plan.flags import CompareFlags
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.recipe import configuration, problems
from tools.plan.search.request import PlanRequest
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.metrics.jsonl import read_jsonl

PROGRAM = Path(__file__).parents[3] / "pretrain_gpt.py"
STEPS, WARM_UP = 12, 3
"""Optimizer steps of each run, and how many of them are left out."""
BATCH, SEQ_LENGTH = 8, 128


def filled(flags: CompareFlags) -> CompareFlags:
    """With what compare takes where nothing is said: the demo's model, and all ranks of a node of the cluster."""
    whole = clusters.load(flags.cluster).node.gpus_per_node
    if flags.recipe is not None:
        return dataclasses.replace(flags, num_gpus=flags.num_gpus or whole)
    return dataclasses.replace(
        flags,
        model=flags.model or "demo",
        num_gpus=flags.num_gpus or whole,
        global_batch_size=flags.global_batch_size or BATCH,
        seq_length=flags.seq_length or SEQ_LENGTH,
    )


def compare(question: PlanRequest, base: RunConfig | None) -> None:
    """Prints a table. Raises UserError where a run ends ill, with its last words, and where nothing can be compared."""
    ranks = question.num_gpus
    if warning := made_up_links(question.cluster):
        print(warning, file=sys.stderr)
    plans = [plan for count in sorted({1, ranks}) for plan in _plans(question, count)]
    if not plans:
        raise UserError(
            f"compare: no layout of 1 or {ranks} ranks that is all DP, all TP or all PP divides this model and "
            "batch, or the constraints leave none. Choose another batch or --num_gpus, or lift constraints."
        )
    rows: list[tuple[str, ...]] = [("ranks", "layout", "limited by", "predicted s", "measured s", "ratio")]
    ratios = []
    for number, plan in enumerate(plans, start=1):
        print(f"{number} of {len(plans)}: {plan.layout} ...", file=sys.stderr, flush=True)
        found = measured_s(question, plan.layout, base)
        ratios.append(plan.step_s / found)
        cells = (f"{plan.step_s:.4g}", f"{found:.4g}", f"{ratios[-1]:.2f}")
        rows.append((f"{plan.layout.world_size}", f"{plan.layout}", plan.limit, *cells))
    print(
        f"{question.model.shape} on {question.cluster.gpu.name} ({question.cluster.name}): "
        f"{question.global_batch_size} samples x {question.seq_length} tokens, "
        f"medians of {STEPS - WARM_UP} steps after {WARM_UP}; ratio: predicted over measured"
    )
    print("\n".join(columns(rows, left=(1, 2))))
    print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def _plans(question: PlanRequest, ranks: int) -> list[PricedLayout]:
    """One rank; or all data-parallel, all tensor-parallel, all stages, and, of four ranks or more, two by two."""
    sizes = [(1, 1), (ranks, 1), (1, ranks), (2, 2)] if ranks >= 4 else [(1, 1), (ranks, 1), (1, ranks)]
    own = dataclasses.replace(question, num_gpus=ranks)
    layouts = [_layout(own, tp, pp) for tp, pp in dict.fromkeys(sizes)]
    return price(own, [layout for layout in layouts if layout and own.allows(layout) and not problems(own, layout)])


def _layout(question: PlanRequest, tp: int, pp: int) -> Candidate | None:
    dp = question.num_gpus // (tp * pp)
    if not dp or question.global_batch_size % dp or question.num_gpus % (tp * pp):
        return None
    return Candidate(
        tp=tp, pp=pp, dp=dp, microbatches=question.global_batch_size // dp,
        sequence_parallel=question.splits_sequences(tp), overlap=question.overlaps(dp),
        precision=precisions(question.cluster)[0],
    )  # fmt: skip


def measured_s(question: PlanRequest, layout: Candidate, base: RunConfig | None) -> float:
    """Seconds of a step of the real program, the median of some."""
    own = dataclasses.replace(question, num_gpus=layout.world_size)
    config = configuration(own, layout, base)
    config = dataclasses.replace(
        config,
        device="cpu" if on_cpu(question.cluster) else "cuda",
        nproc=layout.world_size,
        train=dataclasses.replace(
            config.train, train_iters=STEPS, eval_interval=None, generate_tokens=0, sample_interval=None
        ),
        data=config.data if base is not None else dataclasses.replace(config.data, tokenizer="byte"),
        log=dataclasses.replace(config.log, log_interval=1, tensorboard=False),
        checkpoint=dataclasses.replace(config.checkpoint, save_interval=None),
    )
    with tempfile.TemporaryDirectory(prefix="triplane-compare-") as folder:
        recipe, run_dir = Path(folder) / "compared.toml", Path(folder) / "run"
        recipe.write_text(dump(dataclasses.replace(config, run_dir=str(run_dir))))
        environ = {"OMP_NUM_THREADS": _threads(question)} | dict(os.environ)
        done = subprocess.run([sys.executable, PROGRAM, recipe], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{layout}: pretrain_gpt.py ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
        lines = read_jsonl(run_dir / "metrics.jsonl")
    return statistics.median(_times(lines)[WARM_UP:])


def _threads(question: PlanRequest) -> str:
    """As many as when the cluster was measured."""
    return str(question.cluster.measured.get("threads", "1"))


def _times(lines: Sequence[dict[str, object]]) -> list[float]:
    return [float(str(line["iteration_s"])) for line in lines if "iteration_s" in line]
