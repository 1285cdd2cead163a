"""What a run keeps in its folder: the configuration, checkpoints that carry all they need, and the marker ``done``."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data.gaps import NO_GAPS, Gaps
from data.order_begin import RUN_BEGIN, OrderBegin
from data.prepared import Prepared
from data.tokenizers.base import carried
from data.tokenizers.tokenizer_json import JsonTokenizer
from parallel.groups import Ranks
from program.durable import replace_file
from program.errors import SharedFault, SharedMistake
from program.number_ranges import listed, read_ranges
from training import checkpoint
from training.checkpoint import order_entry, stage_entry
from training.checkpoint.agreement import on_first_rank
from training.checkpoint.bucket.fetching import with_fetched
from training.checkpoint.folders import checkpoints
from training.checkpoint.imported import IMPORTED, kept
from training.checkpoint.restoring import Restored
from training.checkpoint.schedule_entry import ENTRY as SCHEDULE
from training.checkpoint.schedule_entry import entry_of
from training.checkpoint.state import JSON
from training.config.checkpoint_config import CheckpointConfig
from training.config.lr_schedule import Schedule
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.loop import Reason
from training.progress import Progress
from training.run_dir import fingerprint, kept_schedule
from training.run_dir.data_changes import data_changes, data_entry
from training.run_dir.errors import run_dir_error
from training.run_dir.kept_schedule import RECIPE
from training.run_dir.resume_report import Now, card, recipe_of
from training.run_dir.tokenizer_files import tokenizer_files
from training.step import RankParts

OF_THIS_RUN = (
    "load", "bucket", "bucket_keep", "finetune", "no_load_optim", "no_load_rng", "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
)  # fmt: skip
"""Fields of ``checkpoint`` that no checkpoint carries into another run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Begun:
    """Where a start begins."""

    schedule: Schedule
    """Of learning rate and weight decay: as the run began, or as this configuration has it."""
    progress: Progress = field(default_factory=Progress)
    entries: Mapping[str, JSON] = field(default_factory=dict)
    """What else was noted in the checkpoint that training continues."""
    parent: str | None = None
    """The run's own checkpoint that it continues, by name: the next one descends from it."""
    loaded: str | None = None
    """``hash`` of the run's own checkpoint that ``checkpoint.load`` went back to."""
    order: OrderBegin = RUN_BEGIN
    """Where the order of the data begins that is read."""
    gaps: Gaps = NO_GAPS
    """In that order, and in those before."""


def restore(parts: RankParts, prepared: Prepared, run_dir: Path, beat: Callable[[], None] = lambda: None) -> Begun:
    """Continue this run's newest checkpoint, or start from ``checkpoint.load``, or from initial weights; say which.

    beat: called every second while one is fetched from a bucket.
    """
    began_s, config, ranks = time.monotonic(), parts.config, parts.ranks
    flags = with_fetched(run_dir, config.checkpoint, ranks, beat)
    restored = checkpoint.restore(checkpoints(run_dir), flags, parts.chunks, parts.optimizer, ranks)
    if restored is None:
        schedule, said = kept_schedule.chosen(config, None)
        ranks.say(f"starting from initial weights (seed {config.train.seed})")
        ranks.say(said)
        return Begun(schedule=schedule, gaps=Gaps(read_ranges(config.data.samples_to_skip)))
    progress = restored.progress
    _check_stage(config, progress, restored.path)
    branches_at = None if restored.own else progress.consumed_samples
    kept_one = None
    if restored.optimizer_restored:  # else it starts fresh, and so does the schedule
        kept_one = on_first_rank(partial(kept_schedule.continued, restored.path, restored.entries), ranks)
    if config.own_stage.curve.iteration == progress.iteration > 0:
        kept_one = dataclasses.replace(config.schedule, begins_at=progress.consumed_samples)
    schedule, said = kept_schedule.chosen(config, kept_one, branches_at)
    ranks.say(card(restored, _now(config, prepared, schedule, restored, ranks), time.monotonic() - began_s))
    ranks.say(said)
    rate = schedule.learning_rate(progress.consumed_samples)
    ranks.say(f"next learning rate {rate:.3e}{_over(schedule, progress, rate)}")
    gaps, trained = order_entry.gaps_of(restored.entries, config, progress)
    if trained:
        ranks.say(f"data.samples_to_skip: {listed(trained)}: trained on before this checkpoint, and not skipped")
    order = order_entry.found(restored.entries, config, progress, gaps, restored.path)
    if progress.consumed_samples and not order_entry.begins_here(config, progress):
        other = data_changes(restored.entries.get("data"), data_entry(config, prepared))
        if other and not config.data.allow_data_change:
            raise SharedMistake(
                f"{restored.path} was written with other data: from here on there would be other samples, or the same "
                "in another order, and some twice.\n"
                + "\n".join(f"  {line}" for line in other)
                + "\nGive what was there, or --data.allow_data_change True if that is meant."
            )
        for line in other:
            ranks.say(f"data: {line}: other samples, or another order")
    return Begun(
        schedule=schedule,
        progress=progress,
        entries=restored.entries if progress.iteration else kept(restored.entries),
        parent=restored.path.name if restored.own else None,
        loaded=restored.loaded,
        order=order,
        gaps=gaps,
    )


