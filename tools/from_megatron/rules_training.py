"""The train section, and the schedules of the optimizer section."""

import math
import re
import typing

from parallel.errors import UserError
from tools.from_megatron.arguments import number
from tools.from_megatron.draft import DEFAULT, Draft
from training.config.batch_schedule import BatchSchedule
from training.config.train_config import OffloadModule

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def training(draft: Draft) -> None:
    """Lengths, batch sizes, schedules and recomputation; samples become iterations."""
    ramp = _ramp(draft)
    size = _global_batch_size(draft)
    schedule = BatchSchedule(global_batch_size=size, rampup_batch_size=ramp)
    iters = _length(draft, schedule, "train-iters", "train-samples")
    if iters is None:
        raise UserError("--train-iters (or --train-samples) is missing: Megatron-LM would train nothing. Add it.")
    draft.put("train.train_iters", *iters)
    decay = _length(draft, schedule, "lr-decay-iters", "lr-decay-samples")
    if decay is not None:
        draft.put("optimizer.lr_decay_iters", *decay)
    wsd = _length(draft, schedule, "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    if wsd is not None:
        draft.put("optimizer.lr_wsd_decay_iters", *wsd)
    _warmup(draft, schedule, (decay or iters)[0])
    _recompute(draft)
    _offload(draft)
    if draft.values.get("train.eval_iters") == 0 and draft.values.get("train.eval_interval") == 0:
        del draft.values["train.eval_interval"]
        draft.irrelevant.append("--eval-interval 0: nothing is evaluated without --eval-iters")
    interval = draft.arguments.whole("manual-gc-interval")
    if draft.arguments.switch("manual-gc"):
        draft.put("train.manual_gc_interval", interval or 100, "--manual-gc-interval" if interval else "--manual-gc")


def _ramp(draft: Draft) -> tuple[int, int, int] | None:
    values = draft.arguments.texts("rampup-batch-size")
    if values:
        start, increment, samples = (number("rampup-batch-size", value, int) for value in values)
        draft.put("train.rampup_batch_size", [start, increment, samples], "--rampup-batch-size")
        return start, increment, samples
    steps = _steps(draft)
    if steps and draft.arguments.text("global-batch-size") is not None:
        draft.unsupported.append(
            "--step-batch-size-schedule: Megatron-LM refuses it beside --global-batch-size. The recipe has the latter."
        )
        return None
    if len(steps) < 2:
        return None
    samples = steps[-1][0]
    increment, pause = steps[1][1] - steps[0][1], steps[1][0]
    even = [(step * pause, steps[0][1] + step * increment) for step in range(len(steps))]
    if increment <= 0 or any(
        size != wanted or abs(at - expected) > 1 for (at, size), (expected, wanted) in zip(steps, even, strict=True)
    ):
        draft.unsupported.append(
            "--step-batch-size-schedule: its steps are uneven, and a ramp (train.rampup_batch_size) grows by equal "
            "steps at equal distances. The recipe has the last size from the start."
        )
        return None
    draft.put("train.rampup_batch_size", [steps[0][1], increment, samples], "--step-batch-size-schedule")
    return steps[0][1], increment, samples


def _steps(draft: Draft) -> list[tuple[int, int]]:
    """(samples, batch size from there on); thresholds are written in tokens, e.g. "0:16 2.4B:320"."""
    text = draft.arguments.text("step-batch-size-schedule")
    if text is None:
        return []
    seq_length = draft.arguments.required("seq-length", "encoder-seq-length")
    steps = []
    for word in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", word)
        if match is None:
            raise UserError(f'--step-batch-size-schedule: expected "TOKENS:SIZE" as in 2.4B:320, found "{word}".')
        steps.append((math.ceil(round(float(match[1]) * _UNITS[match[2]]) / seq_length), int(match[3])))
    return steps


def _global_batch_size(draft: Draft) -> int:
    size, micro = draft.arguments.whole("global-batch-size"), draft.arguments.required("micro-batch-size")
    steps = _steps(draft)
    source = "--global-batch-size"
    if size is None and steps:
        size, source = steps[-1][1], "--step-batch-size-schedule"
    if size is None:
        size, source = micro * _replicas(draft), "micro batch x DP"
    draft.put("train.global_batch_size", size, source)
    return size


def _replicas(draft: Draft) -> int:
    """Data-parallel replicas of the ranks that the script starts."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    replica = math.prod(draft.arguments.whole(name, 1) or 1 for name in names)
    if draft.world is None:
        draft.unsupported.append(
            "no --global-batch-size: Megatron-LM takes --micro-batch-size x DP, but the number of ranks is not known "
            "here. The recipe has DP 1: set train.global_batch_size."
        )
        return 1
    return max(draft.world // replica, 1)


def _length(draft: Draft, schedule: BatchSchedule, iters: str, samples: str) -> tuple[int, str] | None:
    """A length in iterations, and its flag."""
    count, consumed = draft.arguments.whole(iters), draft.arguments.whole(samples)
    if count and consumed:
        raise UserError(f"--{samples} beside --{iters}: Megatron-LM refuses both. Leave one out.")
    if count is not None:
        return count, f"--{iters}"
    return None if consumed is None else (iterations(draft, schedule, consumed, samples), f"--{samples}")


def iterations(draft: Draft, schedule: BatchSchedule, samples: int, flag: str) -> int:
    """The iterations that fit into so many samples, as Megatron-LM counts --train-samples."""
    low, high = 0, samples + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if schedule.consumed_after(middle) <= samples else (low, middle)
    reached = schedule.consumed_after(low)
    if reached != samples:
        draft.notes.append(f"--{flag} {samples}: Triplane counts iterations; {low} of them are {reached} samples.")
    return low


def _warmup(draft: Draft, schedule: BatchSchedule, decay_iters: int) -> None:
    fraction = draft.arguments.real("lr-warmup-fraction")
    length = _length(draft, schedule, "lr-warmup-iters", "lr-warmup-samples")
    if fraction is None:
        draft.put("optimizer.lr_warmup_iters", *(length or (0, DEFAULT)))
        return
    count = round(fraction * decay_iters)
    draft.put("optimizer.lr_warmup_iters", count, f"--lr-warmup-fraction {fraction:g} of {decay_iters}")
    if not math.isclose(count, fraction * decay_iters):
        draft.notes.append(f"--lr-warmup-fraction {fraction:g} is {fraction * decay_iters:g} iterations, rounded.")


def _recompute(draft: Draft) -> None:
    granularity = draft.arguments.text("recompute-granularity")
    short, modules = draft.arguments.switch("recompute-activations"), draft.arguments.texts("recompute-modules")
    if granularity is None and short:
        granularity = "selective"
    if granularity is not None:
        source = "--recompute-activations" if short else "--recompute-granularity"
        draft.put("train.recompute_granularity", granularity, source)
    if granularity == "selective":
        source = "--recompute-modules" if modules else DEFAULT
        draft.put("train.recompute_modules", modules or ["core_attn"], source)
    elif modules:
        draft.irrelevant.append('--recompute-modules: has no effect without --recompute-granularity "selective"')


def _offload(draft: Draft) -> None:
    modules, known = draft.arguments.texts("offload-modules"), typing.get_args(OffloadModule)
    if not modules:
        return
    if not draft.arguments.switch("fine-grained-activation-offloading"):
        draft.irrelevant.append("--offload-modules: has no effect without --fine-grained-activation-offloading")
        return
    for module in modules:
        if module not in known:
            draft.unsupported.append(f"--offload-modules {module}: Triplane offloads {', '.join(known)}.")
    draft.put("train.offload_modules", [module for module in modules if module in known], "--offload-modules")
