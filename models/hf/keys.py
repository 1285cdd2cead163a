"""What keys of a ``config.json`` hold, and how each kind of model's are read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.shapes import GPTShape
from models.spans import Span, shown

Config = dict[str, Any]
Read = Callable[[Config, dict[str, Any]], None]
"""Takes keys from a configuration and puts fields into the shape's. Raises Unsupported."""
Write = Callable[[GPTShape], Config]


class Unsupported(Exception):
    """A key of a configuration whose value means a model that we do not have."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(f"{key} = {shown(found)}: expected {expected}")


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
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key -> the key, as ``attribute_map`` of their configuration class has it."""
    parts: tuple[tuple[Read, Write], ...] = ()
    """What is not one number for one number."""


def pop_number(left: Config, key: str, default: int, span: Span) -> int:
    """A whole number that may be left out or null. Raises Unsupported for anything else, or one out of ``span``."""
    value = left.pop(key, None)
    if value is None:
        return default
    if value not in span:
        raise Unsupported(key, value, str(span))
    return int(value)


def take_bool(left: Config, key: str, default: bool) -> bool:
    """true or false, which may be left out. Raises Unsupported for anything else."""
    value = left.pop(key, default)
    if not isinstance(value, bool):
        raise Unsupported(key, value, "true or false")
    return value


def take_list(left: Config, key: str) -> list[Any]:
    """A list that may be left out or null. Raises Unsupported for anything else."""
    value = left.pop(key, None)
    if value is not None and not isinstance(value, list):
        raise Unsupported(key, value, "a list")
    return value or []


def is_one_of(value: object, choices: tuple[Any, ...]) -> bool:
    """Whether ``value`` is one of these; 1 is no true, and 0 no false."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)
