"""trace: the first, a middle and the last stage of the best layouts, one process for each layout.

2026-11-22, 2 virtual CPUs, the column "CPU s" of trace: a first stage of llama3_8b TP2 1 s, of llama3_70b TP8 PP4 1 s
(VPP5 2 s), of mixtral_8x7b TP2 PP4 VPP8 EP8 1 s, of qwen3_30b_a3b PP2 with 16 experts a rank 2 s; with 64 experts a
rank, VPP4 and full recomputation 9 s: 12 layers, 8 microbatches, expert by expert. 0.5 GB resident. Importing torch
and megatron takes another 3 s, once for each layout.
"""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.costs.candidate import Candidate
from models.costs.cases import MemoryCase
from models.costs.predict import of_stage
from models.costs.program import OURS
from models.costs.sizes import sizes
from models.costs.stage_parameters import FP4_COPIES, FP8_COPIES
from models.kernels import KernelsConfig
from parallel.layout import Coordinates
from program.errors import UserError
from program.printing import columns
from program.untrusted import parse_json
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.recipe import configuration
from tools.plan.search.request import PlanRequest
from training.config.recipe import dump
from training.config.run_config import RunConfig

SPEC = (
    "traced with this project's own CPU modules, which keep more than Transformer Engine's fused ones: bytes of "
    "weights, gradients and optimizer are those of a GPU run, activations are an upper bound"
)
COPIES = {"fp8": FP8_COPIES, "nvfp4": FP4_COPIES}
"""Bytes a parameter of Transformer Engine's copies of weights, by format."""
SPEC_OF_COPIES = (
    "traced in bf16, for a CPU has no {format}: Transformer Engine's copies of weights in {format} are counted, "
    "{copies:g} bytes a parameter, as in the plan's weights"
)

HEAD = (
    "stage", "weights", "copies", "gradients", "optimizer", "activations", "GiB", "activations by formula", "CPU s",
    "collectives",
)  # fmt: skip


def trace(question: PlanRequest, plans: Sequence[PricedLayout], base: RunConfig | None) -> None:
    """Prints a table a plan. Raises UserError where a rank cannot be traced, with its last words."""
    print(SPEC)
    for name in sorted({plan.layout.precision for plan in plans} & set(COPIES)):
        print(SPEC_OF_COPIES.format(format=name, copies=COPIES[name]))
    for plan in plans:
        rows: list[tuple[str, ...]] = [HEAD]
        stages = stages_of(plan)
        for stage, found in zip(stages, trace_stages(question, plan.layout, stages, base), strict=True):
            formula = f"{by_formula(question, plan.layout, stage) / 2**30:.2f}"
            rows.append(
                (f"{stage}", *_gib(found, plan.layout), formula, f"{found['cpu_s']:.0f}", _calls(found["collectives"]))
            )
        print(f"{plan.layout}, {rounds(plan.layout)} microbatches:")
        print("\n".join(columns(rows, left=(len(HEAD) - 1,))), flush=True)


def stages_of(plan: PricedLayout) -> list[int]:
    """The first, a middle one, the last, and the one that is said to be the fullest."""
    return sorted({0, plan.layout.pp // 2, plan.layout.pp - 1, plan.fullest_stage})


def rounds(layout: Candidate) -> int:
    """Microbatches after which no stage holds more: PP, or two rounds of PP where stages are interleaved."""
    return min(layout.microbatches, layout.pp if layout.vpp == 1 else 2 * layout.pp)


def trace_stages(
    question: PlanRequest, layout: Candidate, stages: Sequence[int], base: RunConfig | None
) -> list[dict[str, Any]]:
    """What ``one_rank`` says of the first rank of each stage; one process for all, which imports torch once."""
    config = configuration(question, layout, base)
    grid = config.layout(question.num_gpus)
    ranks = [grid.rank(Coordinates(dp=0, pp=stage, cp=0, tp=0)) for stage in stages]
    with tempfile.TemporaryDirectory(prefix="triplane-trace-") as folder:
        recipe = Path(folder) / "traced.toml"
        recipe.write_text(dump(traceable(config)))
        numbers = [str(number) for number in (question.num_gpus, rounds(layout), *ranks)]
        command = [sys.executable, "-m", "tools.plan.trace.one_rank", str(recipe), *numbers]
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        stage = stages[min(len(lines), len(stages) - 1)]
        raise UserError(f"{layout}: stage {stage} cannot be traced: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return [parse_json(line) for line in lines]


def traceable(config: RunConfig) -> RunConfig:
    """On the CPU, without fp8, fp4 and fused kernels, with one reduction at the end, and with all that a GPU would have
    on the host or in fewer bits.

    But for Transformer Engine's copies (``product_copies``), none of this changes what a rank holds of a model.
    """
    parallel = dataclasses.replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
    precision = config.precision.without_products()
    train = dataclasses.replace(config.train.without_modules_offloaded(), cpu_offloading_num_layers=0)
    return dataclasses.replace(
        config, device="cpu", parallel=parallel, precision=precision, kernels=KernelsConfig(),
        optimizer=config.optimizer.plain_state(), train=train,
    )  # fmt: skip


def by_formula(question: PlanRequest, layout: Candidate, stage: int) -> float:
    """Bytes of activations that ``memory`` gives for the modules that are traced here."""
    precision = "bf16" if layout.precision in COPIES else layout.precision
    own = dataclasses.replace(layout, precision=precision, microbatches=rounds(layout))
    software = dataclasses.replace(OURS, cuda=False, transformer_engine=False)
    case = MemoryCase(model=sizes(question.shape, question.seq_length), layout=own, software=software)
    return of_stage(case, question.shape, stage).activations


def optimizer_bytes(found: dict[str, Any]) -> int:
    """Main weights and two moments of the same size; of fp32 weights, the moments of this rank's shard."""
    return int(found["main_weights"]) + int(found["moments"])


def product_copies(found: dict[str, Any], layout: Candidate) -> float:
    """Bytes that a GPU run holds beside the weights that are traced."""
    return COPIES.get(layout.precision, 0) * int(found["parameters"])


def _gib(found: dict[str, Any], layout: Candidate) -> tuple[str, ...]:
    copies = product_copies(found, layout)
    sizes = [found["weights"], copies, found["gradients"], optimizer_bytes(found), found["activations"]]
    return (*(f"{size / 2**30:.2f}" for size in sizes), f"{sum(sizes) / 2**30:.1f}")


def _calls(collectives: dict[str, dict[str, int]]) -> str:
    return ", ".join(
        f"{entry['calls']} {name} ({entry['bytes'] / 1e9:.3g} GB)" for name, entry in sorted(collectives.items())
    )
