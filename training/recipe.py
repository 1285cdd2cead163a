"""A TOML recipe, read strictly into a ``RunConfig`` and written back. No torch here.

Unknown keys and wrong types are found before anything is built from them, every one at once.
"""

import collections.abc
import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
import tomli_w

from parallel.errors import SharedMistake, UserError
from training.config import RunConfig


def load(recipe: Path) -> RunConfig:
    """A recipe as configuration.

    Raises UserError where it cannot be read, SharedMistake with each wrong key and type in it.
    """
    try:
        table = tomllib.loads(recipe.read_text())
    except FileNotFoundError:
        raise UserError(f"{recipe}: no such recipe.{_nearest_recipe(recipe)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SharedMistake(f"{recipe}: not valid TOML: {error}") from None
    problems = [*_unknown_keys(table, RunConfig), *_wrong_types(table, RunConfig)]
    if problems:
        raise SharedMistake("\n".join(f"{recipe}: {problem}" for problem in problems))
    return _beside(cattrs.Converter(forbid_extra_keys=True).structure(table, RunConfig), recipe)


def dump(config: RunConfig) -> str:
    """The configuration as TOML that ``load`` reads back to an equal one.

    None is left out, which TOML cannot say: where it is allowed, it is the default.
    """
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


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
    found = {name: hint for name, hint in typing.get_type_hints(RunConfig).items() if name not in sections()}
    for section, kind in sections().items():
        found |= {f"{section}.{name}": hint for name, hint in typing.get_type_hints(kind).items()}
    return found


def _unknown_keys(table: dict[str, Any], target: type, prefix: str = "") -> Iterator[str]:
    known = typing.get_type_hints(target)
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(f"{prefix}{key}", [*names(), *sections()]) or f" Known here: {', '.join(known)}."
            yield f"unknown key {prefix}{key}.{hint}"
        elif key in sections() and not prefix and isinstance(value, dict):
            yield from _unknown_keys(value, known[key], f"{key}.")


def _wrong_types(table: dict[str, Any], target: type, prefix: str = "") -> Iterator[str]:
    known = typing.get_type_hints(target)
    for key, value in table.items():
        if key not in known:
            continue
        if key in sections() and not prefix:
            if isinstance(value, dict):
                yield from _wrong_types(value, known[key], f"{key}.")
            else:
                yield f"{key}: expected a table [{key}], found {_toml(value)}."
        elif not fits(value, known[key]):
            yield f"{prefix}{key}: expected {type_name(known[key])}, found {_toml(value)}."


def fits(value: object, expected: Any) -> bool:
    """Whether a TOML value may stand for a field of type ``expected``; an integer may for a float."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, choice) for choice in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, list):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is collections.abc.Mapping:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    if expected in (int, float):
        return isinstance(value, (int, expected)) and not isinstance(value, bool)
    return isinstance(value, expected)


def type_name(expected: Any) -> str:
    """A field's type in words that a recipe's writer knows."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(choice) for choice in arguments if choice is not types.NoneType)
    if origin is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is collections.abc.Mapping:
        return f"a table of {type_name(arguments[1]).removeprefix('a ')}s"
    if origin is tuple:
        inner = {int: "whole numbers", str: "strings"}.get(arguments[0], type_name(arguments[0]))
        return f"a list of {inner}" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} {inner}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[expected]


def _toml(value: object) -> str:
    """A value as it stands in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _nearest_recipe(recipe: Path) -> str:
    if not recipe.parent.is_dir():
        return f" There is no folder {recipe.parent} either."
    found = [path.name for path in recipe.parent.glob("*.toml")]
    near = difflib.get_close_matches(recipe.name, found, n=3, cutoff=0.3) or sorted(found)[:5]
    return f" That folder has: {', '.join(near)}." if near else ""


def _beside(config: RunConfig, recipe: Path) -> RunConfig:
    """A tokenizer named by a bare file name is looked for beside the recipe: a checkpoint carries its own."""
    beside = recipe.parent / config.data.tokenizer
    if config.data.tokenizer.endswith((".model", ".json", ".tiktoken")) and beside.is_file():
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(beside)))
    return config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value
