"""A trace by nsys, which watches the process from outside: CUDA's profiler calls, and NVTX ranges.

``nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat -t cuda,nvtx ... pretrain_gpt.py RECIPE``
records what lies between ``cudaProfilerStart`` and ``cudaProfilerStop``.
"""

from pathlib import Path

import torch

from training.config.profile_config import ProfileConfig
from training.profile.range_names import iteration_name
from training.profile.ranges import StepRanges


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
