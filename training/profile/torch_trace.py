"""A trace by torch.profiler: a Chrome trace of everything that a rank's host and GPU do in a few iterations."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel.groups import Ranks
from training.config.profile_config import ProfileConfig
from training.profile.range_names import iteration_name
from training.profile.ranges import StepRanges


class TraceRanges:
    """Ranges as annotations of a trace."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def push(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


class TorchTrace:
    """One trace of this rank."""

    def __init__(self, config: ProfileConfig, steps: StepRanges, ranks: Ranks) -> None:
        self.config, self.steps, self.ranks = config, steps, ranks
        self._profiler: profile | None = None
        self._ranges = TraceRanges()

    def prepare(self) -> None:
        """What takes a second, before an iteration that counts: torch.profiler loads CUPTI on a GPU."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says in the log, as an error, that a CPU is no GPU
        activities = [ProfilerActivity.CPU]
        if self.ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
        )
        self._profiler.prepare_trace()

    def begin(self) -> None:
        """Events are kept from here on."""
        assert self._profiler is not None
        self.steps.add(self._ranges)
        self._profiler.start_trace()

    def begin_iteration(self, iteration: int) -> None:
        """What follows belongs to it."""
        self._ranges.push(iteration_name(iteration))

    def end_iteration(self) -> None:
        """Until here."""
        self._ranges.pop()

    def end(self, path: Path) -> None:
        """Write the trace, uncompressed. Raises OSError."""
        assert self._profiler is not None
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()  # kernels that run now belong to the last iteration
        self._profiler.stop_trace()
        self.steps.remove(self._ranges)
        profiler, self._profiler = self._profiler, None
        profiler.export_chrome_trace(str(path))
