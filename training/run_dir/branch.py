"""Decay from here: a run that branches off another one, the trunk, whose learning rate falls from where it is.

``train.decay_from`` names the trunk, ``train.decay_iters`` the length of the fall. What WSD's users do at any moment of
a stable phase (arXiv:2405.18392, section 3), without a second recipe: weights, optimizer, data and the form of
everything else are the trunk's. The trunk's folder is only read.
"""

from dataclasses import replace
from pathlib import Path

from program.buckets import names
from program.errors import SharedMistake, UserError
from program.schema import JSON
from program.untrusted import if_readable, read_toml
from training.checkpoint.bucket import stored
from training.checkpoint.folders import checkpoints, complete, find, iteration_of
from training.config.lr_schedule import Schedule
from training.config.run_config import RunConfig


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with the trunk's checkpoint by name, and the iteration at which the branch ends.

    A branch that has begun keeps its checkpoint, wherever the trunk is by now. Raises UserError for a trunk that is not
    there, and for a run_dir that is the trunk's or another branch's.
    """
    train, run_dir = config.train, Path(config.run_dir or "runs/run")
    if train.decay_from is None or train.decay_iters is None:  # see TrainConfig.problems
        return config
    if config.checkpoint.override_opt_param_scheduler:
        raise UserError(
            "train.decay_from goes on with the trunk's schedule, checkpoint.override_opt_param_scheduler takes this "
            "configuration's. Set one of them."
        )
    trunk, own = Path(train.decay_from).expanduser(), checkpoints(run_dir.resolve())
    bucket = config.checkpoint.bucket
    is_own = bucket is not None and f"{train.decay_from}/".startswith(f"{bucket.rstrip('/')}/")
    if is_own or trunk.resolve() in (own.parent, own) or trunk.resolve().parent == own:
        raise UserError(f"train.decay_from {trunk}: {run_dir} is this run itself. Give the branch a --run_dir.")
    folder = _begun(run_dir, trunk) or _newest(train.decay_from)
    name = Path(folder).name
    iteration = iteration_of(Path(name.partition("-")[0]))
    if iteration is None:
        raise UserError(f"train.decay_from {train.decay_from}: expected a checkpoint named iter_..., found {name}.")
    start = replace(config.checkpoint, load=folder, finetune=False, no_load_optim=False)
    length = replace(train, decay_from=folder, train_iters=iteration + train.decay_iters)
    return replace(config, train=length, checkpoint=start)


def _newest(trunk: str) -> str:
    if not names.is_url(trunk):
        return str(find(trunk, name="train.decay_from")[0])
    if text := names.problem(trunk):
        raise UserError(f"train.decay_from: {text}")
    return stored.find(trunk, "train.decay_from")[0].url


def _begun(run_dir: Path, trunk: Path) -> str | None:
    """The checkpoint at which this folder's branch has begun; None where it has no checkpoint yet."""
    if not complete(checkpoints(run_dir)):
        return None
    section = (if_readable(read_toml, run_dir / "config.toml", dict[str, JSON]) or {}).get("train")
    said = section.get("decay_from") if isinstance(section, dict) else None
    begun = Path(said) if isinstance(said, str) else None
    if begun is None or trunk.resolve() not in (begun.resolve(), *begun.resolve().parents[:2]):
        whose = "of no branch" if begun is None else f"of a branch from {begun}"
        raise UserError(
            f"train.decay_from {trunk}: {run_dir} has checkpoints {whose}. Give this branch another --run_dir."
        )
    return str(said)


def branched(trunk: Schedule, config: RunConfig, consumed_samples: int) -> Schedule:
    """The trunk's schedule until now, and ``optimizer.lr_wsd_decay_style`` from its rates of now to the least ones.

    Raises SharedMistake where they are the least ones already.
    """
    length = config.batches.consumed_after(config.train.decay_iters or 0, consumed_samples) - consumed_samples
    now, optimizer = trunk.rates(consumed_samples), config.optimizer
    apart = now.decoupled_learning_rate
    if now.learning_rate <= optimizer.min_lr or apart == 0:
        raise SharedMistake(
            f"train.decay_from {config.train.decay_from}: its learning rate is {now.learning_rate:g} already, at most "
            f"optimizer.min_lr {optimizer.min_lr:g}, and cannot fall. Give an earlier checkpoint of that run."
        )
    least = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
    return replace(
        trunk,
        lr=now.learning_rate,
        min_lr=min(optimizer.min_lr, now.learning_rate),
        decoupled_lr=apart,
        decoupled_min_lr=None if apart is None else min(least, apart),
        warmup_samples=0,
        lr_warmup_init=0.0,
        lr_decay_style="WSD",
        lr_wsd_decay_style=optimizer.lr_wsd_decay_style,
        decay_samples=consumed_samples + length,
        wsd_decay_samples=length,
        begins_at=0,
        waited_samples=0,
    )
