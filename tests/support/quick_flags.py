"""Flags without tyro, which builds a parser of every field for each command line: 0.15 s of a test that asks for 5 ms.

Words mean what the types say by which training/cli/flags.py has checked them; cli/test_parse.py compares.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from training.cli import flags
from training.config.recipe import names
from training.config.run_config import RunConfig


def read(kind: type[RunConfig], *, args: Sequence[str], default: RunConfig, **_: Any) -> RunConfig:
    """As tyro.cli: ``default`` with words over it that flags.py let through."""
    for name, values in flags._groups(args):
        section, _, field = name.replace("-", "_").rpartition(".")
        found = {field: meant(names()[f"{section}.{field}".lstrip(".")], values)}
        if section:
            found = {section: dataclasses.replace(getattr(default, section), **found)}
        default = dataclasses.replace(default, **found)
    return default


def meant(kind: Any, words: list[str]) -> Any:
    """The value of a field of this type."""
    if typing.get_origin(kind) is Mapping:
        return {key: typing.get_args(kind)[1](value) for key, value in zip(words[::2], words[1::2], strict=True)}
    return None if words == ["None"] and None.__class__ in typing.get_args(kind) else flags._value(kind, words)


@pytest.fixture
def quick_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ``pytest.mark.usefixtures``, where flags are not what is tested."""
    monkeypatch.setattr(flags.tyro, "cli", read)
