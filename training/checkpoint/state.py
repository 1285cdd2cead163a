"""``state.json``: a checkpoint but for its tensors, as named entries with a format number."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel.layout import Layout
from program.errors import UserError
from program.schema import JSON, Count, structured
from program.untrusted import InputError, read_json
from training.checkpoint.folders import STATE
from training.checkpoint.format.manifest import DamagedError
from training.progress import Progress

FORMAT = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class Written:
    """Which version wrote a file."""

    format: Count


@dataclass(kw_only=True, slots=True, frozen=True)
class State:
    """What lies in a checkpoint beside its tensors."""

    progress: Progress
    layout: Layout
    """The layout that wrote it."""
    device: str
    """``cpu`` or ``cuda``: which generators' states lie in it."""
    optimizer: Mapping[str, JSON] = field(default_factory=dict)
    """``step``, ``grad_scaler``, and ``param_groups``, which are to be read by people only."""
    entries: Mapping[str, JSON] = field(default_factory=dict)
    """What the caller of ``save`` wants to find again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerNumbers:
    """What is read of ``State.optimizer``."""

    step: Count
    grad_scaler: dict[str, JSON] | None = None


def encoded(state: State) -> str:
    """The content of ``state.json``. Floats keep every bit."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(state)}, indent=2, allow_nan=False) + "\n"


def write_state(folder: Path, state: State) -> None:
    """Write ``state.json`` into ``folder``."""
    (folder / STATE).write_text(encoded(state))


def read_state(folder: Path) -> State:
    """Raises DamagedError where ``state.json`` is not one, UserError where a later version of Triplane wrote it."""
    path = folder / STATE
    try:
        written = read_json(path, Written)
        if written.format > FORMAT:
            raise UserError(f"{path} has format {written.format}; this version reads up to {FORMAT}. Update Triplane.")
        state: State = read_json(path, State)
        if state.optimizer:
            _, problems = structured(state.optimizer, OptimizerNumbers)
            if problems:
                raise InputError(path, f"optimizer.{problems[0]}")
        return state
    except (OSError, InputError) as error:
        raise DamagedError(f"{error}") from None


def step_of(optimizer: Mapping[str, JSON]) -> int | None:
    """Updates that AdamW has made, for all that is known; None of a checkpoint without its state."""
    step = optimizer.get("step")
    return step if isinstance(step, int) else None
