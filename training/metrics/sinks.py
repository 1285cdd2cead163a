"""Where a logged iteration's numbers go. Opened and written on rank 0 only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from training.config.log_config import LogConfig
from training.metrics.background import BackgroundSink, Sink
from training.metrics.console import ConsoleSink
from training.metrics.jsonl import JsonlSink
from training.metrics.prometheus import PrometheusSink, RunCollector
from training.metrics.trackers import MlflowSink, TensorBoardSink, WandbSink
from training.metrics.values import Values


@dataclass(kw_only=True, slots=True, frozen=True)
class RunFacts:
    """What sinks need to know of a run."""

    train_iters: int
    resumed_iteration: int = 0
    """The last iteration that was restored, 0 at a fresh start."""
    world_size: int = 1
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved sections as plain dicts; services get it redacted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sinks:
    """All sinks of a run, as one."""

    sinks: tuple[Sink, ...]

    def write(self, iteration: int, values: Values) -> None:
        """Hand plain numbers to every sink. The caller leaves out what it does not have."""
        for sink in self.sinks:
            sink.write(iteration, values)

    def close(self) -> None:
        """Close every sink; those in the background side by side."""
        for sink in self.sinks:
            if isinstance(sink, BackgroundSink):
                sink.end()
        for sink in self.sinks:
            sink.close()


def open_sinks(
    run_dir: Path,
    log: LogConfig,
    facts: RunFacts,
    console: Callable[[str], None],
    beat: Callable[[], None] = lambda: None,
) -> Sinks:
    """The sinks that ``log`` asks for, in ``run_dir``, which must exist; for rank 0 only.

    ``console`` prints one line, from other threads too; ``beat`` is called while the end waits for uploads. Raises
    OSError where metrics.jsonl cannot be opened. Nothing that fails later ends training, and what is in the background
    cannot delay it.
    """
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", console), ConsoleSink(console, facts.train_iters)]
    for name, open_inner in in_background(run_dir, log, facts, console):
        sinks.append(BackgroundSink(name, open_inner, console, beat=beat))
    return Sinks(sinks=tuple(sinks))


def in_background(
    run_dir: Path, log: LogConfig, facts: RunFacts, console: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], Sink]]]:
    """Name and opener of each sink that may be slow, hang or fail."""
    if log.tensorboard:
        yield "TensorBoard", partial(TensorBoardSink, run_dir / "events", facts.resumed_iteration, log.names)
    if (mode := log.wandb) != "off":
        yield (
            "wandb",
            partial(WandbSink, run_dir, mode, log.wandb_project, log.wandb_name, facts.config, log.names, console),
        )
    if log.mlflow != "off":
        yield (
            "MLflow",
            partial(
                MlflowSink, run_dir, log.mlflow, log.mlflow_experiment, facts.config, log.names,
                facts.train_iters, facts.resumed_iteration, console,
            ),
        )  # fmt: skip
    if log.prometheus != "off":
        name = run_dir.resolve().name
        collector = RunCollector(name, facts.world_size, facts.train_iters, facts.resumed_iteration)
        yield "Prometheus", partial(PrometheusSink, run_dir, collector, log.endpoint, console)
