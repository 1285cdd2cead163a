"""A schedule is fixed in samples when a run begins: another batch, length or layout does not bend it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from campaign import param, some
from data.prepared import Prepared
from program.errors import UserError
from rewritten import change_state, change_text, copy_of
from runs import configuration, train
from training.cli import dry_run, parse
from training.config.checkpoint_config import CheckpointConfig
from training.config.lr_schedule import Schedule
from training.config.schedules import learning_schedule

RAMPS = (
    "--optimizer.lr_warmup_iters", "1", "--optimizer.weight_decay_incr_style", "linear",
    "--optimizer.start_weight_decay", "0.1", "--optimizer.end_weight_decay", "0.3", "--train.eval_interval", "None",
    "--log.report", "False", "--train.train_iters", "4",
)  # fmt: skip
OTHER_BATCH = ("--train.global_batch_size", "16")
OVERRIDE = ("--checkpoint.override_opt_param_scheduler", "True")
USE = ("--checkpoint.use_checkpoint_opt_param_scheduler", "True")
NEWEST = "checkpoints/iter_0000002"


def schedule_of(folder: Path, *flags: str) -> Schedule:
    config = configuration(folder, *RAMPS, *flags)
    return learning_schedule(config.optimizer, config.train, config.model.seq_length)


@pytest.fixture(scope="module")
def begun(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 of 4 iterations of 8 samples: 16 of 32."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(prepared, configuration(folder, *RAMPS, "--train.exit_interval", "2"), 1)
    return folder


def go_on(prepared: Prepared, folder: Path, *flags: str, ranks: int = 1) -> list[dict[str, Any]]:
    return train(prepared, configuration(folder, *RAMPS, *flags), ranks)


def followed(lines: Sequence[dict[str, Any]], schedule: Schedule, batch: int) -> bool:
    """Whether the last 2 iterations had the learning rates of their samples."""
    rates = [line["learning_rate"] for line in lines[-2:]]
    return rates == pytest.approx([schedule.learning_rate(16 + batch * number) for number in range(2)], rel=1e-12)


def weight_decay(folder: Path) -> float:
    """Of the last iteration, as the optimizer had it."""
    state = json.loads((folder / "checkpoints/iter_0000004/state.json").read_text())
    return max(group["weight_decay"] for group in state["optimizer"]["param_groups"])


def test_another_batch_and_layout_leave_the_schedule_as_it_began(
    begun: Path, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, kept = copy_of(begun, tmp_path / "run"), schedule_of(tmp_path)
    lines = go_on(prepared, run, *OTHER_BATCH, ranks=2)
    assert followed(lines, kept, 16)
    assert lines[-1]["consumed_samples"] == 48 and lines[-1]["learning_rate"] == 0.0, "the run ends at min_lr"
    assert weight_decay(run) == pytest.approx(kept.weight_decay(32)) == pytest.approx(0.3)
    [said] = [line for line in capfd.readouterr().out.splitlines() if "schedule: " in line]
    assert f"schedule: {kept.describe()}: kept from the checkpoint" in said
    assert f"makes another one: {schedule_of(tmp_path, *OTHER_BATCH).describe()}. " in said
    assert said.endswith("--checkpoint.override_opt_param_scheduler True takes that")


def test_a_longer_run_falls_under_the_same_rule_and_a_dry_run_says_so(
    begun: Path, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    longer = ("--train.train_iters", "6", "--train.exit_interval", "4")
    run, kept = copy_of(begun, tmp_path / "run"), schedule_of(tmp_path)
    planned = dry_run.describe(configuration(run, *RAMPS, *longer, "--dry_run"), frozenset())
    assert f"{kept.describe()}: kept from the checkpoint" in " ".join(planned.replace("#", "").split())
    assert followed(go_on(prepared, run, *longer), kept, 8)
    capfd.readouterr()
    go_on(prepared, run, *RAMPS, *longer[:2], "--train.exit_interval", "5", *USE)
    out = capfd.readouterr().out
    assert f"schedule: {kept.describe()}\n" in out and "kept from" not in out, "asked for, so without comment"
    assert "next learning rate 0.000e+00: the schedule is over, and no update changes a weight any more\n" in out


def test_an_override_says_from_what_to_what_and_is_kept_from_then_on(
    begun: Path, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, own = copy_of(begun, tmp_path / "run"), schedule_of(tmp_path, *OTHER_BATCH)
    lines = go_on(prepared, run, *OTHER_BATCH, *OVERRIDE)
    assert followed(lines, own, 16)
    was = f"(checkpoint.override_opt_param_scheduler; was: {schedule_of(tmp_path).describe()})"
    assert f"schedule: {own.describe()} {was}" in capfd.readouterr().out
    assert "override_opt_param_scheduler = false" in (run / "checkpoints/iter_0000004/config.toml").read_text()
    go_on(prepared, run, "--train.train_iters", "5")
    assert f"schedule: {own.describe()}: kept from the checkpoint" in capfd.readouterr().out


def test_both_flags_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"use_checkpoint_opt_param_scheduler the checkpoint's\. Set one of them"):
        parse.check(configuration(tmp_path, *OVERRIDE, *USE), 1)
    assert not CheckpointConfig(override_opt_param_scheduler=True).problems()


@pytest.mark.parametrize("recipe", some(("as it was", "unreadable"), ("unreadable",)))  # was: test_written_before.py
def test_a_checkpoint_of_an_older_version_goes_on(
    begun: Path, prepared: Prepared, tmp_path: Path, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has a sentence for a schedule; its configuration tells which one it was."""
    run = copy_of(begun, tmp_path / "run")

    def age(state: dict[str, Any]) -> None:
        state["entries"]["schedule"] = schedule_of(tmp_path).describe()
        del state["entries"]["account"]

    change_state(run / NEWEST, age)
    if recipe == "unreadable":
        change_text(run / NEWEST, "config.toml", b"\xff\xfe")
    expected = schedule_of(tmp_path, *(() if recipe == "as it was" else OTHER_BATCH))
    assert followed(go_on(prepared, run, *OTHER_BATCH), expected, 16)
    out = capfd.readouterr().out
    if recipe == "unreadable":
        assert f"changed      not known: {run / NEWEST}/config.toml is unreadable (" in out and "unset" not in out
    else:
        assert "changed      train.global_batch_size 8 -> 16" in out


@pytest.mark.parametrize(
    ("flags", "start"),
    [((), 16), param((("--checkpoint.no_load_optim", "True"), 16)), (("--checkpoint.finetune", "True"), 0)],
)
def test_another_run_takes_it_with_the_optimizer(
    begun: Path, prepared: Prepared, tmp_path: Path, flags: tuple[str, ...], start: int
) -> None:
    load = ("--checkpoint.load", str(begun), *flags, *OTHER_BATCH, "--train.exit_interval", "3" if start else "1")
    [line] = [one for one in go_on(prepared, tmp_path / "run", *load) if "learning_rate" in one][-1:]
    expected = schedule_of(tmp_path, *(OTHER_BATCH if flags else ()))
    assert line["learning_rate"] == pytest.approx(expected.learning_rate(start), rel=1e-12)
