"""``state.json``: a checkpoint but for its tensors, as named entries with a format number. No torch here."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.layout import Layout
from training.checkpoint.folders import STATE
from training.checkpoint.progress import Progress

FORMAT = 1
JSON = None | bool | int | float | str | list[Any] | dict[str, Any]


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


def encoded(state: State) -> str:
    """The content of ``state.json``. Floats keep every bit."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(state)}, indent=2) + "\n"


def write_state(folder: Path, state: State) -> None:
    """Write ``state.json`` into ``folder``."""
    (folder / STATE).write_text(encoded(state))


def read_state(folder: Path) -> State:
    """Raises UserError where ``state.json`` cannot be read, or was written by a later version of Triplane."""
    path = folder / STATE
    try:
        values = json.loads(path.read_text())
        written = values["format"]
        if written > FORMAT:
            raise UserError(f"{path} has format {written}; this version of Triplane reads up to {FORMAT}. Update it.")
        return State(
            progress=Progress(**values["progress"]),
            layout=Layout(**values["layout"]),
            device=values["device"],
            optimizer=values["optimizer"],
            entries=values["entries"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not the state of a checkpoint ({type(error).__name__}: {error}). "
            "Load another checkpoint, or bring this file back."
        ) from None
