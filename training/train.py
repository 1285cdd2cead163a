"""One rank's whole run, part by part: the table of contents of Triplane."""

import contextlib
from collections.abc import Callable
from functools import partial

from data.prepared import Prepared
from models.resolve import resolve
from parallel import groups, metrics
from parallel.failures import NEXT_STAGE, STOPPED
from parallel.launch import Identity
from training import loop
from training.batches import Stream
from training.config.lr_schedule import Schedule
from training.config.run_config import RunConfig
from training.health.update_policy import HealthPolicy
from training.memory.host_room import check_host_room
from training.memory.out_of_memory import explain_out_of_memory
from training.parts.announcement import announce, say_the_end
from training.parts.companions import build_companions
from training.parts.data import build_stream
from training.parts.determinism import set_debugging
from training.parts.model import build_parts, overlap_of_tp, with_recipe
from training.parts.run import PreparedRun, TrainingRun
from training.profile.memory_snapshot import memory_history
from training.progress import Progress
from training.run_dir import fingerprint, run_files
from training.run_dir.history import noted_by
from training.run_dir.kept_schedule import RECIPE
from training.run_dir.shared_check import check_shared
from training.step import RankParts, StepRequests, StepResult, UpdateDecision, skip_overflows, train_step
from training.watchdog.heartbeat import Heartbeat


def train(
    ready: PreparedRun, identity: Identity, heartbeat: Heartbeat | None = None, console_fd: int | None = None
) -> int:
    """Build the parts on this rank, train, and leave a sample of what the model learned: the exit code.

    heartbeat: tells the watchdog of progress; None without one. console_fd: on rank 0, the user's console.
    """
    config, prepared, run_dir, heartbeat = ready.config, ready.prepared, ready.run_dir, heartbeat or Heartbeat()
    set_debugging(config.train)
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    start = groups.start(
        config.layout(identity.world_size),
        identity,
        device=ready.device,
        seed=config.train.seed,
        meeting=meeting(config, prepared),
        parallel=config.parallel,
        graphs=config.kernels.graphs,
        console_fd=console_fd,
    )
    with (
        start as ranks,
        explain_out_of_memory(config, shape, ranks, run_dir / RECIPE),
        memory_history(config.profile, run_dir, ranks),
        metrics.collecting(ranks.device) as collector,
        contextlib.ExitStack() as buffers,
    ):
        config = with_recipe(config, shape, ranks)
        run = TrainingRun(
            config=config, prepared=prepared, device=ready.device, run_dir=run_dir, stop=ready.stop, lock=ready.lock,
            tasks=ready.tasks, recipe=ready.recipe, shape=shape, ranks=ranks, heartbeat=heartbeat,
            note=noted_by(run_dir, ranks.rank, ready.lock.attempt if ready.lock else ""),
        )  # fmt: skip
        announce(run)
        check_shared(run_dir, ranks)
        check_host_room(config, shape, ranks)
        heartbeat.enter("load")
        buffers.enter_context(overlap_of_tp(config, shape, ranks))
        parts = build_parts(config, shape, ranks)
        begun = run_files.restore(parts, prepared, run_dir, heartbeat.beat)
        run_files.write_run_files(config, ready.recipe, run_dir, begun.progress, ranks)
        stream = build_stream(run, begun)
        companions = build_companions(run, parts, stream, begun, collector)
        step = partial(
            one_step, parts, stream,
            schedule=lambda: companions.skipping.schedule, policy=companions.policy,
            before_update=companions.before_update,
        )  # fmt: skip
        save = heartbeat.within("save", companions.saves)
        end: loop.Reason = "done" if config.own_stage.is_last else "stage"
        progress, reason = loop.run(
            config.train, config.checkpoint, begun.progress, step, save, companions.callbacks, end
        )
        stream.close()
        run_files.mark(run_dir, progress, reason, ranks)
        if reason not in ("requested", "stage"):
            companions.samples.sample_at_end(progress)
        say_the_end(run, progress, reason)
        companions.recorder.close()
    return {"requested": STOPPED, "stage": NEXT_STAGE}.get(reason, 0)


def meeting(config: RunConfig, prepared: Prepared) -> groups.Meeting:
    """What this run's ranks must agree on, and how long they wait for one another."""
    minutes = config.parallel.distributed_timeout_minutes
    return groups.Meeting(
        timeout_minutes=config.fault.after_watchdog(minutes),
        # before the watchdog ends a rank that does not start, without knowing why
        resolve_s=min(60 * minutes, 0.8 * config.fault.start_timeout_s),
        facts=fingerprint.facts(config, prepared.fingerprints),
    )


def one_step(
    parts: RankParts,
    stream: Stream,
    progress: Progress,
    requests: StepRequests,
    *,
    schedule: Callable[[], Schedule] | None = None,
    policy: HealthPolicy | None = None,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[Progress, StepResult]:
    """The iteration after ``progress``: its batch, its learning rate, its update.

    schedule: of now; None: this configuration's, as of a run that begins. policy: None: as mcore does.
    """
    config = parts.config
    microbatches = stream.next(config.model.seq_length)
    rates = (schedule() if schedule else config.schedule).rates(progress.consumed_samples)
    run_step = partial(train_step, parts, microbatches, rates, requests, before_update=before_update)
    metrics.begin_step()
    result = run_step(policy.decide if policy else skip_overflows)
    if policy and result.decision is UpdateDecision.REPLAY:
        metrics.discard_step()
        result = policy.replay(run_step, result, microbatches)
    return Progress(iteration=progress.iteration + 1, consumed_samples=stream.consumed_samples), result
