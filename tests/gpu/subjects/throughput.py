"""Tokens per second, MFU and memory of an 8B-shaped model, in bf16, fp8 and fp4, and what the card's products reach."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from models.costs.stage_parameters import product_copies
from parallel.config import PrecisionConfig
from tests.gpu import measured_models
from tests.gpu.machine import GpuMachine
from tests.gpu.report_text import percent
from tests.gpu.subject_run import SubjectRun
from training.config.recipe import dump
from training.config.run_config import RunConfig

ROWS = {
    "bf16": PrecisionConfig(),
    "fp8": PrecisionConfig(fp8="hybrid"),
    "mxfp8": PrecisionConfig(fp8="e4m3"),
    "nvfp4": PrecisionConfig(fp4="e2m1"),
}
"""fp8: with the recipe that a card has for it; mxfp8 is Blackwell's for e4m3."""
CONVENTION = (
    "MFU: model FLOPs (causal: a query sees half of the keys; nothing recomputed, Megatron-LM's convention) over the "
    "published dense peak of the row's format. Share of GEMM: the same over the fastest matrix product measured here."
)
FEWER_LAYERS = 0.6
"""Where what was predicted to fit does not, the row is measured with this share of the layers."""
ROW_S = 30.0


def throughput(run: SubjectRun) -> None:
    """Each row data-parallel over all GPUs; one that fails (memory, say) is a problem."""
    run.part("matrix products", lambda: ceiling(run))
    rows = rows_of(run.machine)
    # of the row that holds most, weights in bf16 and fp8, so that rows compare
    holds_most = max(rows, key=lambda row: product_copies(ROWS[row]))
    model = measured_models.of_role(run.machine, run.sizes, "dense", run.sizes.most_layers, ROWS[holds_most])
    run.say(f"{'':6} {'layers':>6} {'tokens/s/GPU':>12} {'TFLOPS/GPU':>10} {'MFU':>6} {'of GEMM':>7} {'peak GiB':>8}")
    run.numbers["rows"] = {}
    for row in rows:
        run.part(row, lambda row=row: one_row(run, row, model), least_s=ROW_S)  # type: ignore[misc]
    if "fp8" not in rows:
        run.say("fp8: not run: Transformer Engine and fp8 tensor cores are not both here")
    run.say(CONVENTION)


def rows_of(machine: GpuMachine) -> list[str]:
    """That the card and its libraries can do."""
    rows = ["bf16", "fp8"] if machine.has_te and machine.has_fp8 else ["bf16"]
    return [*rows, "mxfp8", "nvfp4"] if "fp8" in rows and machine.has_fp4 else rows


def ceiling(run: SubjectRun) -> None:
    """The fastest product of each format."""
    (found,) = run.measured("products", card_products=run.sizes.card_products)
    run.note("gemm_tflops", found)
    run.say("matrix products: " + ", ".join(f"{name} {shown(value)}" for name, value in found.items()))


def shown(value: float | str) -> str:
    """A rate, or why there is none."""
    return value if isinstance(value, str) else f"{value:.4g} TFLOPS"


def one_row(run: SubjectRun, row: str, base: RunConfig) -> None:
    """Measured; a card that does not hold it gets fewer layers, and a problem: the prediction was wrong."""
    config, found = as_it_fits(run, row, dataclasses.replace(base, precision=ROWS[row]), partial(steps_of, run))
    gemm = run.numbers.get("gemm_tflops", {}).get(config.precision.products or row)
    found |= {"recipe": dump(config), "of_gemm": found["model_tflops_per_gpu"] / gemm if gemm else None}
    run.numbers["rows"][row] = found
    rates = f"{found['tokens_per_s_per_gpu']:12,.0f} {found['model_tflops_per_gpu']:10.4g}"
    shares = f"{percent(found['mfu']):>6} {percent(found['of_gemm']):>7}"
    run.say(f"{row:6} {found['layers']:6} {rates} {shares} {found['measured']['total'] / 2**30:8.2f}")
    run.headline = "; ".join(
        f"{name} {one['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, MFU {percent(one['mfu'])}, "
        f"{percent(one['of_gemm'])} of GEMM"
        for name, one in run.numbers["rows"].items()
    )


def as_it_fits(
    run: SubjectRun, row: str, config: RunConfig, measure: Callable[[RunConfig], dict[str, Any]]
) -> tuple[RunConfig, dict[str, Any]]:
    """What was measured, and of which run: with fewer layers, and a problem, where memory runs out."""
    try:
        return config, measure(config)
    except RuntimeError as error:
        if "OutOfMemoryError" not in str(error):
            raise
    layers = measured_models.shape_of(config).num_layers
    fewer = max(1, int(layers * FEWER_LAYERS))
    run.problem(f"{row}: {layers} layers were predicted to fit, and do not; measured with {fewer}")
    config = dataclasses.replace(config, model=measured_models.with_layers(config.model, fewer))
    return config, measure(config)


def steps_of(run: SubjectRun, config: RunConfig, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """What rank 0 measured, on all GPUs. environ: more variables."""
    gpus, warmup_steps, steps = len(run.machine.gpus), run.sizes.warmup_steps, run.sizes.steps
    fresh = bool(config.train.offload_modules)  # NVTE_CPU_OFFLOAD_V1 is read by an import
    found: dict[str, Any] = run.measured(
        "steps", gpus, environ, fresh=fresh, text=dump(config), warmup_steps=warmup_steps, steps=steps
    )[0]
    return found
