"""Names that recipe fields had before 0.2.0: config.toml files of runs and checkpoints hold them. Delete with 0.3.0."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.untrusted import InputError

RENAMED: Mapping[str, tuple[str, ...]] = {
    "data.accept_change": ("data.allow_data_change",),
    "data.reset": ("data.reset_attention_mask", "data.reset_position_ids"),
    "parallel.fit": ("parallel.elastic",),
}
VALUES: Mapping[str, Mapping[Any, bool]] = {"data.reset": {"none": False, "attention": True}}
_warned = set[Path]()


def with_current_names(table: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """A recipe's table, old names replaced; one warning line per file, from rank 0.

    Raises InputError where an old and its new name are both there. What is no table, or has a value that the old field
    did not have, is left for the check against the types.
    """
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in table.items()}
    old = [name for name in RENAMED if _field(name) in _section(found, name)]
    for name in old:
        section = _section(found, name)
        value = section.pop(_field(name))
        known = VALUES.get(name, {})
        for new in RENAMED[name]:
            if _field(new) in section:
                raise InputError(
                    recipe, f"{name} and {new} are both there: {name} is the old name of it. Remove {name}."
                )
            section[_field(new)] = known.get(value, value) if isinstance(value, str) else value
    if old and recipe not in _warned and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        _warned.add(recipe)
        names = "; ".join(f"{name} is now {' and '.join(RENAMED[name])}" for name in old)
        print(f"warning: {recipe}: {names}. Old names are accepted until version 0.3.0.", file=sys.stderr, flush=True)
    return found


def renamed(name: str) -> str:
    """What to say of an unknown flag or key that had this name; empty where none had."""
    return f" It is {' and '.join(RENAMED[name])} now." if name in RENAMED else ""


def _section(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name.partition(".")[0])
    return section if isinstance(section, dict) else {}


def _field(name: str) -> str:
    return name.partition(".")[2]
