"""Faults inside a run's ranks, by a callback among its own; and what the run leaves."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runs
from data.prepared import Prepared
from parallel.ddp import Chunks, unwrap
from parallel.failures import Failure
from parallel.groups import Ranks
from training import loop
from training.health.names import parameter_names
from training.parts import companions
from training.progress import Progress
from training.step import RankParts, StepResult

PLAIN = ("--train.eval_interval", "None", "--checkpoint.save_interval", "2", "--train.micro_batch_size", "1")


@dataclasses.dataclass
class Rank(loop.Callback):
    """What a fault can get at; ``iteration`` is the one that runs or, after a step, that has run."""

    chunks: Chunks
    optimizer: Any
    ranks: Ranks
    iteration: int = 0

    def before_step(self, progress: Progress) -> None:
        self.iteration = progress.iteration + 1

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """After the update."""

    def module(self, path: str) -> nn.Module:
        """Of the rank's only chunk."""
        return unwrap(self.chunks[0]).get_submodule(path)

    def parameter(self, name: str) -> Tensor:
        """By its canonical name."""
        return next(param for param, own in parameter_names(self.chunks).items() if own == name)


def inject(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Chunks, Any, Ranks], loop.Callback]) -> None:
    """From now on each run has ``fault`` among its callbacks."""
    build_health = companions.build_health

    def with_fault(parts: RankParts, *rest: Any) -> Any:
        health = build_health(parts, *rest)
        return dataclasses.replace(
            health, callbacks=[*health.callbacks, fault(parts.chunks, parts.optimizer, parts.ranks)]
        )

    monkeypatch.setattr(companions, "build_health", with_fault)


def run(prepared: Prepared, run_dir: Path, world_size: int, *flags: str) -> tuple[int, Failure | None]:
    """Train, with whatever was injected."""
    return runs.train_or_fail(prepared, runs.configuration(run_dir, *PLAIN, *flags), world_size)


def tensors(run_dir: Path, iteration: int) -> dict[str, Any]:
    """The hashes of all that a checkpoint holds of each tensor: equal ones are equal bits, generators' included.

    But for Python's own random numbers, which a forked process seeds again.
    """
    folder = run_dir / "checkpoints" / f"iter_{iteration:07d}"
    pieces = (folder / "pieces.jsonl").read_bytes()
    found = {}
    for name, entry in json.loads((folder / "index.json").read_text())["tensors"].items():
        start, length, which = entry["pieces"]
        if name != "rng.python":
            found[name] = [(piece[2:4], piece[4][which]) for piece in json.loads(pieces[start : start + length])]
    assert len(found) > 20
    return found


def to_nan(tensor: Tensor) -> Tensor:
    """The same with one NaN."""
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    mask.view(-1)[3] = True
    return tensor.masked_fill(mask, float("nan"))
