"""What one rank runs, wherever it was started. No torch here: it loads once the data is ready."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from parallel import launch, output
from training import imports
from training.config import RunConfig
from training.owner.claim import Claim
from training.watch.pulse import Pulse
from training.watch.request import StopRequest


def prepared_run(
    config: RunConfig,
    run_dir: Path,
    identity: launch.Identity | None,
    claim: Claim | None,
    request: StopRequest,
    pulse: Pulse | None = None,
) -> Callable[[Pulse, launch.Identity], int]:
    """What a rank runs, with its pulse, once tokenizer, data, torch and Megatron are ready: forked ranks share them."""
    device = launch.choose_device(config.device, os.environ)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: what was asked to run on the CPU sees no GPU
    from training.preparing import prepare  # numpy loads only now, torch and Megatron only after the data is ready

    if pulse is not None:
        pulse.enter("data")
    prepared = prepare(config, identity)
    with output.own_output(run_dir / "logs", identity or launch.Identity(), every_rank=False), imports.lean(device):
        from parallel.cpu import mcore_spots
        from training.job import train

        with contextlib.suppress(RuntimeError):  # which each rank will meet, and report
            mcore_spots.check_once()

    def run(pulse: Pulse, rank: launch.Identity) -> int:
        launch.set_rendezvous(os.environ, rank)  # type: ignore[arg-type]
        with output.own_output(run_dir / "logs", rank, config.log.ranks == "all") as console_fd:
            return train(config, prepared, rank, device, run_dir, console_fd, claim, request, pulse)

    return run
