"""Where a logged iteration's numbers go. Opened and written on rank 0 only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from training.metrics.background import BackgroundSink
from training.metrics.console import ConsoleSink
from training.metrics.jsonl import JsonlSink
from training.metrics.tensorboard import TensorBoardSink
from training.metrics.values import Values
from training.metrics.wandb import WandbSink


class Sink(Protocol):
    """Somewhere a logged iteration's numbers go."""

    def write(self, iteration: int, values: Values) -> None:
        """Take the numbers of ``iteration``, by their key in metrics.jsonl (docs/metrics.md)."""
        ...

    def close(self) -> None:
        """Bring what was written to where it belongs; no write follows."""
        ...


class LogSettings(Protocol):
    """What is read of the configuration's ``log`` section."""

    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> Literal["off", "offline", "online"]: ...
    @property
    def wandb_project(self) -> str: ...
    @property
    def wandb_name(self) -> str | None: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Sinks:
    """All sinks of a run, as one."""

    sinks: tuple[Sink, ...]

    def write(self, iteration: int, values: Values) -> None:
        """Hand plain numbers to every sink. The caller leaves out what it does not have."""
        for sink in self.sinks:
            sink.write(iteration, values)

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()


def open_sinks(
    run_dir: Path,
    log: LogSettings,
    config: Mapping[str, object],
    train_iters: int,
    resumed_iteration: int,
    console: Callable[[str], None],
    beat: Callable[[], None] = lambda: None,
) -> Sinks:
    """The sinks that ``log`` asks for, in ``run_dir``, which must exist; for rank 0 only.

    ``config`` (the resolved sections as plain dicts) goes to wandb, redacted. ``resumed_iteration`` is the
    last iteration that was restored, 0 at a fresh start. ``console`` prints one line, from other threads too; ``beat``
    is called while the end waits for uploads. Raises OSError where metrics.jsonl cannot be opened. Nothing that fails
    later ends training, and TensorBoard and wandb cannot delay it.
    """
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", console), ConsoleSink(console, train_iters)]
    if log.tensorboard:
        events = run_dir / "events"
        sinks.append(
            BackgroundSink("TensorBoard", lambda: TensorBoardSink(events, resumed_iteration), console, beat=beat)
        )
    mode = log.wandb
    if mode != "off":
        project, name = log.wandb_project, log.wandb_name
        upload = partial(WandbSink, run_dir, mode, project, name, config, console)
        sinks.append(BackgroundSink("wandb", upload, console, beat=beat))
    return Sinks(sinks=tuple(sinks))
