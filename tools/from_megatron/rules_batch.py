"""Batch sizes: constant, a ramp of the older --rampup-batch-size, or --step-batch-size-schedule."""

import math
from dataclasses import dataclass

from program.errors import UserError
from tools.from_megatron.arguments import number
from tools.from_megatron.draft import Draft
from training.config.batch_schedule import BatchSchedule, read_steps


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch of each iteration, and how Megatron-LM counts with it."""

    schedule: BatchSchedule
    counted: int | None = None
    """Samples that it takes for an iteration where it counts schedules in iterations; None: those of every batch."""

    def iterations(self, samples: int) -> int:
        """Iterations of --train-samples (Megatron-LM's ``update_train_iters``)."""
        low, high = 0, samples + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.schedule.consumed_after(middle) <= samples else (low, middle)
        reached, ramp = self.schedule.consumed_after(low), self.schedule.rampup_batch_size
        # With steps, the last iteration may go beyond. With a ramp, what ends within it has one more iteration.
        beyond = reached < samples if self.schedule.steps else ramp is not None and reached <= ramp[2]
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


def _stepped(draft: Draft, text: str) -> Batches:
    source, seq_length = "--step-batch-size-schedule", draft.arguments.required("seq-length", "encoder-seq-length")
    steps = tuple((at // seq_length, size) for at, size in read_steps(text))
    draft.put("train.global_batch_size", steps[-1][1], source)
    if len(steps) > 1:
        draft.put("train.step_batch_size_schedule", text, source)
    counted = None
    if draft.arguments.whole("train-iters"):
        counted = draft.arguments.required("micro-batch-size") * replicas(draft, f"{source} beside --train-iters")
        draft.notes.append(
            f"{source} beside --train-iters: Megatron-LM 0.19.2 counts schedules that are given in iterations as of "
            f"micro batch x DP = {counted} samples each, and so does the recipe. --train-samples would say it plainly."
        )
    return Batches(BatchSchedule(global_batch_size=steps[-1][1], steps=steps), counted)


def _steps(draft: Draft) -> str | None:
    """As megatron-core's StepBatchsizeNumMicroBatchesCalculator reads them, with thresholds in tokens."""
    text = draft.arguments.text("step-batch-size-schedule")
    if text is None:
        return None
    try:
        read_steps(text)
    except ValueError as error:
        raise UserError(f"--step-batch-size-schedule: {error}. Megatron-LM refuses it, too.") from error
    return text


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
