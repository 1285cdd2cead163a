"""Pretrain a GPT.  python pretrain_gpt.py [RECIPE.toml] [--section.field value ...]

The same command runs under torchrun and srun, which start the ranks themselves, and alone, where it starts
``nproc`` local ranks: forked on the CPU, started anew on GPUs.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from parallel import launch, local_ranks, output
from parallel.errors import UserError
from parallel.layout import smallest_world
from training import cli
from training.config import RunConfig
from training.fitting import fit
from training.owner.claim import ATTEMPT, Claim, owned
from training.watch.request import StopRequest


def main() -> int:
    try:
        config = cli.parse(sys.argv[1:])
        if config.dry_run:
            from training import describe

            print(describe.describe(config))
            return 0
        return start(config)
    except UserError as error:
        identity = launch.detect(os.environ)
        # Until ranks start, all processes of a node find the same mistakes: its first one shows them.
        quiet = identity is not None and (identity.local_rank > 0 or not local_ranks.shows(error, identity))
        if not quiet:
            local_ranks.ignore_termination()
        cli.fail(error, quiet)


def start(config: RunConfig) -> int:
    """Find out who starts the ranks, check the configuration, take the run's folder, and train."""
    request = StopRequest()
    request.listen()
    run_dir = Path(config.run_dir or "runs/run")
    identity = launch.detect(os.environ)
    gpus = launch.count_gpus(os.environ) if config.device != "cpu" else 0
    nproc = config.nproc or gpus or smallest_world(config.parallel)
    given = identity.world_size if identity else nproc
    if identity is not None and config.nproc not in (None, given) and identity.rank == 0:
        print(f"nproc = {config.nproc} is ignored: {identity.launcher} started {given} ranks", flush=True)
    expected = replace(config, device="cpu") if config.device == "auto" and not gpus else config
    fitted = fit(expected, given)
    cli.check(fitted.config, fitted.world_size)
    if fitted.words:
        config, nproc = replace(config, parallel=fitted.config.parallel), fitted.world_size
        if identity is None or identity.rank == 0:
            print(fitted.words, flush=True)
        if identity is not None and identity.rank >= nproc:
            return 0  # nothing to do: the others are enough for whole replicas
        identity = replace(identity, world_size=nproc) if identity else None
    output.make_run_dir(run_dir)
    with owned(run_dir, identity, os.environ) as claim:
        return train_ranks(config, run_dir, identity, nproc, claim, request)


def train_ranks(
    config: RunConfig,
    run_dir: Path,
    identity: launch.Identity | None,
    nproc: int,
    claim: Claim | None,
    request: StopRequest,
) -> int:
    """Prepare the data and train: on this rank, or, when nobody has started ranks yet, on ``nproc`` local ones."""
    device = launch.choose_device(config.device, os.environ)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: what was asked to run on the CPU sees no GPU
    if identity is None and nproc > 1 and device == "cuda":
        environ = {**os.environ, ATTEMPT: claim.attempt} if claim else os.environ
        return local_ranks.spawn_ranks(nproc, [sys.executable, *sys.argv], environ)

    from training.preparing import prepare  # numpy loads only now, torch and Megatron only after the data is ready

    prepared = prepare(config, identity)
    with output.own_output(run_dir / "logs", identity or launch.Identity(), every_rank=False):
        from training.job import train

    def run(rank: launch.Identity) -> int:
        launch.set_rendezvous(os.environ, rank)  # type: ignore[arg-type]
        with output.own_output(run_dir / "logs", rank, config.log.ranks == "all") as console_fd:
            return train(config, prepared, rank, device, run_dir, console_fd, claim, request)

    if identity is None and nproc > 1:
        code, failure = local_ranks.fork_ranks(nproc, run)
    else:
        code, failure = local_ranks.guard(run, identity or launch.Identity())
    if failure is not None and (identity is None or not failure.echo):
        local_ranks.report(failure, run_dir / "logs", nproc if identity is None else identity.world_size)
    return code


if __name__ == "__main__":
    sys.exit(main())
