"""What keys of a ``config.json`` hold, and how each kind of model's are read and written. No torch here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.shapes import GPTShape

Config = dict[str, Any]
Read = Callable[[Config, dict[str, Any]], None]
"""Takes keys from a configuration and puts fields into the shape's. Raises Unsupported."""
Write = Callable[[GPTShape], Config]


class Unsupported(Exception):
    """A key of a configuration whose value means a model that we do not have."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(f"{key} = {found!r}: expected {expected}")


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """How one model_type's configuration is read and written."""

    model_class: str
    """Transformers' class, as ``architectures`` has it."""
    numbers: Mapping[str, str]
    """Their key -> our field, the same number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means that is left out, as their configuration classes have it."""
    switches: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Their key -> its supported values; the first is written."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that every such model has."""
    parts: tuple[tuple[Read, Write], ...] = ()
    """What is not one number for one number."""


def is_number(value: object) -> bool:
    """Finite, and neither a truth value nor text."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object, least: int) -> bool:
    """A whole number, ``least`` or more, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def take(left: Config, key: str, default: int, *, least: int) -> int:
    """A whole number that may be left out or null. Raises Unsupported for anything else, or less than ``least``."""
    value = left.pop(key, None)
    if value is None:
        return default
    if not is_whole(value, least):
        raise Unsupported(key, value, f"a whole number, {least} or more")
    return int(value)


def take_list(left: Config, key: str) -> list[Any]:
    """A list that may be left out or null. Raises Unsupported for anything else."""
    value = left.pop(key, None)
    if value is not None and not isinstance(value, list):
        raise Unsupported(key, value, "a list")
    return value or []
