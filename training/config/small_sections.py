"""Small sections of a recipe: ``fault``, ``profile`` and ``eval``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from data.config import DataConfig, split_weights
from parallel.layout import Layout
from program.limits import too_small
from program.schema import Infinite

FAILURES_PER_GPU_HOUR = 2e-5
"""Of Llama 3's 405B pretraining: 419 unexpected interruptions in 54 days on 16,384 H100, 1.97e-5 per GPU and hour, one
in 3.1 hours for the whole job (arXiv:2407.21783, section 3.3.4)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FaultConfig:
    """What is watched for while training, and what is done about it."""

    step_timeout_s: Annotated[float, Infinite] = 600.0
    """Seconds without any progress, in a step, an evaluation or a save, after which a run hangs: every rank leaves
    its stack, one line says which rank stands where, and all end. inf: wait for ever. torch's own timeout cannot tell
    who holds the others up, so it is kept longer than this: parallel.distributed_timeout_minutes is raised to 1.5
    times as much."""

    start_timeout_s: Annotated[float, Infinite] = 1800.0
    """The same until the first step of a process has ended: imports, data, rendezvous, loading, compilation."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient are NaN or Inf, and again when the same microbatches run again: stop, or skip
    the update. A fault that is gone the second time is said, and training goes on with the good result."""

    spike: Literal["off", "warn", "skip", "rollback", "stop"] = "warn"
    """When loss or gradient norm spike: say so, skip the update too, or stop. rollback: end with exit code 1, so
    that loop.sh or the batch script resumes the newest checkpoint, and skip the update of the batch that spiked
    (RUN_DIR/skipped_samples.json)."""

    replica_check_interval: int = 100
    """Iterations from one comparison of replicas' weights (and before each save) to the next. 0: never."""

    watch_interval: int = 50
    """Iterations from one look for ranks that compute slower than their peers, or whose memory grows, to the next.
    0: never."""

    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    """Failures that end the job, per GPU and hour, by which a run says how often it had better save. The default is
    what Llama 3 saw on 16,384 H100 (arXiv:2407.21783, section 3.3.4). 0: say nothing."""

    def after_watchdog(self, minutes: float) -> float:
        """``parallel.distributed_timeout_minutes``, or so many that the watchdog has spoken before: at most a week."""
        return max(minutes, min(1.5 * self.step_timeout_s / 60, 7 * 24 * 60))

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        every = "replica_check_interval", "watch_interval", "failures_per_gpu_hour"
        return [
            *too_small(self, "fault.", None, "step_timeout_s", "start_timeout_s"),
            *too_small(self, "fault.", 0, *every),
        ]