def _check_stage(config: RunConfig, progress: Progress, path: Path) -> None:
    """Raises SharedFault for a checkpoint of another stage, taken since newer ones cannot be read: a new start begins
    with its stage."""
    own = config.own_stage
    first, end = own.first.iteration, own.end.iteration
    if first <= progress.iteration < (math.inf if own.is_last else end):
        return
    raise SharedFault(
        f"{path} ends at iteration {progress.iteration:,}, and {own.title} is from {first:,} to {end:,}: newer "
        "checkpoints cannot be read, see above. Start again, and this one's stage begins; where that comes back, name "
        f"the checkpoint in {path.parent / 'latest'}."
    )


def _over(schedule: Schedule, progress: Progress, rate: float) -> str:
    """Of a run that was made longer: its schedule stays where it was."""
    if schedule.lr_decay_style == "constant" or schedule.samples_on(progress.consumed_samples) < schedule.decay_samples:
        return ""
    return ": the schedule is over" + ("" if rate else ", and no update changes a weight any more")


def _now(config: RunConfig, prepared: Prepared, schedule: Schedule, restored: Restored, ranks: Ranks) -> Now:
    own = checkpoint_contents(config, prepared, schedule, {})
    before, unreadable = recipe_of(restored.path / RECIPE)
    return Now(
        layout=ranks.layout,
        device=ranks.device.type,
        fp8=config.precision.fp8 is not None,
        recipe=own.texts[RECIPE],
        recipe_before=before,
        unreadable=unreadable,
        entries=own.entries,
        tokens=config.tokens_of(restored.progress.consumed_samples),
    )


def write_run_files(
    config: RunConfig, recipe: RunConfig | None, run_dir: Path, progress: Progress, ranks: Ranks
) -> None:
    """recipe: with ``[[stage]]``, where ``config`` is that of one stage.

    Write ``config.toml``, which runs the same job again, once nothing stands in the way of this start.

    Raises, on rank 0, where it cannot be written: a UserError, or a SharedFault where the run has checkpoints.
    """
    if ranks.rank != 0:
        return
    try:
        text = dump(dataclasses.replace(recipe or config, run_dir=None))
        replace_file(run_dir / "config.toml", text.encode(), suffix=".unfinished", durable=False)
        (run_dir / "requeue").unlink(missing_ok=True)
        if progress.iteration < config.train.train_iters or not config.own_stage.is_last:
            (run_dir / "done").unlink(missing_ok=True)
    except OSError as error:
        raise run_dir_error(run_dir, f"run_dir {run_dir}: cannot write config.toml: {error.strerror}.") from None


def mark(run_dir: Path, progress: Progress, reason: Reason, ranks: Ranks) -> None:
    """Leave ``done`` or ``requeue`` for the launcher: the run's end, or a request to continue."""
    name = {"done": "done", "requested": "requeue"}.get(reason)
    if name is not None and ranks.rank == 0:
        try:
            (run_dir / name).write_text(f"{progress.iteration}\n")
        except OSError as error:  # the run has done what was asked, and its exit code says so, too
            ranks.say(f"warning: the marker {run_dir / name} cannot be written: {error.strerror}")


def checkpoint_contents(
    config: RunConfig, prepared: Prepared, schedule: Schedule, before: Mapping[str, JSON]
) -> checkpoint.Contents:
    """What a checkpoint carries beside tensors: its configuration and tokenizer, so that it can start a run, and what
    lies beside the tokenizer, so that it can be exported whole. before: entries of the checkpoint that this run
    started from."""
    tokenizer, kept_tokenizer, default = prepared.tokenizer, carried(prepared.tokenizer), CheckpointConfig()
    # What ends a document is noted, though a file beside a tokenizer.json may say it.
    eod_token = tokenizer.eod_text if isinstance(tokenizer, JsonTokenizer) else config.data.eod_token
    own = dataclasses.replace(
        config,
        run_dir=None,
        nproc=None,
        begin=None,
        data=dataclasses.replace(config.data, tokenizer=kept_tokenizer.name, eod_token=eod_token),
        train=dataclasses.replace(config.train, decay_from=None, decay_iters=None),
        checkpoint=dataclasses.replace(config.checkpoint, **{name: getattr(default, name) for name in OF_THIS_RUN}),
    )
    entries: dict[str, JSON] = stage_entry.noted(config) | {
        SCHEDULE: entry_of(schedule),
        "data": data_entry(config, prepared),
        "versions": {name: fingerprint.version(name) for name in fingerprint.LIBRARIES}
        | {"triplane": fingerprint.code_digest()},
    }
    return checkpoint.Contents(
        keep=config.checkpoint.keep,
        retain_interval=config.checkpoint.save_retain_interval,
        milestones=config.own_stage.ends,
        entries=entries | kept(before),
        texts={RECIPE: dump(own)} | kept_tokenizer.texts,
        copies=tokenizer_files(tokenizer.path, kept_tokenizer, licenses=IMPORTED in before),
    )
