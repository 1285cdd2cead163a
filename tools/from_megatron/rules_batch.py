"""Batch sizes: constant, a ramp of the older --rampup-batch-size, or --step-batch-size-schedule."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from program.errors import UserError
from tools.from_megatron.arguments import number
from tools.from_megatron.draft import Draft
from training.config.batch_schedule import BatchSchedule

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch of each iteration, and how Megatron-LM counts with it."""

    schedule: BatchSchedule
    counted: int | None = None
    """Samples that it takes for an iteration where it counts schedules in iterations; None: those of every batch."""
    steps: bool = False
    """Whether it is a --step-batch-size-schedule."""

    def iterations(self, samples: int) -> int:
        """Iterations of --train-samples (Megatron-LM's ``update_train_iters``)."""
        low, high = 0, samples + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.schedule.consumed_after(middle) <= samples else (low, middle)
        reached, ramp = self.schedule.consumed_after(low), self.schedule.rampup_batch_size
        # With steps, the last iteration may go beyond. With a ramp, what ends within it has one more iteration.
        beyond = reached < samples if self.steps else ramp is not None and reached <= ramp[2]
        return low + beyond


def batches(draft: Draft) -> Batches:
    """The batch sizes of a command, which become fields of the train section."""
    steps = _steps(draft)
    if steps and draft.arguments.text("global-batch-size") is not None:
        draft.not_understood.append(
            "--step-batch-size-schedule beside --global-batch-size: Megatron-LM refuses both, and the recipe "
            "has the latter."
        )
    elif steps:
        return _stepped(draft, steps)
    size = _global_batch_size(draft)
    values = draft.arguments.texts("rampup-batch-size")
    if not values:
        return Batches(BatchSchedule(global_batch_size=size))
    start, increment, samples = (number("rampup-batch-size", value, int) for value in values)
    draft.put("train.rampup_batch_size", [start, increment, samples], "--rampup-batch-size")
    if not draft.arguments.whole("train-iters"):
        draft.notes.append(
            "--rampup-batch-size: the recipe has the ramp, as older Megatron-LM; 0.19.2 ignores the flag."
        )
    else:
        draft.notes.append(
            "--rampup-batch-size beside --train-iters: older versions of Megatron-LM refuse both, and 0.19.2 ignores "
            "the ramp. The recipe has it; schedules that are given in iterations are counted as Megatron-LM would, "
            f"each of {size} samples. Without the ramp, leave out train.rampup_batch_size."
        )
    ramp = BatchSchedule(global_batch_size=size, rampup_batch_size=(start, increment, samples))
    return Batches(ramp if not ramp.problems(1, 1) else BatchSchedule(global_batch_size=size), size)


def _stepped(draft: Draft, steps: Sequence[tuple[int, int]]) -> Batches:
    source, full = "--step-batch-size-schedule", steps[-1][1]
    draft.put("train.global_batch_size", full, source)
    ramp = _as_ramp(steps)
    if ramp is not None and ramp.rampup_batch_size is not None:
        draft.put("train.rampup_batch_size", list(ramp.rampup_batch_size), source)
    elif ramp is None:
        draft.not_understood.append(
            f"{source}: its steps are uneven, and a ramp (train.rampup_batch_size) grows by equal steps at equal "
            "distances. The recipe has the last size from the start."
        )
    counted = None
    if draft.arguments.whole("train-iters"):
        counted = draft.arguments.required("micro-batch-size") * replicas(draft, f"{source} beside --train-iters")
        draft.notes.append(
            f"{source} beside --train-iters: Megatron-LM 0.19.2 counts schedules that are given in iterations as of "
            f"micro batch x DP = {counted} samples each, and so does the recipe. --train-samples would say it plainly."
        )
    return Batches(ramp or BatchSchedule(global_batch_size=full), counted, steps=True)


def _as_ramp(steps: Sequence[tuple[int, int]]) -> BatchSchedule | None:
    """The ramp with which every iteration has the batch of these steps; None: there is none."""
    if len(steps) == 1:
        return BatchSchedule(global_batch_size=steps[0][1])
    increment, samples = steps[1][1] - steps[0][1], steps[-1][0]
    if increment <= 0 or any(after - before != increment for (_, before), (_, after) in itertools.pairwise(steps)):
        return None
    ramp = BatchSchedule(global_batch_size=steps[-1][1], rampup_batch_size=(steps[0][1], increment, samples))
    consumed = 0
    for (_, size), (threshold, _) in itertools.pairwise(steps):
        consumed += max(0, math.ceil((threshold - consumed) / size)) * size
        before = ramp.global_batch_size_at(consumed - size) if consumed else size
        if ramp.global_batch_size_at(consumed) <= size or before > size:
            return None
    return ramp


def _steps(draft: Draft) -> list[tuple[int, int]]:
    """(samples, batch size from there on), as megatron-core's StepBatchsizeNumMicroBatchesCalculator reads them;
    thresholds are written in tokens, e.g. "0:16 2.4B:320"."""
    text = draft.arguments.text("step-batch-size-schedule")
    if text is None:
        return []
    seq_length = draft.arguments.required("seq-length", "encoder-seq-length")
    steps = []
    for word in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"([\d.eE+]+)([KMBT]?):([\d.]+)([KMBT]?)", word.upper())
        if match is None:
            raise UserError(f'--step-batch-size-schedule: expected "TOKENS:SIZE" as in 2.4B:320, found "{word}".')
        at, size = (
            int(number("step-batch-size-schedule", match[one], float) * _UNITS[match[one + 1]]) for one in (1, 3)
        )
        steps.append((at // seq_length, size))
    steps.sort(key=lambda step: step[0])
    ascending = all(before < after for (before, _), (after, _) in itertools.pairwise(steps))
    if steps[0][0] != 0 or not ascending or any(size < 1 for _, size in steps):
        raise UserError(
            "--step-batch-size-schedule: expected sizes of 1 or more from 0 tokens on, each from another sample on, "
            f'found "{text}". Megatron-LM refuses it, too.'
        )
    return steps


def _global_batch_size(draft: Draft) -> int:
    size, micro = draft.arguments.whole("global-batch-size"), draft.arguments.required("micro-batch-size")
    source = "--global-batch-size"
    if size is None:
        size, source = micro * replicas(draft, "no --global-batch-size"), "micro batch x DP"
    draft.put("train.global_batch_size", size, source)
    return size


def replicas(draft: Draft, needed_by: str) -> int:
    """Data-parallel replicas of the ranks that the script starts."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    replica = math.prod(draft.arguments.whole(name, 1) or 1 for name in names)
    if draft.world is None:
        draft.not_understood.append(
            f"{needed_by}: Megatron-LM takes --micro-batch-size x DP, but the number of ranks is not known here. The "
            "recipe has DP 1: give --global-batch-size, or the command that starts the ranks."
        )
        return 1
    return max(draft.world // replica, 1)
