"""Every shipped recipe runs on the ranks it names, and a configuration survives being written down."""

import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.config.recipe import STAGES, dump, dump_changed, load, sections
from training.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "slurm/recipes").glob("*.toml"))


def world_size_of(recipe: Path, config: RunConfig) -> int:
    """``nproc``, or the number in the first line's "on 64 H100"."""
    said = re.search(r"\bon ([\d,]+)\b", recipe.read_text().splitlines()[0])
    assert config.nproc or said, f"{recipe.name}: say in the first line on how many GPUs it runs, or set nproc"
    return config.nproc or int(said[1].replace(",", "") if said else 0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_has_no_problems(recipe: Path) -> None:
    config = load(recipe)
    assert config.problems(world_size_of(recipe, config)) == []


def test_the_debug_recipe_is_what_others_rely_on() -> None:
    config = load(ROOT / "slurm/recipes/debug.toml")
    assert (config.nproc, config.device, config.model.shape, config.model.seq_length) == (
        1,
        "cpu",
        "debug",
        64,
    )
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters) == (
        8,
        1,
        10,
    )
    assert (config.precision.dtype, config.data.tokenizer, config.data.paths) == ("fp32", "byte", ())
    assert config.log.log_interval == 1


def values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a field's type, whether or not a run would accept them."""
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text(st.characters(exclude_categories=("Cc", "Cs")))
    if typing.get_origin(kind) is Mapping:
        return st.dictionaries(*map(values, typing.get_args(kind)), max_size=3)
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is Ellipsis:
        return st.lists(values(typing.get_args(kind)[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(values, typing.get_args(kind)))
    if typing.get_origin(kind) is not typing.Literal and typing.get_args(kind):
        return st.one_of(*map(values, typing.get_args(kind)))
    return st.from_type(kind)


def configs() -> st.SearchStrategy[RunConfig]:
    """Any configuration that the types allow."""

    def instance(kind: type) -> st.SearchStrategy[typing.Any]:
        fields = {
            name: instance(hint) if name in sections() and kind is RunConfig else values(hint)
            for name, hint in typing.get_type_hints(kind).items()
            if kind is not RunConfig or name not in STAGES  # tests/training/config/test_stages.py
        }
        return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))

    return instance(RunConfig)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_what_is_written_is_read_back(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("recipe") / "config.toml"
    for written in (dump(config), dump_changed(config)):
        path.write_text(written)
        assert load(path) == config


def test_a_recipe_is_written_without_what_a_terminal_must_not_get() -> None:
    name = "run\x1b[31m\x9b1m\u202e 你好 👋"
    text = dump(RunConfig(run_dir=name))
    assert text.replace("\n", "").isprintable()
    assert tomllib.loads(text)["run_dir"] == name
