"""Flags over a recipe: ``--section.field value``.

Read by the fields' own types, as a recipe is, so that everything wrong with them is said at once and in a recipe's
words. tyro, which prints the help, takes 0.2 s to build a parser of 300 fields, and stops at the first mistake.
"""

import dataclasses
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from program.errors import SharedMistake, cut_short
from program.schema import type_name
from program.switches import negated, truth
from training.cli import help
from training.config.deprecated import OLD_FIELDS, new_names, with_old_flags
from training.config.recipe import did_you_mean, names
from training.config.run_config import RunConfig

HELP = frozenset({"-h", "--help", "--help_all"})


def override(default: RunConfig, arguments: Sequence[str], prog: str) -> RunConfig:
    """``default`` with the flags put over it. Asked for help, prints it and leaves with code 0.

    Raises SharedMistake with every unknown flag and every value that is not of its field's type.
    """
    asked = HELP.intersection(arguments)
    if asked:
        help.show(default, prog, everything="--help_all" in asked)
        raise SystemExit(0)
    values, old = _read(arguments)
    config = default
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        if section:
            field, value = section, dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{field: value})
    return with_old_flags(config, old, given(arguments, current=True)) if old else config


def given(arguments: Sequence[str], current: bool = False) -> frozenset[str]:
    """Dotted names of the fields that flags set; of an old name's, those that it is now. current: none of
    an old one."""
    known = names() if current else _known()
    found = [_field(flag, known) for flag, _ in _groups(arguments)]
    if current:
        return frozenset(found)
    return frozenset(itertools.chain(*(new_names(name) if name in OLD_FIELDS else (name,) for name in found)))


def _known() -> dict[str, Any]:
    """The type of every field, and of those that are fields no more, by its dotted name."""
    return {name: field.kind for name, field in OLD_FIELDS.items()} | names()


def _read(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by dotted names; and those of old names. Raises SharedMistake with everything that it could not read."""
    known, found, old, problems = _known(), dict[str, Any](), dict[str, Any](), list[str]()
    for flag, values in _groups(arguments):
        name = _field(flag, known)
        kind = known.get(name)
        outdated = name in OLD_FIELDS
        if kind is not None and name != flag.replace("-", "_"):
            if values:
                problems.append(f"--{flag}: expected no value, as --{name} false has one; found {_quoted(values)}.")
            (old if outdated else found)[name] = False
            continue
        if not flag:
            problems.append(f"unexpected argument {_quoted(values)}. The recipe is the first argument, flags follow.")
        elif kind is None:
            problems.append(f"unknown flag --{cut_short(flag)}.{did_you_mean(name, [*names()], '--')}")
        else:
            given = _spelled(values, kind)
            if not _accepts(kind, given):
                problems.append(f"--{flag}: expected {type_name(kind)}, found {_quoted(values)}.")
            else:
                (old if outdated else found)[name] = _value(kind, given)
    if problems:
        raise SharedMistake("\n".join([*problems, "All flags: python pretrain_gpt.py --help_all"]))
    return found, old


def _value(kind: Any, values: list[str]) -> Any:
    """What words that ``_accepts`` takes mean."""
    choices = _alternatives(kind)
    if types.NoneType in choices and values == ["None"]:
        return None
    choice = next(each for each in choices if _accepts(each, values))
    if typing.get_origin(choice) is Mapping:
        kinds = typing.get_args(choice) * (len(values) // 2)
        words = list(map(_one, kinds, values))
        return dict(zip(words[::2], words[1::2], strict=True))
    if typing.get_origin(choice) is tuple:
        inner = typing.get_args(choice)
        kinds = (inner[0],) * len(values) if inner[-1] is Ellipsis else inner
        return tuple(map(_one, kinds, values))
    return _one(choice, values[0])


def _one(kind: Any, text: str) -> Any:
    kind = next(each for each in _alternatives(kind) if _reads(each, text))
    if kind is types.NoneType:
        return None
    return text == "True" if kind is bool else kind(text) if kind in (int, float) else text


def _field(flag: str, known: Mapping[str, Any]) -> str:
    """The field that a flag sets: also one that `no_` before its name sets to false."""
    name = flag.replace("-", "_")
    booleans = [one for one, kind in known.items() if bool in _alternatives(kind)]
    return name if name in known else negated(name, booleans) or name


def _groups(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``["--a", "1", "2", "--b=3"]`` -> ``[("a", ["1", "2"]), ("b", ["3"])]``; strays are of ""."""
    groups: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("-") and not _reads(float, argument):
            flag, equals, value = argument.lstrip("-").partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            groups = groups or [("", [])]
            groups[-1][1].append(argument)
    return groups


def _quoted(values: Sequence[str]) -> str:
    """The words after a flag."""
    return cut_short(" ".join(values) or "nothing")


def _spelled(values: list[str], kind: Any) -> list[str]:
    """A switch alone means True, and true and false may be written in letters of any case."""
    if bool not in _alternatives(kind):
        return values
    return [value if truth(value) is None else str(truth(value)) for value in values] or ["True"]


def _accepts(kind: Any, values: list[str]) -> bool:
    """Whether the words after a flag make a value of its field's type."""
    for choice in _alternatives(kind):
        inner = typing.get_args(choice) if typing.get_origin(choice) is tuple else (choice,)
        if typing.get_origin(choice) is Mapping:  # words in pairs: key, value, key, value
            inner = typing.get_args(choice) * (len(values) // 2)
        elif inner[-1] is Ellipsis:
            inner = (inner[0],) * len(values)
        if len(inner) == len(values) and all(map(_reads, inner, values)):
            return True
    return False


def _reads(kind: Any, text: str) -> bool:
    if len(choices := _alternatives(kind)) > 1:
        return any(_reads(each, text) for each in choices)
    if kind in (int, float):
        try:
            kind(text)
        except ValueError:
            return False
        return True
    choices = {bool: ("True", "False"), types.NoneType: ("None",)}.get(kind) or typing.get_args(kind)
    return kind is str or text in choices


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """``int | None`` -> ``(int, NoneType)``."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
