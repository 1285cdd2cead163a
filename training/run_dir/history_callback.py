"""The callback that keeps a start's events in history.jsonl, and says in each line of metrics how much time counted."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from parallel.groups import Ranks
from parallel.launch import node_name
from training.config.stage_config import Begin
from training.loop import Callback, Reason
from training.progress import Progress
from training.run_dir import fingerprint
from training.run_dir.goodput import measured_goodput
from training.run_dir.history import Note, read_history
from training.step import StepResult


class HistoryCallback(Callback):
    """Before evaluations and saves. Also a meter: ``restarts`` and ``goodput``, by rank 0 alone."""

    def __init__(
        self,
        run_dir: Path,
        note: Note,
        evaluated_s: Callable[[], float],
        ranks: Ranks,
        trunk: str | None,
        stage: Begin | None = None,
    ) -> None:
        """stage: the run's. evaluated_s: the seconds that evaluations have taken so far in this process. trunk: the
        checkpoint of another run at which this one branches off now."""
        self.trunk, self.stage = trunk, stage
        self.run_dir, self.note, self.evaluated_s, self.ranks = run_dir, note, evaluated_s, ranks
        self.stalled_s, self.evaluated_before_s = 0.0, 0.0
        self.first_step_s: float | None = None
        self.restarts, self.productive_before_s, self.wall_before_s, self.began_s = 0, 0.0, 0.0, time.monotonic()

    def start(self, progress: Progress) -> None:
        if self.trunk is not None:
            self.note("branched", progress.iteration, text=f"from {self.trunk}")
        if self.stage is not None and progress.iteration == self.stage.first.iteration:
            self.note("stage", progress.iteration, text=self.stage.title, name=self.stage.first.name)
        self.note("begin", progress.iteration, **facts(self.ranks))
        if self.ranks.rank == 0:
            before = measured_goodput(read_history(self.run_dir), now_s=time.time())
            self.restarts, self.wall_before_s = before.restarts, before.wall_s
            self.productive_before_s = before.seconds("productive")
        self.began_s = time.monotonic()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.first_step_s is None:
            self.first_step_s, self.evaluated_before_s = time.monotonic(), self.evaluated_s()
            self.note("first_step", progress.iteration)

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.stalled_s += stall_s
        self.note("save", progress.iteration, seconds=round(stall_s, 3))

    def stop(self, progress: Progress, reason: Reason) -> None:
        self.note("stop", progress.iteration, reason=reason)

    def report(self) -> Mapping[str, float]:
        """Of all starts until now."""
        if self.ranks.rank != 0:
            return {}
        now_s, productive_s = time.monotonic(), self.productive_before_s
        if self.first_step_s is not None:
            evaluated_s = self.evaluated_s() - self.evaluated_before_s
            productive_s += now_s - self.first_step_s - self.stalled_s - evaluated_s
        wall_s = self.wall_before_s + now_s - self.began_s
        return {"restarts": self.restarts, "goodput": max(0.0, productive_s) / max(wall_s, 1e-9)}


class EvaluationNotes(Callback):
    """Behind the evaluations, also those that follow the last save: keeps how long each took, as it ends."""

    def __init__(self, note: Note, evaluated_s: Callable[[], float]) -> None:
        """evaluated_s: the seconds that evaluations have taken so far in this process."""
        self.note, self.evaluated_s, self.noted_s = note, evaluated_s, 0.0

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self._note(progress)

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self._note(progress)

    def _note(self, progress: Progress) -> None:
        spent_s = self.evaluated_s() - self.noted_s
        if spent_s:
            self.noted_s += spent_s
            self.note("evaluation", progress.iteration, seconds=round(spent_s, 3))


def facts(ranks: Ranks) -> dict[str, object]:
    """Where and by what a start trains."""
    cuda, identity = ranks.device.type == "cuda", ranks.identity
    return {
        "layout": str(ranks.layout),
        "world_size": identity.world_size,
        "nodes": identity.world_size // identity.local_world_size,
        "host": node_name(os.environ),
        "device": torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
        "versions": {
            **{name: fingerprint.version(name) for name in fingerprint.LIBRARIES},
            "python": platform.python_version(),
            "triplane": fingerprint.code_digest()[:12],
        },
    }
