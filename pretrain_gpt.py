"""Pretrain a GPT.  python pretrain_gpt.py [RECIPE.toml] [--section.field value ...]

The same command runs under torchrun and srun, which start the ranks themselves, and alone, where it starts
``nproc`` local ranks: forked on the CPU, started anew on GPUs.
"""

import contextlib
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallel import launch, local_ranks, output
from parallel.errors import SharedFault, UserError
from parallel.layout import smallest_world
from training import cli
from training.config import RunConfig
from training.exit_note import exit_note
from training.fitting import fit
from training.owner.claim import ATTEMPT, Claim, owned
from training.rank import prepared_run
from training.watch import record, starts
from training.watch.request import StopRequest
from training.watch.watched import Watch, watched


def main() -> int:
    try:
        config = cli.parse(sys.argv[1:])
        if config.dry_run:
            from training import describe

            print(describe.describe(config))
            return 0
        return start(config)
    except SharedFault as fault:  # the run's folder does not answer; what ranks raise, local_ranks.guard has caught
        print(f"pretrain_gpt.py: {fault}", file=sys.stderr, flush=True)
        return 1
    except UserError as error:
        identity = launch.detect(os.environ)
        # Until ranks start, all processes of a node find the same mistakes: its first one shows them.
        quiet = identity is not None and (identity.local_rank > 0 or not local_ranks.shows(error, identity))
        if not quiet:
            local_ranks.ignore_termination()
        cli.fail(error, quiet)


def start(config: RunConfig) -> int:
    """Find out who starts the ranks, check the configuration, take the run's folder, and train."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks have sessions of their own, and would survive its kill
        local_ranks.die_with_parent(os.getppid())
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
    cli.check(fitted.config, fitted.world_size, identity.local_world_size if identity else None)
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
    """Prepare the data and train: on this rank, or, when nobody has started ranks yet, on ``nproc`` local ones.

    A rank that somebody else has started is watched from here on, through imports and data; local ones once they exist.
    """
    cuda = config.device != "cpu" and launch.count_gpus(os.environ) > 0
    attempt = claim.attempt if claim and (identity is None or ATTEMPT in os.environ) else None
    start_dir = starts.folder_of(run_dir, identity, os.environ, attempt)
    watch = partial(watched, config.fault, start_dir, request=request, environ=os.environ, cuda=cuda)
    me = identity or launch.Identity(world_size=nproc)
    if claim is not None and ATTEMPT not in os.environ:
        starts.begin(start_dir)
    if identity is not None or nproc == 1:
        with watch(me) as watching:
            run = prepared_run(config, run_dir, identity, claim, request, watching.pulse)
            code, failure = local_ranks.guard(partial(run, watching.pulse), me)
            failure = watching.settle(failure)
            watching.pulse.code = code
    elif cuda and launch.choose_device(config.device, os.environ) == "cuda":
        environ = {**os.environ, ATTEMPT: claim.attempt} if claim else os.environ
        verdict = partial(record.read, start_dir)
        return local_ranks.spawn_ranks(nproc, [sys.executable, *sys.argv], environ, told=lambda: bool(verdict()))
    else:
        run = prepared_run(config, run_dir, None, claim, request)

        def watched_run(rank: launch.Identity) -> int:
            with watch(rank) as watching:
                watching.pulse.code = run(watching.pulse, rank)
            return watching.pulse.code

        code, failure = local_ranks.fork_ranks(nproc, watched_run)
        failure = Watch(folder=start_dir, identity=me, host=launch.node_name(os.environ), launches=True).settle(failure)
    if failure is not None:
        local_ranks.report(failure, run_dir / "logs", me.world_size)
    return code


def leave(code: object) -> None:
    """End this process. Of ours nothing is left to do; what libraries have left for the interpreter's end (wandb waits
    for a server that does not answer) must not hold the nodes of a job that is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    try:
        with exit_note(os.environ):
            sys.exit(main())
    except SystemExit as stopped:
        leave(stopped.code)
