"""A TOML recipe, read strictly into a ``RunConfig`` and written back.

Unknown keys and values of a wrong type are found before anything is built from them, every one at once.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from program.errors import SharedMistake, UserError
from program.untrusted import InputError, read_toml
from training.config.deprecated import with_current_names
from training.config.import_path import add_folders
from training.config.run_config import RunConfig

STAGES = ("stage", "begin")
"""Of a configuration, what no flag sets."""


def load(recipe: Path) -> RunConfig:
    """A recipe as configuration.

    Raises UserError where it cannot be read, SharedMistake with each wrong key and type in it.
    """
    try:
        config: RunConfig = read_toml(recipe, RunConfig, _unknown_key, with_current_names)
    except FileNotFoundError:
        raise UserError(f"{recipe}: no such recipe.{_nearest_recipe(recipe)}") from None
    except OSError as error:
        raise UserError(f"{recipe}: cannot be read: {error.strerror}.") from None
    except InputError as error:
        raise SharedMistake(str(error)) from None
    if config.begin is not None:
        raise SharedMistake("unknown key begin.")
    if config.import_paths or config.stage:
        add_folders(recipe)
    return _beside(config, recipe)


def dump(config: RunConfig) -> str:
    """The configuration as TOML that ``load`` reads back to an equal one.

    None is left out, which TOML cannot say: where it is allowed, it is the default. What no terminal should get is
    escaped, since a dry run prints it.
    """
    table = dataclasses.asdict(dataclasses.replace(config, begin=None)) | {"stage": _tables(config)}
    return escaped(tomli_w.dumps(_without_none(table)))


def dump_changed(config: RunConfig) -> str:
    """The fields that are not at their defaults, and ``model.shape``: TOML that ``load`` reads back to an equal one."""
    default = dataclasses.asdict(RunConfig())
    found = _changed(dataclasses.asdict(config) | {"stage": _tables(config) or (), "begin": None}, default)
    found["model"] = {"shape": config.model.shape} | found.get("model", {})
    ordered = {name: found[name] for name in default if name in found}
    return escaped(tomli_w.dumps(_without_none(ordered)))


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a table with tables in it."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _tables(config: RunConfig) -> list[dict[str, Any]] | None:
    """``[[stage]]`` as it was given; None without it."""
    tables = [{key: value for key, value in dataclasses.asdict(one).items() if value not in (None, {})}
              for one in config.stage]  # fmt: skip
    return tables or None


def _changed(given: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(default[name], dict) and default[name]:  # a section; a field that is a table is empty by default
            value = _changed(value, default[name])
            found |= {name: value} if value else {}
        elif value != default[name]:
            found[name] = value
    return found


def escaped(toml: str) -> str:
    """TOML with characters beyond ASCII that cannot be printed written as TOML does; tomli_w does so within ASCII."""
    return toml if toml.isascii() else "".join(map(_escaped, toml))


def _escaped(character: str) -> str:
    if character.isprintable() or character.isascii() or "\ud800" <= character <= "\udfff":
        return character
    return f"\\U{ord(character):08x}"


def sections() -> dict[str, type]:
    """The sections of a recipe by name."""
    hints: dict[str, type] = typing.get_type_hints(RunConfig)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def did_you_mean(key: str, known: list[str], dashes: str = "") -> str:
    """``" Did you mean X?"`` for a name that is not among the known ones; empty where none is near.

    known: dotted names. A name that belongs to another section, or was written without one, is found too.
    """
    last = key.rpartition(".")[2]
    moved = [name for name in known if name.rpartition(".")[2] == last]
    near = moved or difflib.get_close_matches(key, known, n=1) or _nearest_last(last, known)
    return f" Did you mean {' or '.join(dashes + name for name in near[:3])}?" if near else ""


def _nearest_last(last: str, known: list[str]) -> list[str]:
    by_last = {name.rpartition(".")[2]: name for name in known}
    return [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1)]


def names() -> dict[str, Any]:
    """The type of every field by its dotted name: ``{"nproc": int | None, "train.seed": int, ...}``."""
    apart = {*sections(), *STAGES}
    found = {name: hint for name, hint in typing.get_type_hints(RunConfig).items() if name not in apart}
    for section, kind in sections().items():
        found |= {f"{section}.{name}": hint for name, hint in typing.get_type_hints(kind).items()}
    return found


def _unknown_key(name: str, section: type) -> str:
    known = typing.get_type_hints(section)
    hint = did_you_mean(name, [*names(), *sections()]) or f" Known here: {', '.join(known)}."
    return f"unknown key {name}.{hint}"


def _nearest_recipe(recipe: Path) -> str:
    if not recipe.parent.is_dir():
        return f" There is no folder {recipe.parent} either."
    found = [path.name for path in recipe.parent.glob("*.toml")]
    near = difflib.get_close_matches(recipe.name, found, n=3, cutoff=0.3) or sorted(found)[:5]
    return f" That folder has: {', '.join(near)}." if near else ""


def _beside(config: RunConfig, recipe: Path) -> RunConfig:
    """A checkpoint carries its tokenizer, named by a bare file name; an imported model's recipe lies in its weights."""
    beside = recipe.parent / config.data.tokenizer
    if config.data.tokenizer.endswith((".model", ".json", ".tiktoken")) and beside.is_file():
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(beside)))
    kept = config.checkpoint
    if kept.finetune and kept.load is None and (recipe.parent / "manifest.json").is_file():
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(kept, load=str(recipe.parent)))
    return config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def whole(value: Any) -> Any:
    """A float without a fraction as an int, as people write it: 10000, not 10000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
