"""The price of a whole run with ``[[stage]]`` tables: each stage's step in its layout, and what they come to."""

import dataclasses
from pathlib import Path
from typing import Any

from parallel.layout import smallest_world
from program.errors import UserError
from program.printing import columns
from tools.plan.flags import StagesFlags
from tools.plan.report.results import dollars
from tools.plan.run import asked, refuse
from tools.plan.search import rejections
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.selection import fitting
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.config.stages import of_stage
from training.config.stages import stages as stages_of_run
from training.memory.planned import planned_precision


def stages(flags: StagesFlags) -> None:
    """Print a row for each stage, and the sum. Raises UserError for a recipe without stages, and for a stage that no
    layout fits."""
    refuse(flags)
    plan = _plan(flags.recipe)
    chosen = [_priced(flags, one) for one in plan]
    rows = [("[[stage]]", "iterations", "tokens", "seq_length", "step s", "days", "GiB", "layout")]
    days = [one.iterations * best.step_s / 86400 for one, best in zip(plan, chosen, strict=True)]
    for one, best, spent in zip(plan, chosen, days, strict=True):
        first, end = one.own_stage.first, one.own_stage.end
        rows.append(
            (first.name, f"{one.iterations:,}", f"{end.tokens - first.tokens:.3g}", f"{one.model.seq_length:,}",
             f"{best.step_s:.3g}", f"{spent:.3g}", f"{best.total_bytes / 2**30:.1f}", str(best.layout))
        )  # fmt: skip
    print("\n".join(columns(rows, left=(0, 7), indent="")))
    total, hourly = sum(days), asked(flags, plan[0]).cluster.price.usd_per_gpu_hour
    low, high = (sum(spent * getattr(best.interval, end) for spent, best in zip(days, chosen, strict=True))
                 for end in ("low", "high"))  # fmt: skip
    hours = 24 * (flags.num_gpus or 0)
    print(
        f"the whole run: {end.iteration:,} iterations, {end.tokens:.3g} tokens, {total:.3g} days "
        f"({low:.3g} to {high:.3g}) on {flags.num_gpus:,} GPUs, {dollars(total * hours * hourly)} at {hourly:g} USD "
        "per GPU and hour; saves, restarts and evaluation come on top (python -m tools.plan goodput)"
    )


def _plan(recipe: Path | None) -> list[RunConfig]:
    if recipe is None:
        raise UserError("--recipe is needed: a recipe with [[stage]] tables.")
    found = stages_of_run(load(recipe))
    if not found:
        raise UserError(f"{recipe} has no [[stage]] tables: python -m tools.plan --recipe {recipe} prices it.")
    return found


def _priced(flags: StagesFlags, stage: RunConfig) -> PricedLayout:
    """A stage's layout, or the best one, at its price. Raises UserError where nothing fits."""
    with of_stage(stage):
        sizes = {} if flags.layouts == "best" else _sizes(stage)
        own = dataclasses.replace(flags, **{name: size for name, size in sizes.items() if getattr(flags, name) is None})
        question = asked(own, stage)
        if not (layouts := candidates(question)):
            raise rejections.no_layout(question)
        if not (plans := fitting(question, layouts, stage)):
            raise rejections.nothing_fits(question, price(question, layouts))
    return plans[0]


def _sizes(config: RunConfig) -> dict[str, Any]:
    """The axes that a recipe has decided; recomputation and ZeRO are the planner's."""
    if problems := config.parallel.problems():
        raise UserError("\n".join(problems))
    layout = config.layout(smallest_world(config.parallel))
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    return sizes | {"mbs": config.train.micro_batch_size, "precision": planned_precision(config.precision)}
