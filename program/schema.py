"""Values from outside, checked against a type: every problem at once, in words that name place, expected and found.

A type is what a dataclass' field may say: int, float, str, bool, None, a Literal, a union, a list or tuple, a Mapping,
a NamedTuple, another dataclass, or ``JSON`` for anything that JSON can spell. Standard library only: watchdogs run
without site-packages.
"""

import collections.abc
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

JSON = None | bool | int | float | str | list[Any] | dict[str, Any]
MOST_DEPTH = 64
"""Lists and objects within each other."""
INT64 = 1 << 63
SHOWN = 60
"""Characters of a value that a message shows."""


@dataclass(slots=True, frozen=True)
class Range:
    """``Annotated[int, Range(least, most)]``: both included."""

    least: int
    most: int


class Infinite:
    """``Annotated[float, Infinite]``: inf is a value, too; nan never is."""


class Unchecked:
    """``Annotated[str, Unchecked]``: control characters are no problem, as in a traceback or a path. Of a dict: what is
    in it is not looked at."""


Text = Annotated[str, Unchecked]
Foreign = Annotated[dict, Unchecked]
"""An object that another program wrote for itself: who uses a value of it checks that."""
Count = Annotated[int, Range(0, 1 << 62)]
"""Bytes, samples, iterations, positions."""


@dataclass(slots=True)
class SchemaWalk:
    """What a walk through a value knows, and what it found."""

    unknown_key: Callable[[str, type], str] | None
    """What to say of a key that a dataclass lacks: (dotted name, dataclass) -> sentence. None: such keys are ignored,
    as another version may have written them."""
    problems: list[str] = field(default_factory=list)

    def expected(self, place: str, what: str, found: str) -> None:
        self.problems.append(f"{place}{': ' if place else ''}expected {what}, found {found}.")


def structured(
    value: object, kind: Any, unknown_key: Callable[[str, type], str] | None = None
) -> tuple[Any, list[str]]:
    """``value`` as ``kind``, and every problem with it; the first means nothing where there are any."""
    reading = SchemaWalk(unknown_key)
    if problem := too_deep(value):
        return None, [problem]
    return _read(value, kind, "", reading), reading.problems


def fits(value: object, kind: Any) -> bool:
    """Whether ``value`` may stand for ``kind``."""
    return not structured(value, kind)[1]


def too_deep(value: object) -> str | None:
    """A sentence where lists and objects nest deeper than MOST_DEPTH. Without recursion, whatever the depth."""
    level: list[object] = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [item for one in level if isinstance(one, (dict, list)) for item in _items(one)]
        if not level:
            return None
    return f"lists and objects nest deeper than {MOST_DEPTH}."


def _items(value: dict[str, Any] | list[Any]) -> Iterator[object]:
    yield from value.values() if isinstance(value, dict) else value


def _read(value: object, kind: Any, place: str, reading: SchemaWalk) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _annotated(value, arguments[0], arguments[1:], place, reading)
    if kind is Any or kind == JSON:
        _check_anything(value, place, reading)
        return value
    if origin in (types.UnionType, typing.Union):
        return _union(value, arguments, place, reading)
    if origin is typing.Literal:
        if not (isinstance(value, str) and value in arguments):
            reading.expected(place, type_name(kind), shown(value))
        return value
    if origin in (tuple, list):
        return _list(value, kind, place, reading)
    if origin in (collections.abc.Mapping, dict):
        return _mapping(value, arguments[1], kind, place, reading)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(value, kind, place, reading)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple, which JSON has as a list
        hints = tuple(_hints(kind).values())
        least = len(hints) - len(getattr(kind, "_field_defaults", ()))
        if isinstance(value, (list, tuple)) and least <= len(value) < len(hints):
            hints = hints[: len(value)]
        found = _list(value, types.GenericAlias(tuple, hints), place, reading)
        return kind(*found) if found is not None else None
    return _scalar(value, kind, place, reading)


def _annotated(value: object, kind: Any, notes: tuple[Any, ...], place: str, reading: SchemaWalk) -> Any:
    if kind is float and Infinite in notes and value in (math.inf, -math.inf):
        return value
    if Unchecked in notes and isinstance(value, kind):
        return value
    before = len(reading.problems)
    found = _read(value, kind, place, reading)
    for note in notes:
        if isinstance(note, Range) and len(reading.problems) == before and not note.least <= found <= note.most:
            reading.expected(place, f"a whole number from {note.least:,} to {note.most:,}", shown(value))
    return found


def _scalar(value: object, kind: Any, place: str, reading: SchemaWalk) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) < float("inf") and (isinstance(value, float) or abs(value) < INT64):
            return float(value)
        reading.expected(place, "a finite number", shown(value))
        return None
    if type(value) is not kind:  # bool is no int, and an int is no bool
        reading.expected(place, type_name(kind), shown(value))
        return None
    if isinstance(value, int) and not -INT64 <= value < INT64:
        reading.expected(place, "a whole number of 64 bits", shown(value))
    if isinstance(value, str) and (problem := text_problem(value)):
        reading.expected(place, "text", problem)
    return value


