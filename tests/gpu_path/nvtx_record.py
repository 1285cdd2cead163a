"""A hook: calls of CUDA's profiler and of NVTX, in their order. ``nvtx-RANK.txt`` in the folder EMULATED_CUDA_NVTX."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def noted(text: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls it, too."""

    def call(*args: Any) -> Any:
        with Path(os.environ["EMULATED_CUDA_NVTX"], f"nvtx-{os.environ['RANK']}.txt").open("a") as file:
            file.write(text(*args) + "\n")
        return function(*args)

    return call


class Runtime:
    """torch.cuda.cudart's, which is there once a rank uses its device."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.cudaProfilerStart = noted(lambda: "start", runtime.cudaProfilerStart)
        self.cudaProfilerStop = noted(lambda: "stop", runtime.cudaProfilerStop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)


cudart = torch.cuda.cudart
torch.cuda.cudart = lambda: Runtime(cudart())
torch.cuda.nvtx.range_push = noted("push {}".format, torch.cuda.nvtx.range_push)
torch.cuda.nvtx.range_pop = noted(lambda: "pop", torch.cuda.nvtx.range_pop)
