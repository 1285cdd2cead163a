"""A trace by nsys, which watches the process from outside: CUDA's profiler calls, and NVTX ranges.

``nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat -t cuda,nvtx ... pretrain_gpt.py RECIPE``
records what lies between ``cudaProfilerStart`` and ``cudaProfilerStop``.
"""

import contextlib
from pathlib import Path

import torch

from parallel.ddp import Chunks
from training.config.profile_config import ProfileConfig
from training.profile.range_names import iteration_name
from training.profile.ranges import record_ranges


class NvtxRanges:
    """Ranges as nsys shows them."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class NsysTrace:
    """One trace of this rank, written by nsys."""

    def __init__(self, config: ProfileConfig, chunks: Chunks) -> None:
        self.config, self.chunks = config, chunks
        self._installed = contextlib.ExitStack()
        self._ranges = NvtxRanges()

    def prepare(self) -> None:
        """Nothing to do."""

    def begin(self) -> None:
        """nsys records from here on; every operator is a range, as with Megatron's --profile."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStart()))
        self._installed.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=self._with_shapes))
        if self.config.nvtx_ranges:
            self._installed.enter_context(record_ranges(self._ranges, self.chunks, layers=True))

    def begin_iteration(self, iteration: int) -> None:
        """What follows belongs to it."""
        self._ranges.push(iteration_name(iteration))

    def end_iteration(self) -> None:
        """Until here."""
        self._ranges.pop()

    def end(self, path: Path) -> None:
        """Nothing is left at ``path``: the trace is where nsys was asked to write it."""
        torch.cuda.synchronize()
        self._installed.close()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaProfilerStop()))

    @property
    def _with_shapes(self) -> bool:
        return self.config.pytorch_profiler_collect_shapes
