"""A hook: what goes wrong in a run, in iteration 2 on rank 1. EMULATED_CUDA_FAULT names it."""

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.ddp import Chunks, unwrap
from tests.support.waiting import until
from training import loop
from training.parts import companions
from training.progress import Progress
from training.step import RankParts

ITERATION = 2


class NanOnce(loop.Callback):
    """One element of what a layer's MLP puts out in one microbatch, as if a bit had flipped."""

    def __init__(self, chunks: Chunks, run_dir: Path) -> None:
        self.due = False
        unwrap(chunks[0]).get_submodule("decoder.layers.3.mlp").register_forward_hook(self.spoil)

    def before_step(self, progress: Progress) -> None:
        self.due = progress.iteration + 1 == ITERATION

    def spoil(self, _module: nn.Module, _inputs: object, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not self.due:
            return outputs
        self.due = False
        mask = torch.zeros_like(outputs[0], dtype=torch.bool)
        mask.view(-1)[3] = True
        return outputs[0].masked_fill(mask, float("nan")), outputs[1]


class InfiniteWeight(loop.Callback):
    """An Inf in this rank's part of the optimizer's fp32 weights."""

    def __init__(self, chunks: Chunks, run_dir: Path) -> None:
        params = unwrap(chunks[0]).named_parameters()
        self.parts = [param.main_param for name, param in params if name.endswith("linear_fc1.weight")]

    def before_step(self, progress: Progress) -> None:
        if progress.iteration + 1 == ITERATION:
            next(part for part in self.parts if part is not None)[3] = float("inf")


class Killed(loop.Callback):
    """By SIGKILL, once a checkpoint is complete: an iteration later, in which its writers are heard."""

    def __init__(self, chunks: Chunks, run_dir: Path) -> None:
        self.run_dir = run_dir

    def before_step(self, progress: Progress) -> None:
        if progress.iteration == ITERATION:
            until((self.run_dir / "checkpoints/latest").exists)
            os.kill(os.getpid(), signal.SIGKILL)


class MemoryRunsOut(loop.Callback):
    """For an allocation that the program can do without: 1 TiB."""

    def __init__(self, chunks: Chunks, run_dir: Path) -> None:
        pass

    def before_step(self, progress: Progress) -> None:
        if progress.iteration + 1 == ITERATION:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


FAULTS = {fault.__name__: fault for fault in (NanOnce, InfiniteWeight, Killed, MemoryRunsOut)}
build_health = companions.build_health


def with_fault(parts: RankParts, run_dir: Path, *rest: Any) -> Any:
    """In place of training.parts.companions'."""
    health = build_health(parts, run_dir, *rest)
    if parts.ranks.rank != 1:
        return health
    fault = FAULTS[os.environ["EMULATED_CUDA_FAULT"]](parts.chunks, run_dir)
    return dataclasses.replace(health, callbacks=[*health.callbacks, fault])


companions.build_health = with_fault  # type: ignore[assignment]
