"""What one rank runs, wherever it was started. torch loads once the data is ready."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel import cuda_environment, launch, lean_imports, output
from training.config.run_config import RunConfig
from training.custom.check import check
from training.run_lock.lock import RunLock
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal


@dataclass(kw_only=True, slots=True, frozen=True)
class RunStart:
    """One start of a run: of what, where, and on which ranks."""

    config: RunConfig
    run_dir: Path
    identity: launch.Identity | None
    """This rank; None: no launcher has started ranks, this process does."""
    nproc: int
    """Local ranks to start."""
    lock: RunLock | None
    stop: StopSignal
    recipe: RunConfig | None = None
    """With ``[[stage]]``, where ``config`` is that of one stage."""
    later: tuple[RunConfig, ...] = ()
    """Stages that follow, whose data is made ready too."""

    @property
    def on_gpus(self) -> bool:
        """Unless they turn out to be unusable."""
        return self.config.device != "cpu" and launch.count_gpus(os.environ) > 0

    @property
    def rank(self) -> launch.Identity:
        """This one, or the first of the local ones."""
        return self.identity or launch.Identity(world_size=self.nproc)


def prepared_run(start: RunStart, heartbeat: Heartbeat | None = None) -> Callable[[Heartbeat, launch.Identity], int]:
    """What a rank runs once tokenizer, data, torch and Megatron are ready, which forked ranks share."""
    config, run_dir, identity = start.config, start.run_dir, start.identity
    if start.on_gpus:
        cuda_environment.prepare(
            os.environ, config.parallel, config.kernels.graphs, config.train.deterministic_mode,
            bool(config.train.offload_modules),
        )  # fmt: skip
    device = launch.choose_device(config.device, os.environ)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: what was asked to run on the CPU sees no GPU
    check(config, device, run_dir / "logs")
    from training.checkpoint.converting import with_converted
    from training.start.prepare import (
        prepare,
        prepare_eval_tasks,
        prepare_later,
    )  # numpy loads now, torch and Megatron after the data

    if heartbeat is not None:
        heartbeat.enter("data")
    config = with_converted(config, run_dir, identity)
    tasks = prepare_eval_tasks(config, identity)
    prepared = prepare(config, identity)
    prepare_later(start.later, identity)
    with (
        output.own_output(run_dir / "logs", identity or launch.Identity(), every_rank=False),
        lean_imports.lean(device),
    ):
        from parallel import mcore_patches
        from training.parts.run import PreparedRun
        from training.train import train

        with contextlib.suppress(RuntimeError):  # which each rank will meet, and report
            mcore_patches.check_once()

    ready = PreparedRun(
        config=config, prepared=prepared, device=device, run_dir=run_dir, stop=start.stop, lock=start.lock,
        recipe=start.recipe, tasks=tasks,
    )  # fmt: skip

    def run(heartbeat: Heartbeat, rank: launch.Identity) -> int:
        start.stop.speaks = rank.rank == 0
        launch.set_rendezvous(os.environ, rank)  # type: ignore[arg-type]
        with output.own_output(run_dir / "logs", rank, config.log.ranks == "all") as console_fd:
            return train(ready, rank, heartbeat, console_fd)

    return run
