"""Booleans of a command line, the same in every program: `--flag`, `--flag true`, `--flag=false`, `--no-flag`."""

import dataclasses
import sys
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import tyro

TRUTH = {"true": True, "false": False}


class Switch(NamedTuple):
    """A boolean field of a dataclass."""

    is_optional: bool
    """Whether it may be None as well."""
    has_negation: bool
    """Whether tyro has a `--no-flag` for it."""


def truth(text: str) -> bool | None:
    """What a word says, in letters of any case; None where it is neither true nor false."""
    return TRUTH.get(text.casefold())


def negated(name: str, known: Collection[str]) -> str | None:
    """The flag of `known` that `no_flag`, `section.no_flag` or `no_section.flag` sets to false; None where it is none.

    Dashes are underscores in all of them.
    """
    section, dot, last = name.rpartition(".")
    inner = f"{section}{dot}{last.removeprefix('no_')}" if last.startswith("no_") else ""
    return next((one for one in (inner, name.removeprefix("no_")) if one != name and one in known), None)


def switches(kind: Any, arguments: Sequence[str] = (), prefix: str = "") -> dict[str, Switch]:
    """The boolean flags of a dataclass by their names; of a union, those of the one that a word of ``arguments``
    chooses."""
    base, marks = _unwrapped(kind)
    if typing.get_origin(base) in (types.UnionType, typing.Union):
        by_word = {mark.name: one for one in typing.get_args(base) for mark in _unwrapped(one)[1] if _named(mark)}
        chosen = next((by_word[word] for word in arguments if word in by_word), None)
        return {} if chosen is None else switches(chosen, arguments, prefix)
    found: dict[str, Switch] = {}
    hints = typing.get_type_hints(base, include_extras=True) if dataclasses.is_dataclass(base) else {}
    for name, hint in hints.items():
        inner, marks = _unwrapped(hint)
        flag = prefix + next((mark.name for mark in marks if _named(mark)), name)
        choices = set(typing.get_args(inner)) if typing.get_origin(inner) is types.UnionType else {inner}
        if bool in choices and choices <= {bool, types.NoneType}:
            found[flag] = Switch(types.NoneType in choices, tyro.conf.FlagCreatePairsOff not in marks)
        elif dataclasses.is_dataclass(inner):
            found |= switches(inner, arguments, prefix if tyro.conf.OmitArgPrefixes in marks else f"{flag}.")
    return found


def as_tyro_has_them(arguments: Sequence[str], known: dict[str, Switch], program: str) -> list[str]:
    """A command line whose booleans are written as tyro reads them.

    The word `true` or `false` behind a boolean flag is its value. Another value behind `=` ends the process with exit
    code 2.
    """
    words: list[str] = []
    left = list(reversed(arguments))
    while left:
        word = left.pop()
        flag, equals, value = word.removeprefix("--").partition("=")
        name = flag.replace("-", "_")
        own = name if name in known else negated(name, known)
        if not word.startswith("--") or own is None:
            words.append(word)
            continue
        is_true: bool | None = own == name
        if equals and known[own].is_optional and value == "None":
            words.append(word)
            continue
        if equals:
            is_true = truth(value) if own == name else None
            if is_true is None:
                expected = "true or false" if own == name else f"no value, as --{own}=false has one"
                print(f"{program}: --{flag}: expected {expected}, found {value[:100]!r}.", file=sys.stderr)
                raise SystemExit(2)
        elif own == name and left and truth(left[-1]) is not None:
            is_true = truth(left.pop())
        elif own == name and known[own].is_optional and left and left[-1] == "None":
            words += [word, left.pop()]
            continue
        words = [*_without(words, own, known[own], bool(is_true)), *_written(own, known[own], bool(is_true))]
    return words


def _without(words: list[str], name: str, switch: Switch, is_true: bool) -> list[str]:
    """Where tyro has no way to say false, an earlier true is taken back."""
    return words if is_true or switch.has_negation else [word for word in words if word != f"--{name}"]


def _written(name: str, switch: Switch, is_true: bool) -> Iterator[str]:
    section, dot, last = name.rpartition(".")
    if switch.is_optional:
        yield from (f"--{name}", str(is_true))
    elif is_true:
        yield f"--{name}"
    elif switch.has_negation:
        yield f"--{section}{dot}no-{last}"


def _named(mark: Any) -> bool:
    """Whether an annotation gives a flag or a subcommand another name."""
    return isinstance(getattr(mark, "name", None), str)


def _unwrapped(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these."""
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        base, more = _unwrapped(inner)
        return base, (*marks, *more)
    return kind, ()
