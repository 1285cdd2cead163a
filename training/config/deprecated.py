"""Names that recipe fields had before 0.2.0, in recipes, in config.toml files of runs and checkpoints, and as flags.

``old_names`` has the table. Delete both with 0.3.0.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program.errors import SharedMistake
from program.schema import structured
from program.untrusted import InputError
from training.config.moved import Contradiction, Moved, Values
from training.config.old_names import MOVED
from training.config.run_config import RunConfig, with_fields

UNTIL = "Old names are accepted until version 0.3.0."
OLD_FIELDS = {name: field for entry in MOVED for name, field in entry.old.items()}
"""By dotted names."""
_warned = set[str]()


@dataclass(slots=True)
class Translation:
    """What became of a set of old values."""

    values: dict[str, Any]
    """New ones by dotted names."""
    lines: list[str]
    """What is now what, for the warning."""
    silent: list[str]
    """Old names that only say what holds without them."""


def translated(old: Values, given: Values, now: Values, *, over: bool) -> Translation:
    """Old values as new ones.

    given: new values that stand beside them. now: what the new fields are, given or not. over: the old values are put
    over ``now``, as flags are over a recipe, so that even a default says something. Raises Contradiction.
    """
    found = Translation(values={}, lines=[], silent=[])
    for entry in MOVED:
        here = {name: old[name] for name in entry.old if name in old}
        telling = {name: value for name, value in here.items() if over or value != entry.old[name].default}
        both = {name: given[name] for name in entry.new if name in given}
        if both and here and (why := entry.beside(here, both)):
            raise Contradiction(why)
        found.silent += [name for name in here if name not in telling]
        if telling:
            new = entry.becomes(telling, {name: found.values.get(name, now[name]) for name in entry.new})
            found.values |= new
            found.lines.append(_line(entry, tuple(telling), new))
    return found


def with_current_names(content: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """A recipe's table, old names replaced; one warning line per file, from rank 0.

    Raises InputError where an old value is none that the field had, or an old and its new name are both there. What is
    no table is left for the check against the types.
    """
    found, old, problems = _without_old(content)
    if problems:
        raise InputError(recipe, "\n  ".join(problems))
    given = _flat(found)
    if not old or _wrong(given):
        return found
    try:
        translation = translated(old, given, _defaults() | given, over=False)
    except Contradiction as error:
        raise InputError(recipe, str(error)) from None
    _put(found, translation.values)
    warn(translation, str(recipe))
    return found


def with_old_flags(config: RunConfig, old: Values, given: Collection[str]) -> RunConfig:
    """``config`` with what flags of old names say put over it. given: new fields that flags have set, too.

    Raises SharedMistake where these are what an old name became.
    """
    now = _flat(dataclasses.asdict(config))
    try:
        translation = translated(old, {name: now[name] for name in given if name in now}, now, over=True)
    except Contradiction as error:
        raise SharedMistake(f"flags: {error}") from None
    warn(translation, "flags")
    values = translation.values.items()
    return with_fields(config, {name: tuple(value) if isinstance(value, list) else value for name, value in values})


def in_current_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same for what is shown or compared: without a warning, and as it is where it cannot be translated."""
    found, old, problems = _without_old(content)
    given = _flat(found)
    if problems or _wrong(given):
        return dict(content)
    try:
        _put(found, translated(old, given, _defaults() | given, over=False).values)
    except Contradiction:
        return dict(content)
    return found


def warn(translation: Translation, where: str) -> None:
    """One line, once in a process, from rank 0."""
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if where in _warned or not first or not (translation.lines or translation.silent):
        return
    _warned.add(where)
    silent = translation.silent
    several = f" and {len(silent) - 1} more can go: defaults" if silent[1:] else " can go: default"
    more = [silent[0] + several] if silent else []
    print(f"warning: {where}: {'; '.join([*translation.lines, *more])}. {UNTIL}", file=sys.stderr, flush=True)


def new_names(name: str) -> tuple[str, ...]:
    """What an old name is now; nothing for a constant."""
    return next(entry.new for entry in MOVED if name in entry.old)


def _line(entry: Moved, old: Sequence[str], new: Values) -> str:
    """What is now what; or that flags which would switch it on do not find it, as they did then."""
    names = " and ".join(old)
    verb, then, them = ("is", "does", "it") if len(old) == 1 else ("are", "do", "them")
    if not new and not entry.now:
        return f"{names} alone {then} nothing, and no flag finds {them}: write {entry.new[0]} instead"
    said = entry.now or ", ".join(
        f"{name} = {json.dumps(value)}" if value is not None else f"no {name}" for name, value in new.items()
    )
    return f"{names} {verb} now {said}"


def _without_old(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The table without old names, these as their fields' types had them, and what is wrong with them."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    old, problems = dict[str, Any](), list[str]()
    for name, field in OLD_FIELDS.items():
        section, _, key = name.partition(".")
        own = found.get(section)
        if isinstance(own, dict) and key in own:
            old[name], wrong = structured(own.pop(key), field.kind)
            problems += [f"{name}: {line}" for line in wrong]
    return found, old, problems


def _put(content: dict[str, Any], values: Values) -> None:
    for name, value in values.items():
        section, _, key = name.partition(".")
        own = content.setdefault(section, {})
        if isinstance(own, dict):
            own.pop(key, None)
            own |= {} if value is None else {key: list(value) if isinstance(value, tuple) else value}


def _wrong(given: Values) -> bool:
    """Whether a new field that old ones are put beside is not of its type, which the check against the types says."""
    own = {name: value for name, value in given.items() if any(name in entry.new for entry in MOVED)}
    nested: dict[str, Any] = {}
    _put(nested, own)
    return bool(structured(nested, RunConfig)[1])


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, own in content.items()
        if isinstance(own, dict)
        for key, value in own.items()
    }


def _defaults() -> dict[str, Any]:
    return _flat(dataclasses.asdict(RunConfig()))
