"""The same model, batch and card in Triplane and in what its users would pick instead: rates, memory, losses."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.costs.predict import fullest
from models.resolve import resolve
from parallel.config import PrecisionConfig
from tests.gpu import measured_models, verdict_beside
from tests.gpu.one_side import Side
from tests.gpu.report_text import percent
from tests.gpu.sides import megatron_lm, torchtitan
from tests.gpu.sides.program import Request
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.throughput import as_it_fits
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.memory.planned import Modules, as_case

FP8 = PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise")
"""The recipe that "auto" takes on Hopper; Megatron's GPTModel gets the same."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Own:
    """A row that is measured by ``one_side``."""

    side: Side
    needs_te: bool = False
    without_te: bool = False
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)


ROWS = {
    "triplane_te": Own(side="triplane", needs_te=True),
    "megatron_core": Own(side="megatron_core", needs_te=True),
    "pytorch": Own(side="plain_pytorch"),
    "triplane": Own(side="triplane", without_te=True),
    "triplane_fp8": Own(side="triplane", needs_te=True, precision=FP8),
    "megatron_core_fp8": Own(side="megatron_core", needs_te=True, precision=FP8),
}
"""triplane: with its own modules, Transformer Engine left out of the process though it is installed."""
PROGRAMS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "megatron_lm": megatron_lm.measured,
    "torchtitan": torchtitan.measured,
}
"""Whole programs, from checkouts."""
ROW_S = 40.0


def beside(run: SubjectRun) -> None:
    """Each row data-parallel over all GPUs, in processes of its own; one that fails is a problem of its own."""
    run.part("products", lambda: ceiling(run))
    model = model_of(run)
    run.numbers.setdefault("rows", {})
    run.say(f"{'':18} {'layers':>6} {'tokens/s/GPU':>12} {'TFLOPS/GPU':>10} {'MFU':>6} {'peak GiB':>8}  losses")
    for name, row in ROWS.items():
        run.part(name, partial(one_row, run, name, row, model), least_s=ROW_S)
    for name, measure in PROGRAMS.items():
        run.part(name, partial(one_program, run, name, measure, model), least_s=ROW_S)
    judge(run)


def ceiling(run: SubjectRun) -> None:
    """The fastest matrix products, by number format: throughput's, where it has run before; not of a toy's sizes."""
    known = run.earlier.get("throughput", {}).get("numbers", {}).get("gemm_tflops")
    if known is None and run.sizes.card_products:
        known = run.measured("products", card_products=True)[0]
    run.note("gemm_tflops", known or {})


def model_of(run: SubjectRun) -> RunConfig:
    """The dense model, with as many layers as the card is predicted to hold of every row.

    Without Transformer Engine most is held, fp32 logits among it; fp8 keeps copies of weights. What the others' models
    do not have is left out: scaled rotary embeddings, tied embeddings, a padded vocabulary.
    """
    config = measured_models.of_role(run.machine, run.sizes, "dense", run.sizes.most_layers, FP8)
    shape = measured_models.shape_of(config)
    layers = shape.num_layers
    while layers > 1 and not fits_plainly(run, measured_models.with_layers(config.model, layers), config):
        layers -= 1
    model = dataclasses.replace(
        measured_models.with_layers(config.model, layers), rope_scaling="none", vocab_size=shape.padded_vocab_size,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    assert resolve(model, None).padded_vocab_size == shape.padded_vocab_size
    return dataclasses.replace(config, model=model, precision=PrecisionConfig())


def fits_plainly(run: SubjectRun, model: Any, config: RunConfig) -> bool:
    """Of a row without Transformer Engine, with room for one more copy of the logits and their gradient in fp32: what
    the others' losses hold beyond Triplane's."""
    plain = dataclasses.replace(config, model=model, precision=PrecisionConfig())
    shape = measured_models.shape_of(plain)
    case = as_case(plain, len(run.machine.gpus), shape, Modules(cuda=True, transformer_engine=False))
    held = fullest([case], shape)[0].total
    logits = 8 * config.train.micro_batch_size * model.seq_length * shape.padded_vocab_size
    return held + logits <= measured_models.SHARE * run.machine.memory_gib * 2**30


def one_row(run: SubjectRun, name: str, row: Own, model: RunConfig) -> None:
    """Measured; a card that does not hold it gets fewer layers, and a problem: the prediction was wrong."""
    fp8 = row.precision.fp8 is not None
    if row.needs_te and not run.machine.has_te:
        raise UnrunError("Transformer Engine is not installed")
    if fp8 and not run.machine.has_fp8:
        raise UnrunError(f"{run.machine.gpus[0]} has no fp8 tensor cores")
    config = dataclasses.replace(model, precision=row.precision)
    config, found = as_it_fits(run, name, config, partial(steps_of, run, row))
    keep(run, name, found | {"recipe": dump(config), "same_weights": True, "fp8": fp8})
    if found["transformer_engine"] == row.without_te and run.machine.has_te:
        run.problem(f"{name}: Transformer Engine was {'' if row.without_te else 'not '}in its process")


def steps_of(run: SubjectRun, row: Own, config: RunConfig) -> dict[str, Any]:
    """What rank 0 measured, on all GPUs."""
    found: dict[str, Any] = run.measured(
        "one_side", len(run.machine.gpus), text=dump(config), side=row.side, warmup_steps=run.sizes.warmup_steps,
        steps=run.sizes.steps, te=not row.without_te,
    )[0]  # fmt: skip
    return found


def one_program(run: SubjectRun, name: str, measure: Callable[[Request], dict[str, Any]], model: RunConfig) -> None:
    """A whole program, which chooses its own random weights and tokens."""
    request = Request(
        config=model, shape=measured_models.shape_of(model), gpus=run.machine.gpus, te=run.machine.has_te,
        warmup_steps=run.sizes.warmup_steps, steps=run.sizes.steps, limit_s=run.left_s,
    )  # fmt: skip
    keep(run, name, measure(request) | {"same_weights": False, "fp8": False})


def keep(run: SubjectRun, name: str, found: dict[str, Any]) -> None:
    """Among the numbers, and as a line."""
    run.numbers["rows"][name] = found
    rates = f"{found['tokens_per_s_per_gpu']:12,.0f} {found['model_tflops_per_gpu']:10.4g}"
    shares = f"{percent(found['mfu']):>6} {found['peak_bytes'] / 2**30:8.2f}"
    losses = f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"
    run.say(f"{name:18} {found['layers']:6} {rates} {shares}  {losses}")


def judge(run: SubjectRun) -> None:
    """Ratios, goals, and losses that are not alike, of all rows that there are."""
    rows = run.numbers["rows"]
    ratios = verdict_beside.ratios(rows)
    run.note("ratios", ratios)
    run.say(*(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()))
    run.say(*verdict_beside.goals(rows, ratios, run.numbers.get("gemm_tflops", {})), verdict_beside.CONVENTION)
    run.problem(*verdict_beside.losses(rows))
    run.headline = "; ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()) or "no two rows to compare"
