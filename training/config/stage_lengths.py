"""Where each ``[[stage]]`` begins and ends."""

import bisect
from collections.abc import Sequence
from dataclasses import replace

from data.config import TEXTS
from program.errors import SharedMistake
from training.config.batch_schedule import BatchSchedule
from training.config.run_config import RunConfig
from training.config.stage_config import RUN_BEGIN, Begin, BegunStage, RunPosition, StageConfig


def lengths(given: Sequence[StageConfig], configs: Sequence[RunConfig], at: RunPosition | None) -> list[RunConfig]:
    """Where each stage begins and ends: of those that the run has begun as it was, and from ``at`` on by the tables.

    Raises SharedMistake for one that ends where it begins.
    """
    begun = _begun(given, at)
    here = RUN_BEGIN if at is None else at.now
    found, until_now, data_iteration = list[RunConfig](), tuple[BegunStage, ...](), 0
    for number, (stage, config) in enumerate(zip(given, configs, strict=True)):
        first = begun[number] if number < len(begun) else replace(here, name=stage.name)
        if number < len(begun) - 1:
            end = begun[number + 1]  # it is over
        else:
            config = _without_ramp(config, first.samples)
            end = here = _reached(stage, config, here)
            if number >= len(begun) and end.iteration == first.iteration:
                raise SharedMistake(
                    f'stage "{stage.name}" ends where it begins, after {first.iteration:,} iterations, '
                    f"{first.samples:,} samples and {first.tokens:,} tokens: until_… counts from the run's beginning."
                )
        data_iteration = first.iteration if number and _reads_otherwise(configs[number - 1], config) else data_iteration
        until_now = (*until_now, first)
        begin = Begin(begun=until_now, end=end, count=len(given), data_iteration=data_iteration)
        found.append(replace(config, begin=begin, train=replace(config.train, train_iters=end.iteration)))
    return found


def _begun(given: Sequence[StageConfig], at: RunPosition | None) -> tuple[BegunStage, ...]:
    """Raises SharedMistake where the run has begun other stages than the recipe has."""
    if at is None:
        return ()
    begun = at.begun or (BegunStage(name=given[0].name, iteration=0, samples=0, tokens=0),)
    names = [one.name for one in given[: len(begun)]]
    if names != [one.name for one in begun]:
        raise SharedMistake(
            f"[[stage]]: this run has begun {', '.join(one.name for one in begun)}, and the recipe's first tables are "
            f"{', '.join(names)}. Stages that have begun keep their place and name; others may follow."
        )
    return begun


def _reached(stage: StageConfig, config: RunConfig, at: BegunStage) -> BegunStage:
    """Where a stage ends that holds from ``at`` on: there, where it has lasted long enough."""
    seq_length, batches = config.model.seq_length, config.batches
    if batches.problems(1, 1):  # said with the others, by RunConfig.problems
        batches = BatchSchedule(global_batch_size=max(1, config.train.global_batch_size))
    length = max(0, _iterations(stage, batches, at, seq_length))
    samples = batches.consumed_after(length, at.samples)
    tokens = at.tokens + (samples - at.samples) * seq_length
    return BegunStage(name="", iteration=at.iteration + length, samples=samples, tokens=tokens)


def _iterations(stage: StageConfig, batches: BatchSchedule, at: BegunStage, seq_length: int) -> int:
    """How many iterations a stage takes that holds from ``at`` on."""
    if stage.until_iterations is not None:
        return stage.until_iterations - at.iteration
    target = stage.until_samples
    if target is None:
        target = at.samples - (at.tokens - (stage.until_tokens or 0)) // max(1, seq_length)  # rounded up
    left = range(max(0, min(target, 1 << 62) - at.samples))  # bisect wants what len() can count
    return bisect.bisect_left(left, target, key=lambda count: batches.consumed_after(count, at.samples))


def _without_ramp(config: RunConfig, samples: int) -> RunConfig:
    """A ramp that is over by now is left out, so that a stage may have another full size."""
    ramp = config.train.rampup_batch_size
    if ramp is None or samples < ramp[2]:
        return config
    return replace(config, train=replace(config.train, rampup_batch_size=None))


def _reads_otherwise(before: RunConfig, config: RunConfig) -> bool:
    """Whether samples are others, or come in another order."""
    cut = before.model.seq_length, before.data.shaping
    return cut != (config.model.seq_length, config.data.shaping) or any(
        getattr(before.data, name) != getattr(config.data, name) for name in TEXTS
    )
