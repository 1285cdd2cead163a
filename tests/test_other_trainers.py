"""The tables of docs/other_trainers.md: fields that exist, each key once, and every key of Accelerate's own flags."""

import importlib.util
import re
import typing
from pathlib import Path

import pytest

from docs.other_trainers import ACCELERATE, DEEPSPEED, TORCHTITAN, Row
from training.config.recipe import sections
from training.config.run_config import RunConfig

ALL = {"DeepSpeed": DEEPSPEED, "torchtitan": TORCHTITAN, "Accelerate": ACCELERATE}
FIELDS = {
    *(f"{name}.{field}" for name, kind in sections().items() for field in typing.get_type_hints(kind)),
    *typing.get_type_hints(RunConfig),
}
WORD = re.compile(r"\b(?:parallel|precision|optimizer|train|checkpoint|log|model|data|eval|kernels)\.[a-z_0-9]+\b")


@pytest.mark.parametrize("name", ALL)
def test_every_field_exists(name: str) -> None:
    """Those of the column, and those that a note names."""
    for key, fields, note in ALL[name]:
        assert fields or note, key
        for field in (*fields, *WORD.findall(re.sub(r"\[.*?\]\(.*?\)", "", note))):
            assert field in FIELDS, (key, field)


@pytest.mark.parametrize("name", ALL)
def test_no_key_stands_twice(name: str) -> None:
    keys = [key for key, _, _ in ALL[name]]
    assert len(keys) == len(set(keys))


def flags_of(rows: tuple[Row, ...]) -> set[str]:
    return {word for key, _, _ in rows for word in re.findall(r"[a-z_0-9]+", key)}


def test_every_fsdp_flag_of_accelerate_is_there() -> None:
    spec = importlib.util.find_spec("accelerate")
    assert spec
    assert spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "commands/launch.py").read_text()
    theirs = set(re.findall(r'"--(fsdp_[a-z_0-9]+|parallelism_config_(?:dp|tp|cp|sp)_[a-z_]*size)"', source))
    assert len(theirs) > 15
    assert theirs - flags_of(ACCELERATE) == set()
