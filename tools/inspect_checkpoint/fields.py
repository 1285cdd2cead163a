"""Two checkpoints' progress, state and configuration, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.inspect_checkpoint.catalogue import Checkpoint

UNSET = "unset"


@dataclass(slots=True, frozen=True)
class Field:
    """One that differs."""

    name: str
    """Dotted, with the file's section first: ``progress.iteration``, ``config.optimizer.lr``."""
    first: Any
    second: Any


def differing(one: Checkpoint, other: Checkpoint) -> list[Field]:
    """Every field of state.json and config.toml that is not the same in both, sorted within each file."""
    return [*_pairs("", one.state, other.state), *_pairs("config.", one.config, other.config)]


def _pairs(prefix: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Field]:
    first, second = dict(_flat(one, prefix)), dict(_flat(other, prefix))
    for name in dict.fromkeys([*first, *second]):
        if (values := (first.get(name, UNSET), second.get(name, UNSET)))[0] != values[1]:
            yield Field(name, *values)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf; lists of tables are counted."""
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        yield name.removesuffix("."), value
        return
    for key, entry in value.items():
        yield from _flat(entry, f"{name}{key}.")
