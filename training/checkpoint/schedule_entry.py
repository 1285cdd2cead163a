"""The schedule of learning rate and weight decay that a run began with, as a checkpoint keeps it."""

import dataclasses
from collections.abc import Mapping

from program.schema import JSON, structured
from training.config.lr_schedule import Schedule

ENTRY = "schedule"
"""Among the entries of ``state.json``: the schedule's fields. Versions before December 2026 left a sentence there."""


def entry_of(schedule: Schedule) -> dict[str, JSON]:
    """As it lies in a checkpoint."""
    return {name: value for name, value in dataclasses.asdict(schedule).items() if value is not None}


def kept_schedule(entries: Mapping[str, JSON]) -> Schedule | None:
    """The schedule of a checkpoint; None where an older version wrote it, or another program."""
    found, problems = _read(entries)
    return None if problems else found


def schedule_problems(entries: Mapping[str, JSON]) -> list[str]:
    """What is impossible in a checkpoint's schedule, a sentence each."""
    return _read(entries)[1]


def _read(entries: Mapping[str, JSON]) -> tuple[Schedule | None, list[str]]:
    value = entries.get(ENTRY)
    if value is None or isinstance(value, str):
        return None, []
    found, problems = structured(value, Schedule)
    if problems:
        return None, problems
    for field in dataclasses.fields(Schedule):
        number = getattr(found, field.name)
        if isinstance(number, int | float) and number < 0:
            problems.append(f"{field.name}: expected 0 or more, found {number}.")
    if not 0 <= found.min_lr <= found.lr or found.lr <= 0:
        problems.append(f"lr: expected above 0, and at least min_lr {found.min_lr:g}, found {found.lr:g}.")
    return found, problems or found.problems()
