"""What the parts of a run are built from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.prepared import Prepared
from models.shapes import GPTShape
from parallel.groups import Ranks
from training.config.run_config import RunConfig
from training.evaluation.tasks import PreparedTasks
from training.run_dir.history import Note
from training.run_lock.lock import RunLock
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal


@dataclass(kw_only=True, slots=True, frozen=True)
class PreparedRun:
    """What is ready when ranks begin, and the same for all of a node."""

    config: RunConfig
    prepared: Prepared
    device: Literal["cpu", "cuda"]
    run_dir: Path
    stop: StopSignal = field(default_factory=StopSignal)
    """Hears the signals that ask to stop, if it listens."""
    lock: RunLock | None = None
    """On rank 0, the right to write into ``run_dir``; None where no other run can."""
    recipe: RunConfig | None = None
    """With ``[[stage]]``, where ``config`` is that of one stage."""
    tasks: PreparedTasks | None = None
    """Those of ``eval.tasks``, on rank 0."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingRun(PreparedRun):
    """What the parts of one rank's run are built from. ``config`` has this card's fp8 recipe by now."""

    shape: GPTShape
    ranks: Ranks
    heartbeat: Heartbeat
    note: Note
    """Keeps an event in ``run_dir``'s history, on rank 0."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether a signal has asked this rank."""
        return self.stop.number is not None
