"""Sizes of global batches and Megatron's schedules, by Megatron's own classes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from training.config.run_config import RunConfig


def batch_sizes(config: RunConfig) -> Iterator[int]:
    """Samples of each iteration: Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator, or its steps in tokens."""
    full, ramp = config.train.global_batch_size, config.train.rampup_batch_size
    steps = [pair.split(":") for pair in (config.train.step_batch_size_schedule or f"0:{full}").split()]
    consumed = 0
    while True:
        size = [int(batch) for tokens, batch in steps if int(tokens) <= consumed * config.model.seq_length][-1]
        if ramp is not None and consumed < ramp[2]:
            start, increment, samples = ramp
            per_increment = samples / ((full - start) // increment) if full > start else samples
            size = min(full, start + int(consumed / per_increment) * increment)
        yield size
        consumed += size


class Rates(NamedTuple):
    """What Megatron's scheduler says of an iteration."""

    learning_rate: float
    weight_decay: float
    of_words: float | None
    """Of word embeddings and output layer, with optimizer.decoupled_lr."""


class _Power(OptimizerParamScheduler):
    """Megatron's linear decay, raised to a power: transformers' get_polynomial_decay_schedule_with_warmup."""

    def __init__(self, parameters: torch.optim.Optimizer, power: float, fields: dict[str, Any]) -> None:
        self.power = power
        super().__init__(parameters, **fields | {"lr_decay_style": "linear"})

    def get_lr(self, param_group: dict[str, Any]) -> float:
        linear = float(super().get_lr(param_group))
        if self.num_steps <= self.lr_warmup_steps:
            return linear
        most, least = param_group.get("max_lr", self.max_lr), param_group.get("min_lr", self.min_lr)
        assert most is not None and least is not None
        return float(least + (most - least) * ((linear - least) / (most - least)) ** self.power)


def scheduled(config: RunConfig, steps: int) -> list[Rates]:
    """Of the first iterations: Megatron's OptimizerParamScheduler, stepped."""
    optimizer, train = config.optimizer, config.train
    sizes = batch_sizes(config)
    consumed = [0]
    most = max(train.train_iters, optimizer.lr_decay_iters or 0, optimizer.lr_warmup_iters)
    for _ in range(most):
        consumed.append(consumed[-1] + next(sizes))
    decay = optimizer.lr_decay_iters or train.train_iters
    wsd = optimizer.lr_wsd_decay_iters or max(1, decay // 5)
    ramp = optimizer.start_weight_decay, optimizer.end_weight_decay
    apart = {"max_lr": optimizer.decoupled_lr, "min_lr": optimizer.decoupled_min_lr}
    words = {name: rate for name, rate in apart.items() if rate is not None}  # as megatron-core overrides a group's
    groups: list[dict[str, Any]] = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], **words}]
    parameters = torch.optim.AdamW(groups, lr=0.0)
    fields: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": consumed[optimizer.lr_warmup_iters],
        "lr_decay_steps": consumed[decay],
        "lr_decay_style": optimizer.lr_decay_style,
        "start_wd": optimizer.weight_decay if ramp[0] is None else ramp[0],
        "end_wd": optimizer.weight_decay if ramp[1] is None else ramp[1],
        "wd_incr_steps": consumed[train.train_iters],
        "wd_incr_style": optimizer.weight_decay_incr_style,
        "wsd_decay_steps": consumed[decay] - consumed[max(0, decay - wsd)],
        "lr_wsd_decay_style": optimizer.lr_wsd_decay_style,
    }
    if optimizer.lr_decay_style == "minus-square-root":  # WSD's, with no stable phase
        fields |= {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"}
        fields["wsd_decay_steps"] = consumed[decay] - consumed[optimizer.lr_warmup_iters]
    if optimizer.lr_decay_style == "power":
        scheduler: OptimizerParamScheduler = _Power(parameters, optimizer.lr_decay_power, fields)
    else:
        scheduler = OptimizerParamScheduler(parameters, **fields)
    found, steps_of = [], batch_sizes(config)
    for _ in range(steps):
        group, second = parameters.param_groups
        found.append(Rates(group["lr"], group["weight_decay"], second["lr"] if words else None))
        scheduler.step(increment=next(steps_of))
    return found