MOST_ITERATIONS = 100
"""Of one trace: each iteration of a large model leaves hundreds of thousands of events."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProfileConfig:
    """Traces of chosen ranks and iterations, memory snapshots, and a measured timeline of the pipeline."""

    enable_profiling: bool = False
    """Trace the iterations from step_start + 1 to step_end (Megatron's --profile)."""

    step_start: int = 10
    """Iterations that are done when a trace begins (Megatron's --profile-step-start)."""

    step_end: int = 12
    """Iterations that are done when it ends (Megatron's --profile-step-end)."""

    profile_freq: int | None = None
    """Iterations from the start of one trace to the start of the next (torchtitan's). None: one trace."""

    ranks: tuple[int, ...] = (0,)
    """Ranks that are traced (Megatron's --profile-ranks)."""

    use_pytorch_profiler: bool = True
    """Trace with torch.profiler, into RUN_DIR/profile. Off: for nsys, with CUDA's profiler calls and NVTX ranges of
    every operator, as Megatron does without --use-pytorch-profiler; needs GPUs."""

    pytorch_profiler_collect_shapes: bool = False
    """Note the shapes of each operator's inputs."""

    pytorch_profiler_collect_callstack: bool = False
    """Note the Python stack of each operator: several times as many events."""

    nvtx_ranges: bool = False
    """For nsys: ranges of phases, passes, layers and collectives too (Megatron's --nvtx-ranges). torch.profiler's
    traces always have them."""

    record_memory_history: bool = False
    """Record each allocation on GPUs, with its stack (Megatron's). A snapshot is written at the end of each trace by
    the ranks that are traced, and by a rank whose memory runs out."""

    timeline_interval: int | None = None
    """Iterations from one measured timeline to the next: of all passes, gradient reduction and update, in
    RUN_DIR/profile/timeline.jsonl, and the metrics pipeline_bubble and exposed_communication. None: never."""

    @property
    def traces(self) -> bool:
        """A rank is traced at some time."""
        return self.enable_profiling and bool(self.ranks)

    def trace_number(self, iterations: int) -> int | None:
        """After so many iterations, the number of the trace that the next one belongs to; None if to none."""
        since = iterations - self.step_start
        if since < 0 or not self.traces:
            return None
        number, offset = divmod(since, self.profile_freq) if self.profile_freq is not None else (0, since)
        return number if offset < self.step_end - self.step_start else None

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        if not 0 <= self.step_start < self.step_end:
            found.append(
                f"profile: expected 0 <= step_start < step_end, found step_start {self.step_start}, "
                f"step_end {self.step_end}."
            )
        elif self.step_end - self.step_start > MOST_ITERATIONS:
            found.append(
                f"profile.step_end - step_start must be at most {MOST_ITERATIONS} iterations, which one trace holds, "
                f"found {self.step_end - self.step_start}."
            )
        elif self.profile_freq is not None and self.profile_freq < self.step_end - self.step_start:
            found.append(
                f"profile.profile_freq must be at least step_end - step_start = {self.step_end - self.step_start}, "
                f"the iterations of one trace, found {self.profile_freq}."
            )
        found += too_small(self, "profile.", 1, "timeline_interval")
        if any(rank < 0 for rank in self.ranks) or len(set(self.ranks)) < len(self.ranks):
            found.append(f"profile.ranks must be different ranks, 0 or more, found {list(self.ranks)}.")
        return found


def profile_problems(profile: ProfileConfig, layout: Layout, device: str, *, elastic: bool) -> list[str]:
    """Whether a run on this layout can be traced so. elastic: it may be one that lacks ranks, whose traces are missed
    less than the run would be."""
    found = []
    world_size = layout.world_size
    if profile.traces and not elastic and (missing := [rank for rank in profile.ranks if rank >= world_size]):
        found.append(f"profile.ranks: there is no rank {missing[0]}; the run has {world_size}, counted from 0.")
    if device == "cpu" and profile.traces and not profile.use_pytorch_profiler:
        found.append(
            "profile.use_pytorch_profiler = false is for nsys, which needs GPUs; the device is cpu. Leave it true."
        )
    return found


SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Of a validation set: a part of its metric's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """What the model is judged by while it trains."""

    tasks: tuple[str, ...] = ()
    """Tasks, groups or tags of lm-evaluation-harness, such as "hellaswag", scored on the running model."""

    task_folder: str | None = None
    """Folder with task files (.yaml) of your own, beside those that the harness brings (its --include_path)."""

    interval: int | None = None
    """Iterations between evaluations on eval.tasks. None: only after the last, train.train_iters, or where a callback
    ends the training; not where a run stops to go on later."""

    limit: int | None = None
    """Documents of each task, the first ones. None: all."""

    num_fewshot: int | None = None
    """Examples before each question. None: what the task's file says."""

    validation_sets: Mapping[str, str] = field(default_factory=dict)
    """Held-out text beside the validation split: a table of name = prefix, file or glob, as in data.blend. Each is
    measured every train.eval_interval iterations, as validation_loss/NAME."""

    full_pass: bool = False
    """Measure validation losses on all tokens of the split, and of each set, instead of on train.eval_iters batches
    (Megatron's --full-validation)."""

    by_source: bool = False
    """Measure the validation split of each source of a blend on train.eval_iters batches of its own, beside the
    blend's. False: on the samples that it has among the blend's, which are few, or none, of a small weight."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = too_small(self, "eval.", 1, "interval", "limit") + too_small(self, "eval.", 0, "num_fewshot")
        if not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            found.append("eval.tasks: expected names, each once, found an empty or a repeated one.")
        if self.task_folder == "":
            found.append("eval.task_folder is empty; leave it out for the harness' own tasks.")
        for name, path in self.validation_sets.items():
            if not SET_NAME.fullmatch(name) or not path:
                found.append(
                    f'eval.validation_sets: {name} = "{path}": expected a name of letters, digits, ".", "_" and "-", '
                    "and a prefix, file or glob."
                )
        return found


def validation_problems(config: EvalConfig, data: DataConfig) -> list[str]:
    """Full passes over a validation split that has no end, or one that Megatron's order has no samples for."""
    if not config.full_pass or not has_own_split(config, data):
        return []
    if data.streamed:
        return [
            f"eval.full_pass: the validation split of {data.streamed_by} is not counted before it is read. Name "
            'held-out files in eval.validation_sets and set data.split = "1,0,0", or leave eval.full_pass out.'
        ]
    if data.order == "megatron":
        return [
            'eval.full_pass with data.order = "megatron": its validation samples are counted by train.eval_iters. Name '
            'held-out files in eval.validation_sets and set data.split = "1,0,0", or leave eval.full_pass out.'
        ]
    return []


def has_own_split(config: EvalConfig, data: DataConfig) -> bool:
    """Whether the data's validation split is measured: where it has no weight, named sets can stand in for it."""
    return not config.validation_sets or split_weights(data.split)[1] > 0
