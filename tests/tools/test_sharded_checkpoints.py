"""Tools that read checkpoints, on one that ranks with weights in shards have written: nothing tells it from another."""

from pathlib import Path

import numpy as np
import pytest

from checkpoint_parts import Parts, configuration, on_ranks, sizes
from tests.tools.test_reshard import hashes, same, source_of, tensors, train_and_save
from tools.convert.__main__ import main as convert
from tools.inspect_checkpoint.__main__ import main as inspect
from tools.reshard.__main__ import main as reshard
from training.config import recipe

pytestmark = pytest.mark.campaign
"""In the suite tests/tools/test_parity_against.py exports one of such ranks."""
SHARDS = {"data_parallel_sharding_strategy": "HYBRID_SHARD", "num_distributed_optimizer_instances": 2}


def pass_on(parts: Parts, source: Path, folder: Path, toml: str) -> None:
    parts.restore(source / "checkpoints")
    parts.keep(folder / "checkpoints", texts={"config.toml": toml})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on one rank, and its checkpoint as four ranks with experts in two copies of shards save it again."""
    whole, split = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("split")
    one = configuration(sizes(), dtype="bf16", shape="qwen3_moe_tiny")
    four = configuration(sizes(expert_model_parallel_size=2, **SHARDS), dtype="bf16", shape="qwen3_moe_tiny")
    on_ranks(1, one, train_and_save, whole, recipe.dump(one))
    on_ranks(4, four, pass_on, whole, split, recipe.dump(one))
    return whole, split


def held(folder: Path) -> dict[str, np.ndarray]:
    """Without random states, of which every rank has one."""
    return {key: values for key, values in tensors(folder).items() if not key.startswith("rng.")}


def test_it_holds_the_same(runs: tuple[Path, Path]) -> None:
    whole, split = map(source_of, runs)
    assert same(held(whole), held(split))
    assert len(list(split.glob("rank_*.bin"))) == 4


def test_it_is_resharded(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert reshard([str(runs[1]), str(tmp_path / "files"), "--max_file_size", "200KB", "--verify"]) == 0
    assert same(held(source_of(runs[0])), held(tmp_path / "files"))


def test_it_is_exported(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for run, name in zip(runs, ("whole", "split"), strict=True):
        assert convert(["export", "--no_logits", str(source_of(run)), str(tmp_path / name)]) == 0
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "split")


def test_it_is_averaged(runs: tuple[Path, Path], tmp_path: Path) -> None:
    whole, split = map(source_of, runs)
    assert inspect(["average", str(tmp_path / "mean"), str(whole), str(split)]) == 0
    prefix = "optimizer.state.param."
    masters = {key.removeprefix(prefix): values for key, values in held(whole).items() if key.startswith(prefix)}
    found = held(tmp_path / "mean")
    assert masters and all(np.array_equal(found[key], values) for key, values in masters.items())
