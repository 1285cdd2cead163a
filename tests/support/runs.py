"""Train a recipe as ``pretrain_gpt.py`` does, on forked ranks of the test's own process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepared import Prepared
from parallel import failures, launch, local_ranks, output
from training import train as one_run
from training.cli import parse
from training.config.run_config import RunConfig
from training.evaluation.tasks import PreparedTasks
from training.metrics.jsonl import read_jsonl
from training.parts.run import PreparedRun
from training.run_lock.lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ROOT / "slurm/recipes/debug.toml"


def configuration(run_dir: Path, *flags: str, recipe: Path = DEBUG) -> RunConfig:
    """The debug recipe with flags over it: no helper processes, and half its microbatches."""
    plain = ("--log.tensorboard", "False", "--checkpoint.async_save", "False", "--train.micro_batch_size", "2")
    return parse.parse_config([str(recipe), "--run_dir", str(run_dir), *plain, *flags])


def train(
    prepared: Prepared,
    config: RunConfig,
    world_size: int,
    lock: RunLock | None = None,
    tasks: PreparedTasks | None = None,
) -> list[dict[str, Any]]:
    """Train; the run's ``metrics.jsonl``. A failing rank fails the test with its traceback."""
    code, failure = train_or_fail(prepared, config, world_size, lock, tasks)
    assert failure is None, failure.text
    assert code == 0
    return read_jsonl(Path(config.run_dir or "") / "metrics.jsonl")


def train_or_fail(
    prepared: Prepared,
    config: RunConfig,
    world_size: int,
    lock: RunLock | None = None,
    tasks: PreparedTasks | None = None,
) -> tuple[int, failures.Failure | None]:
    """Train; the exit code, and the failure that came first."""
    parse.check(config, world_size)
    run_dir = Path(config.run_dir or "")
    output.make_run_dir(run_dir)

    ready = PreparedRun(config=config, prepared=prepared, device="cpu", run_dir=run_dir, lock=lock, tasks=tasks)

    def rank(identity: launch.Identity) -> int:
        with output.own_output(run_dir / "logs", identity, every_rank=False) as console_fd:
            return one_run.train(ready, identity, console_fd=console_fd)

    return local_ranks.fork_ranks(world_size, rank)


def losses(metrics: Sequence[dict[str, Any]]) -> list[float]:
    """Training losses, iteration by iteration."""
    return [line["loss"] for line in metrics if "loss" in line]
