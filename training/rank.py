"""What one rank runs, wherever it was started. No torch here: it loads once the data is ready."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from parallel import launch, output
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
    own_output = output.own_output(run_dir / "logs", identity or launch.Identity(), every_rank=False)
    with own_output, kept_for_good(), as_device_needs(device):
        from training.job import train

    def run(pulse: Pulse, rank: launch.Identity) -> int:
        launch.set_rendezvous(os.environ, rank)  # type: ignore[arg-type]
        with output.own_output(run_dir / "logs", rank, config.log.ranks == "all") as console_fd:
            return train(config, prepared, rank, device, run_dir, console_fd, claim, request, pulse)

    return run


def as_device_needs(device: str) -> contextlib.AbstractContextManager[None]:
    """How Megatron is to be imported: on the CPU, without the compiler of its fused functions."""
    if device != "cpu":
        return contextlib.nullcontext()
    from parallel.cpu.eager import eager_imports

    return eager_imports()


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """What is imported here stays: the collector of garbage passes it by, now, in every step and at the end.

    Some 480,000 objects of torch and Megatron (gc.get_freeze_count). A collection would also touch, and so copy, the
    memory that forked ranks share. `time python pretrain_gpt.py slurm/recipes/debug.toml --nproc 2 --train.train_iters
    4` took 10.9 and 12.1 s of user time with it, 15.2 and 14.0 s without, in turns (2 busy cores, 2026-11-21).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
