"""Learning rate and weight decay against megatron-core's scheduler, stepped as a training loop steps it."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from training.config.batch_schedule import BatchSchedule
from training.config.lr_schedule import DecayStyle, Schedule, WeightDecayStyle, WSDDecayStyle

BATCH = 7
OURS = ("power", "minus-square-root")
"""What Megatron has not."""


def schedule(**changes: Any) -> Schedule:
    values: dict[str, Any] = {"lr": 3e-4, "min_lr": 2e-5, "lr_decay_style": "cosine", "warmup_samples": 35}
    values |= {
        "decay_samples": 420,
        "wsd_decay_samples": 100,
        "start_weight_decay": 0.01,
        "end_weight_decay": 0.2,
    }
    values |= {"weight_decay_incr_style": "linear", "weight_decay_samples": 300}
    return Schedule(**(values | changes))


def theirs(ours: Schedule) -> tuple[Any, dict[str, float]]:
    """megatron-core's scheduler of the same curve, and the parameter group that it writes to."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, float] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=ours.lr_warmup_init,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.warmup_samples,
        lr_decay_steps=ours.decay_samples,
        lr_decay_style=ours.lr_decay_style,
        start_wd=ours.start_weight_decay,
        end_wd=ours.end_weight_decay,
        wd_incr_steps=ours.weight_decay_samples,
        wd_incr_style=ours.weight_decay_incr_style,
        wsd_decay_steps=ours.wsd_decay_samples,
        lr_wsd_decay_style=ours.lr_wsd_decay_style,
    )
    return scheduler, group


@pytest.mark.parametrize("warmup_samples", [0, 35, 38, 0.1 * 420])  # with 35, a multiple of the batch, its end is hit
@pytest.mark.parametrize(
    "style, wsd_style",
    [
        *((style, "linear") for style in get_args(DecayStyle) if style not in ("WSD", *OURS)),
        *(("WSD", style) for style in get_args(WSDDecayStyle)),
    ],
)
def test_learning_rate_is_megatron_s(style: DecayStyle, wsd_style: WSDDecayStyle, warmup_samples: float) -> None:
    ours = schedule(
        lr_decay_style=style, lr_wsd_decay_style=wsd_style, warmup_samples=warmup_samples, lr_warmup_init=1e-6
    )
    scheduler, group = theirs(ours)
    for iteration in range(80):  # 60 iterations to the end of the decay, and beyond
        assert ours.learning_rate(iteration * BATCH) == pytest.approx(group["lr"], rel=1e-12, abs=0), iteration
        scheduler.step(increment=BATCH)


def test_a_curve_that_waited_is_megatron_s_that_was_not_stepped() -> None:
    """As it is not in an iteration that --iterations-to-skip names."""
    ours, begins_at = schedule(), 21
    scheduler, group = theirs(ours)
    for iteration in range(80):
        waited = dataclasses.replace(ours, begins_at=begins_at, waited_samples=ours.waited_samples)
        rates = waited.rates(begins_at + iteration * BATCH)
        assert rates.learning_rate == pytest.approx(group["lr"], rel=1e-12, abs=0), iteration
        assert rates.weight_decay == pytest.approx(group["weight_decay"], rel=1e-12), iteration
        if iteration in (2, 30, 31):
            ours = dataclasses.replace(ours, waited_samples=ours.waited_samples + BATCH)
        else:
            scheduler.step(increment=BATCH)
    assert ours.waited_samples == 3 * BATCH and ours.is_same_as(schedule())


@pytest.mark.parametrize("style", ["linear", "WSD", "inverse-square-root"])
def test_a_decoupled_rate_is_megatron_s_of_such_a_group(style: DecayStyle) -> None:
    ours = schedule(lr_decay_style=style, decoupled_lr=2e-3, decoupled_min_lr=1e-5)
    scheduler, group = theirs(ours)
    for iteration in range(80):
        found = ours.rates(iteration * BATCH)
        apart = scheduler.get_lr({"max_lr": 2e-3, "min_lr": 1e-5})
        assert found.learning_rate == pytest.approx(group["lr"], rel=1e-12, abs=0), iteration
        assert found.decoupled_learning_rate == pytest.approx(apart, rel=1e-12, abs=0), iteration
        scheduler.step(increment=BATCH)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_power_is_transformers_polynomial_decay(power: float) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    scheduler = transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 35, 420, lr_end=2e-5, power=power)
    ours = schedule(lr_decay_style="power", lr_decay_power=power)
    for consumed in range(430):
        assert ours.learning_rate(consumed) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), consumed
        optimizer.step()
        scheduler.step()


