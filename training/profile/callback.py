"""When a trace begins and ends, and on which ranks; by torch.profiler, whose Chrome trace has everything that a rank's
host and GPU do in a few iterations, or by nsys, which watches the process from outside.

``nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat -t cuda,nvtx ... pretrain_gpt.py RECIPE``
records what lies between ``cudaProfilerStart`` and ``cudaProfilerStop``, with NVTX ranges.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel.groups import Ranks
from training.config.small_sections import ProfileConfig
from training.loop import Callback
from training.profile.files import part_path, trace_folder, trace_name
from training.profile.memory_snapshot import file_name, write_snapshot
from training.profile.range_names import iteration_name
from training.profile.ranges import StepRanges
from training.profile.summary_job import SummaryJobs
from training.progress import Progress
from training.step import StepResult


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


class NvtxRanges:
    """Ranges as nsys shows them."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class NsysTrace:
    """One trace of this rank, written by nsys."""

    def __init__(self, config: ProfileConfig, steps: StepRanges) -> None:
        self.config, self.steps = config, steps
        self._ranges = NvtxRanges()
        self._operators = torch.autograd.profiler.emit_nvtx(record_shapes=config.pytorch_profiler_collect_shapes)

    def prepare(self) -> None:
        """Nothing to do."""

    def begin(self) -> None:
        """nsys records from here on; every operator is a range, as with Megatron's --profile."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStart()))
        self._operators.__enter__()
        if self.config.nvtx_ranges:
            self.steps.add(self._ranges)

    def begin_iteration(self, iteration: int) -> None:
        """What follows belongs to it."""
        self._ranges.push(iteration_name(iteration))

    def end_iteration(self) -> None:
        """Until here."""
        self._ranges.pop()

    def end(self, path: Path) -> None:
        """Nothing is left at ``path``: the trace is where nsys was asked to write it."""
        torch.cuda.synchronize()
        if self.config.nvtx_ranges:
            self.steps.remove(self._ranges)
        self._operators.__exit__(None, None, None)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStop()))


Tracer = TorchTrace | NsysTrace


class ProfileCallback(Callback):
    """Traces the iterations that ``profile`` asks for, on this rank if it is one of ``profile.ranks``.

    To stand behind the recorder of metrics, so that writing a trace does not count as an iteration's time.
    """

    def __init__(
        self, config: ProfileConfig, run_dir: Path, steps: StepRanges, ranks: Ranks, beat: Callable[[], None]
    ) -> None:
        self.config, self.run_dir, self.steps, self.ranks, self.beat = config, run_dir, steps, ranks, beat
        world_size = ranks.identity.world_size
        traced = [rank for rank in config.ranks if rank < world_size]
        self.is_traced = ranks.rank in traced
        self.jobs = SummaryJobs()
        self.number: int | None = None
        """Of the trace that the next iteration belongs to, the same on all ranks."""
        self.trace: Tracer | None = None
        """This rank's part in it."""
        self.begun = False
        """It has begun, on the ranks that are traced."""
        if missing := sorted(set(config.ranks) - set(traced)):
            ranks.say(f"warning: profile.ranks: there is no rank {missing[0]} among {world_size}: it is not traced")

    def start(self, progress: Progress) -> None:
        self._prepare(self.config.trace_number(progress.iteration))

    def before_step(self, progress: Progress) -> None:
        begins, self.begun = not self.begun, self.number is not None
        if self.trace is not None:
            if begins:
                self.trace.begin()
            self.trace.begin_iteration(progress.iteration + 1)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.trace is not None:
            self.trace.end_iteration()
        coming = self.config.trace_number(progress.iteration)
        if coming != self.number:
            self._end(progress)
            self._prepare(coming)
        self.jobs.poll()

    def stop(self, progress: Progress, reason: str) -> None:
        self._end(progress)
        if reason != "requested":  # whoever asks a run to stop does not wait for summaries
            self.jobs.finish(self.beat)

    def _prepare(self, number: int | None) -> None:
        """For the next iteration, which belongs to trace ``number``."""
        self.number = number
        if number is not None and self.is_traced:
            if self.config.use_pytorch_profiler:
                self.trace = TorchTrace(self.config, self.steps, self.ranks)
            else:
                self.trace = NsysTrace(self.config, self.steps)
            self.trace.prepare()

    def _end(self, progress: Progress) -> None:
        """Of the trace that is on, if one is. A disk that takes no trace ends no training."""
        folder = trace_folder(self.run_dir, progress.iteration)
        trace, begun = self.trace, self.begun
        self.trace, self.number, self.begun = None, None, False
        if trace is None or not begun:  # the run has ended before its first iteration
            return
        try:
            self._write(trace, folder)
        except OSError as error:
            print(f"profile: rank {self.ranks.rank}: no trace in {folder}: {error}", file=sys.stderr)

    def _write(self, trace: Tracer, folder: Path) -> None:
        began_s, by_torch = time.monotonic(), self.config.use_pytorch_profiler
        snapshot = self.config.record_memory_history and self.ranks.device.type == "cuda"
        if by_torch or snapshot:
            folder.mkdir(parents=True, exist_ok=True)
            part_path(folder, self.ranks.rank).unlink(missing_ok=True)  # of an earlier start
        path = folder / trace_name(self.ranks.rank)
        trace.end(path)
        if by_torch:
            self.jobs.start(path, self.ranks.device.type)
        if snapshot:
            write_snapshot(folder / file_name(self.ranks.rank))
        where, stall_s = f"into {folder}" if by_torch else "for nsys", time.monotonic() - began_s
        self.ranks.say(f"profile: traced {where}; training stood still for {stall_s:.2f} s")
