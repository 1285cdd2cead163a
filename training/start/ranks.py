"""Start a run: find out who starts the ranks, check the configuration, take the run's folder, and train."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallel import failures, launch, local_ranks, output
from parallel.failures import NEXT_STAGE, STOPPED
from parallel.layout import smallest_world
from program.errors import UserError
from program.processes import die_with_parent
from program.users_code import no_sudden_end
from training.checkpoint.folders import checkpoints
from training.checkpoint.stage_entry import position
from training.cli import parse
from training.cli.elastic import elastic_layout
from training.config.debug import debugged
from training.config.run_config import RunConfig
from training.config.stages import stage_at, stages
from training.run_dir import write_check
from training.run_dir.errors import run_dir_error
from training.run_lock.lock import ATTEMPT, held_lock
from training.start import next_stage
from training.start.next_stage import check_stages
from training.start.rank import RunStart, prepared_run
from training.start.record import recorded_start
from training.watchdog import starts, verdict_file
from training.watchdog.rank_monitor import RankMonitor, monitored
from training.watchdog.stop_signal import StopSignal


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """The exit code of a run, or of ``--help`` and ``--dry_run``."""
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # asks a monitored rank for its stacks; no other process must die of it
    before = dict(environ)
    try:
        config, explicit = parse.parse_config(argv), parse.explicit_fields(argv)
        if config.dry_run:
            from training.cli import dry_run

            print(dry_run.describe(config, explicit))
            return 0
        return start(config, explicit, partial(next_stage.begin, argv, before))
    except UserError as error:
        identity = _identity_if_known(environ)
        # Until ranks start, all processes of a node find the same mistakes: its first one shows them.
        quiet = identity is not None and (identity.local_rank > 0 or not failures.shows(error, identity))
        if not quiet:
            failures.ignore_termination()
        parse.fail(error, quiet)


def _identity_if_known(environ: Mapping[str, str]) -> launch.Identity | None:
    """None also where the environment is what is wrong."""
    try:
        return launch.detect(environ)
    except UserError:
        return None


def start(
    recipe: RunConfig, explicit: frozenset[str] = frozenset(), begin_next: Callable[[int], None] = lambda saved: None
) -> int:
    """Find out who starts the ranks, check the configuration, take the run's folder, and train.

    explicit: fields that flags have set, which win over --debug. begin_next: begins the stage after this one, which
    continues the checkpoint of the iteration that it is given, and does not return.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks have sessions of their own, and would survive its kill
        die_with_parent(os.getppid())
    identity = launch.detect(os.environ)
    request = StopSignal(speaks=identity is None or identity.rank == 0)
    request.listen()
    run_dir = Path(recipe.run_dir or "runs/run")
    at = position(checkpoints(run_dir), recipe.checkpoint, next_stage.saved(os.environ)) if recipe.stage else None
    plan = stages(recipe, at)
    config = stage_at(plan, at.now.iteration if at is not None else 0) if plan else recipe
    gpus = launch.count_gpus(os.environ) if config.device != "cpu" else 0
    nproc = config.nproc or gpus or smallest_world(config.parallel)
    given = identity.world_size if identity else nproc
    if identity is not None and config.nproc not in (None, given) and identity.rank == 0:
        print(f"nproc = {config.nproc} is ignored: WORLD_SIZE is {given} ({identity.launcher})", flush=True)
    debugging = debugged(config, given, explicit, os.environ, cuda=gpus > 0)
    config = debugging.config
    os.environ.update(debugging.environ)
    if debugging.lines and (identity is None or identity.rank == 0):
        print("\n".join(debugging.lines), flush=True)
    expected = replace(config, device="cpu") if config.device == "auto" and not gpus else config
    fitted = elastic_layout(expected, given)
    parse.check(fitted.config, fitted.world_size, identity.local_world_size if identity else None)
    later = tuple(plan[len(config.own_stage.begun) :])
    check_stages(later, given, fitted.world_size if identity else None, cuda=gpus > 0)
    if fitted.words:
        config, nproc = replace(config, parallel=fitted.config.parallel), fitted.world_size
        if identity is None or identity.rank == 0:
            print(fitted.words, flush=True)
        if identity is not None and identity.rank >= nproc:
            return 0  # nothing to do: the others are enough for whole replicas
        identity = replace(identity, world_size=nproc) if identity else None
    write_check.check_limits()
    if identity is None or identity.rank == 0:
        if text := write_check.problem(run_dir):
            raise run_dir_error(run_dir, text)
    else:
        output.make_run_dir(run_dir)
    with held_lock(run_dir, identity, os.environ, partial(run_dir_error, run_dir)) as lock:
        ready = RunStart(
            config=config, run_dir=run_dir, identity=identity, nproc=nproc, lock=lock, stop=request,
            recipe=recipe if plan else None, later=later,
        )  # fmt: skip
        code = train_ranks(ready)
    if code != NEXT_STAGE or (identity is not None and identity.port is not None):  # whose parent begins it
        return code
    if config.own_stage.is_last:  # a process that a library ended so
        return 1
    if request.number is not None:  # after the last iteration: the next start begins the next stage
        return STOPPED
    begin_next(config.train.train_iters)
    return 0


