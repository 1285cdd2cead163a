"""Where each ``[[stage]]`` begins and ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.config import TEXTS
from program.errors import SharedMistake
from training.config.batch_schedule import BatchSchedule
from training.config.run_config import RunConfig
from training.config.schedules import batch_schedule
from training.config.stage_config import Begin, BegunStage, RunPosition, StageConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    """A stretch of a run, and the configuration that holds in it."""

    config: RunConfig
    """Ordinary: without ``[[stage]]``, with ``begin``, and with ``train.train_iters`` at the stage's end."""
    begin: Begin
    iterations: int
    """Of this stage alone."""
    samples: int
    tokens: int

    @property
    def name(self) -> str:
        return self.begin.stage

    @property
    def end(self) -> int:
        """Iterations of the run after its last one."""
        return self.begin.end


def lengths(given: Sequence[StageConfig], configs: Sequence[RunConfig], at: RunPosition | None) -> list[Stage]:
    """Where each stage begins and ends: of those that the run has begun as it was, and from ``at`` on by the tables.

    Raises SharedMistake for one that ends where it begins.
    """
    begun = _begun(given, at)
    here = at or RunPosition(iteration=0, samples=0, tokens=0)
    found: list[Stage] = []
    data_iteration = 0
    for number, (stage, config) in enumerate(zip(given, configs, strict=True)):
        if number < len(begun) - 1:  # over
            first, end = begun[number], begun[number + 1]
        else:
            first = begun[number] if number < len(begun) else _as_begun(stage.name, here)
            config = _without_ramp(config, first.samples)
            here = _reached(stage, config, here)
            end = _as_begun("", here)
            if number >= len(begun) and end.iteration == first.iteration:
                raise SharedMistake(
                    f'stage "{stage.name}" ends where it begins, after {first.iteration:,} iterations, '
                    f"{first.samples:,} samples and {first.tokens:,} tokens: until_… counts from the run's beginning."
                )
        data_iteration = first.iteration if number and _reads_otherwise(configs[number - 1], config) else data_iteration
        until_now = (*(one.begin.begun[-1] for one in found), first)
        begin = Begin(begun=until_now, count=len(given), end=end.iteration, data_iteration=data_iteration)
        found.append(
            Stage(
                config=config, begin=begin, iterations=end.iteration - first.iteration,
                samples=end.samples - first.samples, tokens=end.tokens - first.tokens,
            )
        )  # fmt: skip
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


def _as_begun(name: str, at: RunPosition) -> BegunStage:
    return BegunStage(name=name, iteration=at.iteration, samples=at.samples, tokens=at.tokens)


def _reached(stage: StageConfig, config: RunConfig, at: RunPosition) -> RunPosition:
    """Where a stage ends that holds from ``at`` on: there, where it has lasted long enough."""
    seq_length, batches = config.model.seq_length, batch_schedule(config.train, config.model.seq_length)
    if batches.problems(1, 1):  # said with the others, by RunConfig.problems
        batches = BatchSchedule(global_batch_size=max(1, config.train.global_batch_size))
    length = max(0, _iterations(stage, batches, at.iteration, at.samples, at.tokens, seq_length))
    samples = batches.consumed_after(length, at.samples)
    return replace(
        at, iteration=at.iteration + length, samples=samples, tokens=at.tokens + (samples - at.samples) * seq_length
    )


def _iterations(
    stage: StageConfig, batches: BatchSchedule, iteration: int, samples: int, tokens: int, seq_length: int
) -> int:
    """How many iterations a stage takes that begins after so many iterations, samples and tokens."""
    if stage.until_iterations is not None:
        return stage.until_iterations - iteration
    if stage.until_samples is not None:
        target = stage.until_samples
    else:
        target = samples - (tokens - (stage.until_tokens or 0)) // max(1, seq_length)  # rounded up
    low, high = 0, max(0, target - samples)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if batches.consumed_after(middle, samples) >= target else (middle + 1, high)
    return low


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