def test_minus_square_root_is_wsd_s_from_the_warmup_on() -> None:
    wsd = schedule(lr_decay_style="WSD", lr_wsd_decay_style="minus_sqrt", wsd_decay_samples=420 - 35)
    ours = schedule(lr_decay_style="minus-square-root")
    assert [ours.learning_rate(consumed) for consumed in range(430)] == [wsd.learning_rate(c) for c in range(430)]


@pytest.mark.parametrize("style", get_args(WeightDecayStyle))
def test_weight_decay_is_megatron_s(style: WeightDecayStyle) -> None:
    start = 0.2 if style == "constant" else 0.01
    ours = schedule(weight_decay_incr_style=style, start_weight_decay=start)
    scheduler, group = theirs(ours)
    for iteration in range(80):
        assert ours.weight_decay(iteration * BATCH) == pytest.approx(group["weight_decay"], rel=1e-12), iteration
        scheduler.step(increment=BATCH)


def test_learning_rate_is_megatron_s_with_a_batch_ramp() -> None:
    batches, ours = BatchSchedule(global_batch_size=12, rampup_batch_size=(4, 4, 60)), schedule()
    scheduler, group = theirs(ours)
    for iteration in range(40):
        consumed = batches.consumed_after(iteration)
        assert ours.learning_rate(consumed) == pytest.approx(group["lr"], rel=1e-12, abs=0), iteration
        scheduler.step(increment=batches.global_batch_size_at(consumed))


@pytest.mark.parametrize(
    "ours, consumed, expected",
    [
        (schedule(lr=1.0, min_lr=0.0, warmup_samples=10), 0, 0.0),
        (schedule(lr=1.0, min_lr=0.0, warmup_samples=10), 5, 0.5),
        (schedule(lr=1.0, min_lr=0.0, warmup_samples=10, decay_samples=110), 60, 0.5),  # half of the cosine
        (schedule(lr=1.0, min_lr=0.2, warmup_samples=0, decay_samples=100, lr_decay_style="linear"), 50, 0.6),
        (
            schedule(lr=1.0, min_lr=0.2, warmup_samples=0, decay_samples=100, lr_decay_style="linear"),
            101,
            0.2,
        ),
        (schedule(lr=1.0, min_lr=0.0, warmup_samples=4, lr_decay_style="inverse-square-root"), 16, 0.5),
        (schedule(lr=1.0, min_lr=0.0, lr_decay_style="WSD", lr_wsd_decay_style="minus_sqrt"), 345, 0.5),
    ],
)
def test_values_by_hand(ours: Schedule, consumed: int, expected: float) -> None:
    assert ours.learning_rate(consumed) == pytest.approx(expected, abs=1e-12)


def test_no_length_of_zero_divides() -> None:
    styles = itertools.product(get_args(DecayStyle), get_args(WeightDecayStyle))
    for style, weight_style in styles:
        ours = schedule(
            lr_decay_style=style,
            weight_decay_incr_style=weight_style,
            warmup_samples=0,
            wsd_decay_samples=0,
            weight_decay_samples=0,
        )
        for consumed in (0, 1, 420, 421):
            assert 0 < ours.learning_rate(consumed) <= ours.lr
            assert ours.weight_decay(consumed) == ours.end_weight_decay


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"warmup_samples": 420}, "optimizer.lr_warmup_iters, _samples or _fraction (420 samples) must be fewer than"),
        ({"lr_warmup_init": 1.0}, "optimizer.lr_warmup_init must be at most optimizer.lr 0.0003, found 1"),
        ({"weight_decay_incr_style": "constant"}, "start_weight_decay 0.01 and .end_weight_decay 0.2 differ"),
    ],
)
def test_overlapping_lengths_are_reported(changes: dict[str, Any], expected: str) -> None:
    assert schedule().problems() == []
    (problem,) = schedule(**changes).problems()
    assert expected in problem


def test_a_constant_rate_needs_no_decay() -> None:
    assert schedule(lr_decay_style="constant", warmup_samples=1000).problems() == []


def test_description_tells_schedules_apart_in_one_line() -> None:
    base = schedule(lr_decay_style="WSD")
    changed = [
        dataclasses.replace(base, **{name: value})  # type: ignore[arg-type]
        for name, value in [
            ("lr", 1e-3),
            ("min_lr", 1e-6),
            ("lr_decay_style", "linear"),
            ("warmup_samples", 36),
            ("warmup_samples", 36.5),
            ("lr_warmup_init", 1e-6),
            ("decay_samples", 421),
            ("wsd_decay_samples", 99),
            ("lr_wsd_decay_style", "cosine"),
            ("end_weight_decay", 0.3),
            ("weight_decay_incr_style", "cosine"),
            ("weight_decay_samples", 299),
            ("decoupled_lr", 1e-3),
        ]
    ]
    lines = [ours.describe() for ours in (base, *changed)]
    assert len(set(lines)) == len(lines)
    assert not any("\n" in line for line in lines)