def _union(value: object, choices: tuple[Any, ...], place: str, reading: SchemaWalk) -> Any:
    """The first choice that fits. Where only one is not None, its own problems say more than the union's."""
    tries = []
    for choice in choices:
        own = SchemaWalk(reading.unknown_key)
        found = _read(value, choice, place, own)
        if not own.problems:
            return found
        tries.append((choice, own.problems))
    real = [problems for choice, problems in tries if choice is not types.NoneType]
    if len(real) == 1 and not isinstance(value, types.NoneType):
        reading.problems += real[0]
    else:
        reading.expected(place, type_name(typing.Union[choices]), shown(value))  # noqa: UP007  made of a tuple
    return None


def _list(value: object, kind: Any, place: str, reading: SchemaWalk) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    endless = origin is list or arguments[-1] is Ellipsis
    if not isinstance(value, (list, tuple)) or not (endless or len(value) == len(arguments)):
        reading.expected(place, type_name(kind), shown(value))
        return None
    before = len(reading.problems)
    kinds = [arguments[0]] * len(value) if endless else arguments
    found = [
        _read(item, one, f"{place}[{number}]", reading)
        for number, (item, one) in enumerate(zip(value, kinds, strict=True))
    ]
    if place and len(reading.problems) > before and not any(dataclasses.is_dataclass(one) for one in kinds):
        del reading.problems[before:]  # a list of plain values is shown whole
        reading.expected(place, type_name(kind), shown(value))
    return found if origin is list else tuple(found)


def _mapping(value: object, item_kind: Any, kind: Any, place: str, reading: SchemaWalk) -> Any:
    if not isinstance(value, dict):
        reading.expected(place, type_name(kind), shown(value))
        return None
    found = {}
    for key, item in value.items():
        if problem := text_problem(key):
            reading.expected(place, "names in text", problem)
        found[key] = _read(item, item_kind, f"{place}.{key}" if place else key, reading)
    return found


def _dataclass(value: object, kind: type, place: str, reading: SchemaWalk) -> Any:
    if not isinstance(value, dict):
        what = f"a table [{place}]" if reading.unknown_key else "an object"
        reading.expected(place, what, shown(value))
        return None
    prefix, before, found = f"{place}." if place else "", len(reading.problems), {}
    hints = _hints(kind)
    for key, item in value.items():
        if key in hints:
            found[key] = _read(item, hints[key], f"{prefix}{key}", reading)
        elif reading.unknown_key is not None:
            reading.problems.append(reading.unknown_key(f"{prefix}{key}", kind))
    for one in dataclasses.fields(kind):
        missing = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if one.init and missing and one.name not in value:
            reading.problems.append(f"{prefix}{one.name} is missing.")
    return kind(**found) if len(reading.problems) == before else None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _check_anything(value: object, place: str, reading: SchemaWalk) -> None:
    """Numbers in 64 bits and finite, and text; within lists and objects, too."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif one is not None and not isinstance(one, bool):
            kind = type(one) if isinstance(one, (int, float, str)) else str
            _scalar(one, kind, place, reading)


def text_problem(text: str) -> str | None:
    """What of ``text`` no terminal and no file name should get; None where nothing is."""
    for position, character in enumerate(text if not text.isprintable() else ""):
        if _is_control(character):
            return f"a control character (U+{ord(character):04X}) at character {position + 1}"
        if _is_surrogate(character):
            return f"half a surrogate pair, or a byte that is no UTF-8, at character {position + 1}"
    return None


def without_problems(text: str) -> str:
    """``text`` with U+FFFD for each character in which ``text_problem`` sees one: a reader takes it."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if _is_control(one) or _is_surrogate(one) else one for one in text)


def _is_control(character: str) -> bool:
    return (character < " " and character not in "\n\t\r") or "\x7f" <= character < "\xa0"


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character < "\ue000"


def shown(value: object) -> str:
    """A value as it stands in a recipe, on one line and cut short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= INT64:
        return f"a number of more than {len(str(INT64)) - 1} digits"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _shown_structure(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _shown_structure(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table" if value else "an empty table"
    if isinstance(value, (list, tuple)) and len(value) > 20:
        return f"a list of {len(value)}"
    try:
        return str(value)
    except ValueError:  # digits of a number within it, which Python does not write out
        return "a list with a number of thousands of digits"


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """JSON's objects and lists, with all else within them changed."""
    if isinstance(value, Mapping):
        return {name: with_leaves(inner, change) for name, inner in value.items()}
    return [with_leaves(inner, change) for inner in value] if isinstance(value, list | tuple) else change(value)


def type_name(expected: Any) -> str:
    """A type in words that a recipe's writer knows."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(choice) for choice in arguments if choice is not types.NoneType)
    if origin is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin in (collections.abc.Mapping, dict):
        return f"a table of {type_name(arguments[1]).removeprefix('a ')}s"
    if origin in (tuple, list):
        endless = origin is list or arguments[-1] is Ellipsis
        kinds = list(dict.fromkeys(type_name(one) for one in arguments if one is not Ellipsis))
        if len(kinds) > 1:
            return f"a list of {' and '.join(map(type_name, arguments))}"
        inner = {"a whole number": "whole numbers", "a string": "strings", "a number": "numbers"}.get(
            kinds[0], kinds[0]
        )
        return f"a list of {inner}" if endless else f"a list of {len(arguments)} {inner}"
    if isinstance(expected, type) and issubclass(expected, tuple):
        return f"a list of {len(_hints(expected))}"
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        types.NoneType: "nothing",
    }
    return names.get(expected, "an object")
