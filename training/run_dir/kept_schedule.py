"""Which schedule a start follows: the one that the run began with, or this configuration's where that is asked for.

As Megatron's OptimizerParamScheduler.load_state_dict; but a checkpoint's schedule that this configuration would not
make is kept, and said, where Megatron ends with an assertion. A dry run asks, too.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from program.errors import SharedMistake, UserError
from program.schema import JSON, structured
from program.untrusted import if_readable, read_toml
from training.checkpoint.folders import checkpoints
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.schedule_entry import kept_schedule
from training.checkpoint.start import first_of_all, has_own
from training.checkpoint.state import read_state
from training.config.checkpoint_config import CheckpointConfig
from training.config.lr_schedule import Schedule
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.schedules import learning_schedule
from training.config.train_config import TrainConfig
from training.run_dir.branch import branched

RECIPE = "config.toml"


def chosen(config: RunConfig, kept: Schedule | None, branches_at: int | None = None) -> tuple[Schedule, str]:
    """The schedule, and the line that says it.

    kept: the one that training continues; None: nothing is continued. branches_at: consumed samples at which this run
    leaves its trunk (train.decay_from); None: it has none, or has left it before. Raises SharedMistake for a trunk that
    says no schedule.
    """
    if config.train.decay_from is not None:
        if kept is None:
            raise SharedMistake(
                f"train.decay_from {config.train.decay_from}: its checkpoint names no schedule, and its config.toml "
                "makes none that can be read. A later checkpoint of that run does."
            )
        found = _with_groups(kept if branches_at is None else branched(kept, config, branches_at), config)
        return found, f"schedule: {found.describe()} (train.decay_from {config.train.decay_from})"
    own, flags = config.schedule, config.checkpoint
    if kept is None or kept.is_same_as(own):
        return own if kept is None else kept, f"schedule: {own.describe()}"
    if flags.override_opt_param_scheduler:
        return own, f"schedule: {own.describe()} (checkpoint.override_opt_param_scheduler; was: {kept.describe()})"
    kept = _with_groups(kept, config)
    if flags.use_checkpoint_opt_param_scheduler:
        return kept, f"schedule: {kept.describe()}"
    return kept, (
        f"schedule: {kept.describe()}: kept from the checkpoint. This configuration makes another one: "
        f"{own.describe()}. --checkpoint.override_opt_param_scheduler True takes that"
    )


def _with_groups(kept: Schedule, config: RunConfig) -> Schedule:
    """The parameters that follow a curve of their own are those that this configuration says. Raises SharedMistake."""
    if (kept.decoupled_lr is None) == (config.optimizer.decoupled_lr is None):
        return kept
    has, has_not = "the run's schedule", "this configuration"
    if kept.decoupled_lr is None:
        has, has_not = has_not, has
    raise SharedMistake(
        f"optimizer.decoupled_lr: {has} has a learning rate for embeddings and output layer, and {has_not} has none. "
        "Give the run's own, or --checkpoint.override_opt_param_scheduler True for this configuration's schedule."
    )


def continued(folder: Path, entries: Mapping[str, JSON]) -> Schedule | None:
    """The schedule of a checkpoint that training continues. One of an older version names none, but has the
    configuration of the start that wrote it; None where that cannot be read either."""
    return kept_schedule(entries) or _of_recipe(folder / RECIPE)


def planned(config: RunConfig) -> tuple[Schedule, str]:
    """``chosen`` for the checkpoint that a start would take now."""
    root, flags = checkpoints(Path(config.run_dir or "runs/run")), config.checkpoint
    with (
        contextlib.suppress(UserError, DamagedError, OSError),  # the start says so, or takes an older one
        first_of_all(root, flags) as folder,
    ):
        if folder is not None:
            state = read_state(folder)
            if not has_own(root, flags):
                kept = continued(folder, state.entries) if continues(flags) else None
                return chosen(config, kept, state.progress.consumed_samples if continues(flags) else None)
            if 0 < config.own_stage.curve.iteration >= state.progress.iteration:  # it is yet to begin
                return chosen(config, None)
            return chosen(config, continued(folder, state.entries))
    return chosen(config, None)


def continues(flags: CheckpointConfig) -> bool:
    """Whether ``checkpoint.load`` goes on where another run stopped, its optimizer and schedules with it."""
    return not (flags.finetune or flags.no_load_optim)


def _of_recipe(path: Path) -> Schedule | None:
    """Of a configuration that lies in a checkpoint; of another version too, whose further fields are not read."""
    if (table := if_readable(read_toml, path, dict[str, JSON])) is None:
        return None
    optimizer, problems = structured(table.get("optimizer", {}), OptimizerConfig)
    train, more = structured(table.get("train", {}), TrainConfig)
    if problems or more or optimizer.problems() or train.problems() or train.step_batch_size_schedule is not None:
        return None  # steps in tokens are younger than schedules in checkpoints
    schedule = learning_schedule(optimizer, train, seq_length=1)
    return None if schedule.problems() else schedule