def train_ranks(start: RunStart) -> int:
    """Prepare the data and train: on this rank, or, when no launcher has started ranks yet, on ``nproc`` local ones.

    A rank that another launcher started is watched from here on, through imports and data; local ones once they exist.
    """
    lock, identity = start.lock, start.identity
    attempt = lock.attempt if lock and (identity is None or ATTEMPT in os.environ) else None
    start_dir = starts.folder_of(start.run_dir, identity, os.environ, attempt)
    if lock is None or ATTEMPT in os.environ:
        return watched_ranks(start, start_dir)
    launcher = identity.launcher if identity else "local"
    report = start.config.log.report
    with recorded_start(start.run_dir, lock, start_dir, start.rank.world_size, launcher, report) as record:
        starts.begin_start(start_dir)
        code = watched_ranks(start, start_dir)
        record.code = 0 if code == NEXT_STAGE else code
    return code


def watched_ranks(start: RunStart, start_dir: Path) -> int:
    """The exit code of this rank, or of the local ones. start_dir: the watchdogs' folder of this start."""
    config, nproc, me, cuda = start.config, start.nproc, start.rank, start.on_gpus
    watch = partial(monitored, config.fault, start_dir, request=start.stop, environ=os.environ, cuda=cuda)
    if start.identity is not None or nproc == 1:
        with watch(me) as watching, no_sudden_end():
            run = prepared_run(start, watching.heartbeat)
            code, failure = failures.guard(partial(run, watching.heartbeat), me)
            failure = watching.settle(failure)
            watching.heartbeat.code = 0 if code == NEXT_STAGE else code
        if code == NEXT_STAGE:
            watching.heartbeat.dismiss()
    elif cuda and launch.choose_device(config.device, os.environ) == "cuda":
        environ = {**os.environ, ATTEMPT: start.lock.attempt} if start.lock else os.environ
        verdict = partial(verdict_file.read, start_dir)
        return local_ranks.spawn_ranks(nproc, [sys.executable, *sys.argv], environ, reported=lambda: bool(verdict()))
    else:
        from training.watchdog.killed import HostMemory, explained  # imports numpy

        before = HostMemory.now()
        with no_sudden_end():
            run = prepared_run(start)

        def watched_run(rank: launch.Identity) -> int:
            with watch(rank) as watching, no_sudden_end():
                code = run(watching.heartbeat, rank)
                watching.heartbeat.code = 0 if code == NEXT_STAGE else code
            return code

        code, failure = local_ranks.fork_ranks(nproc, watched_run)
        failure = RankMonitor(folder=start_dir, identity=me, host=launch.node_name(os.environ), launches=True).settle(
            failure
        )
        if failure is not None:
            predicted = _predicted_bytes(config, nproc)
            failure = explained(failure, verdict_file.read(start_dir), before, nproc, predicted)
    if failure is not None:
        failures.report(failure, start.run_dir / "logs", me.world_size)
    return code


def _predicted_bytes(config: RunConfig, nproc: int) -> float:
    """Of CPU ranks together; 0 where it is not known."""
    from models.resolve import resolve
    from training.cli.dry_run import vocabulary_size
    from training.memory.planned import bytes_on_cpus

    with contextlib.suppress(UserError):
        return bytes_on_cpus(config, nproc, resolve(config.model, vocabulary_size(config)))
    return 0.0
