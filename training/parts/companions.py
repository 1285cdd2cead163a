"""All that accompanies the loop, in the order in which it is called."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.layers.spec import has_transformer_engine
from program.number_ranges import read_ranges
from training.batches import BatchStream
from training.checkpoint.callback import SaveCallback
from training.checkpoint.optimizer_state import averages
from training.checkpoint.save_interval import SaveClock, SaveInterval
from training.custom.callbacks import RunContext, build_callbacks
from training.generation.samples import SampleCallback
from training.health.health import build_health
from training.health.skipping import Skipping
from training.health.update_policy import HealthPolicy
from training.loop import Callback
from training.memory.measured import MemoryReport
from training.metrics.compilation import CompilationMeter
from training.metrics.log_disk import LogDisk
from training.metrics.meters import Meter
from training.metrics.recorder import Recorder
from training.parts.announcement import AttentionBackend
from training.parts.checkpoints import build_bucket, build_saves, build_updates
from training.parts.evaluation import build_samples, build_tasks, build_validation
from training.parts.manual_gc import ManualGC
from training.parts.measuring import build_profile, build_recorder, build_shadow, build_stats
from training.parts.run import TrainingRun
from training.run_dir.data_watch import DataWatch
from training.run_dir.history_callback import EvaluationNotes, HistoryCallback
from training.run_dir.run_files import Begun
from training.step import RankParts
from training.watchdog.callbacks import HeartbeatCallback, StopCallback


@dataclass(kw_only=True, slots=True, frozen=True)
class Companions:
    """What the loop and the step call."""

    callbacks: Sequence[Callback]
    policy: HealthPolicy
    saves: SaveCallback
    samples: SampleCallback
    recorder: Recorder
    skipping: Skipping

    def before_update(self) -> None:
        """Of all callbacks."""
        for callback in self.callbacks:
            callback.before_update()


def build_companions(
    run: TrainingRun, parts: RankParts, stream: BatchStream, begun: Begun, collector: Meter
) -> Companions:
    """collector: of what code anywhere records (parallel/metrics.py)."""
    config, ranks, chunks, heartbeat = run.config, run.ranks, parts.chunks, run.heartbeat
    begins = config.own_stage.first.iteration == begun.progress.iteration > 0
    skipped = read_ranges(config.train.iterations_to_skip)
    skipping = Skipping(skipped, begun.gaps, begun.schedule, begun.entries, ranks, run.note)
    # a stage's losses and norms are not those before it
    health = build_health(parts, run.run_dir, {} if begins else begun.entries, skipping, run.note)
    updates = build_updates(run, parts, begun)
    saves = build_saves(run, parts, health, stream, begun, updates)
    stats = build_stats(run, parts)
    timelines, traces = build_profile(run, chunks)
    trunk = run.config.train.decay_from if begun.parent is None else None
    history = HistoryCallback(
        run.run_dir, run.note, lambda: heartbeat.spent_s["evaluation"], ranks, trunk, run.config.begin
    )
    compilation = [CompilationMeter(ranks, run.note)] if config.train.compile else []
    clip = [parts.optimizer.qk_clip] if config.optimizer.qk_clip else []
    meters = [collector, *stats, *timelines, *compilation, *clip, history, skipping]
    recorder = build_recorder(run, chunks, stream, begun.progress, meters)
    samples = build_samples(run, chunks)
    callbacks = [
        HeartbeatCallback(heartbeat),
        *timelines,
        *health.callbacks,
        *build_shadow(run, parts, stream),
        *([parts.optimizer.averages] if averages(parts.optimizer) else []),
        *stats,
        *compilation,
        *users_callbacks(run, parts),
        recorder,
        *traces,
        MemoryReport(config, run.shape, chunks, parts.optimizer, ranks, run.note),
        LogDisk(run.run_dir / "logs", config.log.log_interval, ranks),
        DataWatch(run.prepared, ranks),
        history,
        build_validation(run, chunks, recorder),
        samples,
        *build_tasks(run, chunks, recorder),
        EvaluationNotes(run.note, lambda: heartbeat.spent_s["evaluation"]),
        updates,
        SaveClock(config.checkpoint.save_interval_minutes, ranks.rank),
        saves,
        *build_bucket(run),
        SaveInterval(config.fault, ranks.identity.world_size, lambda: saves.stalled_s, ranks.say),
        StopCallback(run.stop, ranks.say),
    ]
    if has_transformer_engine(ranks.device) and not config.data.by_document:
        callbacks.append(AttentionBackend(ranks.say))
    if config.train.manual_gc_interval:
        callbacks.append(ManualGC(config.train.manual_gc_interval))
    return Companions(
        callbacks=callbacks, policy=health.policy, saves=saves, samples=samples, recorder=recorder, skipping=skipping
    )


def users_callbacks(run: TrainingRun, parts: RankParts) -> Sequence[Callback]:
    """Those of ``train.callbacks``."""
    context = RunContext(
        config=run.config,
        shape=run.shape,
        ranks=run.ranks,
        run_dir=run.run_dir,
        tokenizer=run.prepared.tokenizer,
        chunks=parts.chunks,
        optimizer=parts.optimizer,
    )
    return build_callbacks(context, run.heartbeat)
