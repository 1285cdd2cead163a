"""The curves of learning rate and weight decay of a run with ``[[stage]]`` tables."""

from collections.abc import Callable, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from program.errors import SharedMistake
from training.config.lr_schedule import Schedule
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.schedules import curve
from training.config.stage_config import RunPosition

CURVE = frozenset({
    "lr", "min_lr", "lr_decay_style", "lr_decay_power", "decoupled_lr", "decoupled_min_lr", "lr_warmup_iters",
    "lr_warmup_fraction", "lr_warmup_init", "lr_decay_iters", "lr_wsd_decay_iters", "lr_wsd_decay_style",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "weight_decay_incr_samples",
})  # fmt: skip
"""Of the optimizer: with one of these a curve of learning rate and weight decay begins, at the stage's first sample."""

FRESH = (
    "lr_warmup", "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "start_weight_decay", "end_weight_decay", "weight_decay_incr",
)  # fmt: skip
"""What fields begin with that no curve takes over from the one before."""


def with_curves(recipe: RunConfig, found: Sequence[RunConfig], at: RunPosition | None) -> list[RunConfig]:
    """With lengths of the whole run in each: of curves, which span the stages up to the next curve, in samples."""
    now = max(0, len(at.begun) - 1) if at is not None else -1
    begins = [number for number, one in enumerate(recipe.stage) if number == 0 or CURVE & one.optimizer.keys()]
    result: list[RunConfig] = []
    for previous, number, stop in zip([0, *begins], begins, [*begins[1:], len(found)], strict=False):
        spanned, first = found[number:stop], found[number]
        optimizer = first.optimizer
        if number:
            before = result[-1]
            kept = at.schedule if at is not None and previous <= now < number else None
            if kept is None or recipe.checkpoint.override_opt_param_scheduler:
                kept = before.schedule
            optimizer = _continued(before.optimizer, kept, first, CURVE & recipe.stage[number].optimizer.keys())
        of_curve = _of_curve(optimizer, spanned)
        for one in spanned:
            begin, train = replace(one.own_stage, curve=first.own_stage.first), one.train
            if not begin.is_last and train.average_last is not None:  # the last iterations of the run are meant
                on_host = train.averages_on_host and train.ema_decay is not None
                train = replace(train, average_last=None, averages_on_host=on_host)
            result.append(replace(one, optimizer=replace(one.optimizer, **of_curve), train=train, begin=begin))
    return result


def _of_curve(optimizer: OptimizerConfig, spanned: Sequence[RunConfig]) -> dict[str, Any]:
    """The fields of a curve, with lengths in samples, so that each stage's configuration makes the same one."""
    schedule = curve(optimizer, sum(one.iterations for one in spanned), _samples_of(spanned))
    lengths = {
        "lr_decay_iters": None,
        "lr_decay_samples": schedule.decay_samples,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_samples": schedule.wsd_decay_samples,
        "weight_decay_incr_samples": schedule.weight_decay_samples,
    }
    if optimizer.lr_warmup_fraction is None:
        lengths |= {"lr_warmup_iters": 0, "lr_warmup_samples": int(schedule.warmup_samples)}
    return {name: getattr(optimizer, name) for name in CURVE} | lengths


def _continued(optimizer: OptimizerConfig, before: Schedule, stage: RunConfig, named: Set[str]) -> OptimizerConfig:
    """What a stage's own curve is made of: the rates that held until now, without a warm-up, and the fields named.

    before: the curve that ends here. Raises SharedMistake where that leaves no rate.
    """
    first, asked = stage.own_stage.first, stage.optimizer
    rates = before.rates(first.samples)
    fresh: dict[str, Any] = {one.name: one.default for one in fields(OptimizerConfig) if one.name.startswith(FRESH)}
    lr = asked.lr if "lr" in named else rates.learning_rate
    if lr == 0:
        raise SharedMistake(
            f'stage "{first.name}": the learning rate is 0 when it begins, at the end of the curve before. Give '
            "optimizer.lr, or let that curve end later or higher (optimizer.lr_decay_style, min_lr, lr_decay_iters)."
        )
    kept = {
        **fresh,
        "lr": lr,
        "min_lr": min(optimizer.min_lr, lr),
        "decoupled_lr": rates.decoupled_learning_rate,
        "weight_decay": rates.weight_decay,
    }
    if rates.decoupled_learning_rate is not None:
        least = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        kept["decoupled_min_lr"] = min(least, asked.decoupled_lr or 0.0)
    found = replace(optimizer, **(kept | {name: getattr(asked, name) for name in named}))
    if found.lr_decay_style == "inverse-square-root" and not (found.lr_warmup_iters or found.lr_warmup_fraction):
        raise SharedMistake(
            f'stage "{first.name}": a curve of lr_decay_style "inverse-square-root" falls from its warm-up on, and '
            "this one has none. Give optimizer.lr_warmup_iters, or another style."
        )
    return found


def _samples_of(spanned: Sequence[RunConfig]) -> Callable[[int], int]:
    """Samples that the first so many iterations of several stages take; the last one goes on for ever."""

    def samples(iterations: int) -> int:
        before = spanned[0].own_stage.first.samples
        consumed, left = before, iterations
        for one in spanned:
            taken = left if one is spanned[-1] else min(left, one.iterations)
            consumed, left = one.batches.consumed_after(taken, consumed), left - taken
        return consumed - before

    return samples
