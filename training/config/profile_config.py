"""The ``profile`` section of a recipe."""

from dataclasses import dataclass

from parallel.layout import Layout

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

    trace_limit_mib: int = 1024
    """MiB of compressed traces of each rank that are kept in RUN_DIR/profile; older ones go first."""

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
        for name in ("timeline_interval", "trace_limit_mib"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"profile.{name} must be 1 or more, found {value}.")
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
