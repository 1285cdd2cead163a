"""What saves a run, and what goes into its checkpoints beside the model."""

import dataclasses
import secrets
from collections.abc import Mapping

from data.order_begin import stream_keys
from training.batches import BatchStream
from training.checkpoint import optimizer_state, order_entry, stream_position
from training.checkpoint.account import UpdateCount
from training.checkpoint.bucket.callback import BucketCallback
from training.checkpoint.bucket.uploading import UploadOrder
from training.checkpoint.callback import SaveCallback
from training.checkpoint.folders import checkpoints
from training.checkpoint.state import JSON, step_of
from training.health.health import Health
from training.parts.run import TrainingRun
from training.progress import Progress
from training.run_dir import run_files
from training.step import RankParts


def build_updates(run: TrainingRun, parts: RankParts, begun: run_files.Begun) -> UpdateCount:
    """What counts updates beside the optimizer, from what that has restored. Collective."""
    optim = parts.optimizer
    done = step_of(optimizer_state.numbers(optim, run.ranks)) if optimizer_state.has_known_state(optim) else None
    return UpdateCount(begun.progress, run.config.batches, done)


def build_saves(
    run: TrainingRun,
    parts: RankParts,
    health: Health,
    stream: BatchStream,
    begun: run_files.Begun,
    updates: UpdateCount,
) -> SaveCallback:
    """What the loop calls for a checkpoint."""
    config, prepared, ranks = run.config, run.prepared, run.ranks
    keys = stream_keys(prepared, config.data, config.model.seq_length, config.train.seed, begun.order)

    def before_save(progress: Progress) -> Mapping[str, JSON]:
        own = stream_position.noted(stream, keys, progress, ranks, begun.entries) if prepared.streams else {}
        order = order_entry.noted(prepared, config, begun.order, begun.gaps, progress)
        return {**health.before_save(progress), **own, **order, **updates.entry()}

    return SaveCallback(
        checkpoints(run.run_dir),
        dataclasses.replace(
            run_files.checkpoint_contents(config, prepared, begun.schedule, begun.entries),
            parent=begun.parent,
            loaded=begun.loaded,
        ),
        parts,
        lock=run.lock,
        beat=run.heartbeat.beat,
        before_save=before_save,
        note=run.note,
    )


def build_bucket(run: TrainingRun) -> list[BucketCallback]:
    """What copies checkpoints into ``checkpoint.bucket``. It comes behind what saves them."""
    flags = run.config.checkpoint
    if flags.bucket is None:
        return []
    order = UploadOrder(
        root=str(checkpoints(run.run_dir).absolute()), url=flags.bucket,
        attempt=run.lock.attempt if run.lock else secrets.token_hex(4), keep=flags.bucket_keep or flags.keep,
        retain_interval=flags.save_retain_interval, milestones=run.config.own_stage.ends,
    )  # fmt: skip
    return [BucketCallback(order, run.ranks, waits=not flags.async_save, beat=run.heartbeat.beat, note=run.note)]
