"""tools.reshard reads Megatron's mp_rank folders: every rank's file, by new and old names; nothing in them is run."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaign import param, some
from checkpoint_parts import VOCABULARY, configuration, on_ranks, sizes
from models.resolve import resolve
from tests.tools.mp_rank_folders import save_old, save_ranks, settings, train_and_save, write
from tests.tools.reshard_sources import fill_and_save, gpt_on_ranks, save
from tests.tools.test_reshard_megatron import with_recipe
from tests.tools.test_reshard_untrusted import Touch
from tools.reshard.__main__ import main
from training.checkpoint.format.reader import FileReader
from training.config.run_config import RunConfig

PREFIX = "optimizer.state.param."


def contents(folder: Path) -> dict[str, np.ndarray]:
    """Weights by key: fp32."""
    with FileReader(folder) as reader:
        plain = {key: reader.whole(key) for key in reader.tensors if not key.startswith(("optimizer.", "rng."))}
        masters = {key.removeprefix(PREFIX): reader.whole(key) for key in reader.tensors if key.startswith(PREFIX)}
    return masters | plain


def same(first: Path, second: Path) -> int:
    a, b = contents(first), contents(second)
    assert a.keys() == b.keys()
    assert [key for key in a if not np.array_equal(a[key], b[key])] == []
    return len(a)


LAYOUTS: dict[str, tuple[int, RunConfig]] = {
    "TP2 PP2 VPP2": (4, configuration(sizes(2, 2, 2), shape="llama2_tiny")),
    "TP2, tied, biases": (2, configuration(sizes(2), shape="gpt2_tiny")),
    "PP2 EP2": (4, configuration(sizes(1, 2, expert_model_parallel_size=2), shape="qwen3_moe_tiny")),
}


@pytest.mark.parametrize("name", some(LAYOUTS, ["TP2 PP2 VPP2", "PP2 EP2"]))
def test_all_ranks_files_are_one_model(name: str, tmp_path: Path) -> None:
    """The witness is our own checkpoint of the same moment."""
    world_size, config = LAYOUTS[name]
    on_ranks(world_size, config, train_and_save, tmp_path)
    (tmp_path / "theirs/latest_checkpointed_iteration.txt").write_text("2\n")
    whole = configuration(sizes(), shape=config.model.shape)
    assert main([str(tmp_path / "theirs"), str(tmp_path / "read"), "--verify", *with_recipe(whole, tmp_path)]) == 0
    assert same(tmp_path / "ours/iter_0000002", tmp_path / "read") > 15


@pytest.mark.parametrize("shape", ["llama2_tiny", "qwen3_moe_tiny"])
def test_gpt_models_blocks(shape: str, tmp_path: Path) -> None:
    """GPTModel, of local modules; the witness is its torch_dist checkpoint. With experts: EP2, no pipeline."""
    parallel = sizes(2) if shape == "llama2_tiny" else sizes(expert_model_parallel_size=2)

    def save_both(parts: Any, folder: Path) -> None:
        fill_and_save(parts, folder / "dist", "fully_reshardable")
        save_ranks(parts, folder / "ranks")

    gpt_on_ranks(2, configuration(parallel, shape=shape), save_both, tmp_path)
    given = with_recipe(configuration(sizes(), shape=shape), tmp_path)
    for name in ("dist", "ranks"):
        assert main([str(tmp_path / name), str(tmp_path / f"from_{name}"), "--drop_optimizer", *given]) == 0
    assert same(tmp_path / "from_dist", tmp_path / "from_ranks") > 25


# ---- the names and orders of before megatron-core


GPT2 = configuration(sizes(), shape="gpt2_tiny")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in our format, and the recipe of their model."""
    folder = tmp_path_factory.mktemp("gpt2")
    on_ranks(1, GPT2, train_and_save, folder)
    given = with_recipe(GPT2, folder)
    assert main([str(folder / "theirs/iter_0000002"), str(folder / "weights"), *given]) == 0
    return folder


@pytest.mark.parametrize(
    ("version", "tp", "pp", "more"),
    [
        (0, 2, 1, {"attention": "attention", "old_format": True}),
        (1.0, 2, 2, {}),
        (2.0, 1, 2, {"attention": "attention"}),
        param((3.0, 2, 1, {"old_format": True})),
    ],
)
def test_old_names_and_orders(
    version: float, tp: int, pp: int, more: dict[str, Any], gpt2: Path, tmp_path: Path
) -> None:
    save_old(gpt2 / "weights", resolve(GPT2.model, VOCABULARY), tmp_path / "old", version, tp, pp, **more)
    given = [str(tmp_path / "old"), str(tmp_path / "read"), "--recipe", str(gpt2 / "recipe.toml")]
    assert main([*given, "--verify"]) == 0
    assert same(gpt2 / "weights", tmp_path / "read") > 20


# ---- what is refused


def lose_a_rank(folder: Path, _: Path) -> None:
    shutil.rmtree(folder / "mp_rank_01")


def cut(folder: Path, _: Path) -> None:
    path = folder / "mp_rank_01/model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-5000])


def flip_a_bit(folder: Path, _: Path) -> None:
    path = folder / "mp_rank_01/model_optim_rng.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def fifo(folder: Path, _: Path) -> None:
    (folder / "mp_rank_01/model_optim_rng.pt").unlink()
    os.mkfifo(folder / "mp_rank_01/model_optim_rng.pt")


def code_in_args(folder: Path, witness: Path) -> None:
    write(folder / "mp_rank_01/model_optim_rng.pt", {"args": settings(attack=Touch(witness)), "model": {}})


def code_in_the_old_format(folder: Path, witness: Path) -> None:
    write(folder / "mp_rank_01/model_optim_rng.pt", {"model": Touch(witness)}, old_format=True)


class Forged:
    """A tensor that claims more elements than its storage has."""

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.zeros(8).storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, (384, 64), (64, 1), False, {})


def beyond_its_storage(folder: Path, _: Path) -> None:
    content = {"model": {"embedding.word_embeddings.weight": Forged()}}
    write(folder / "mp_rank_01/model_optim_rng.pt", content)


DAMAGES: dict[Callable[[Path, Path], None], str] = {
    lose_a_rank: "args say TP 2, but the ranks there are 1",
    cut: "not what torch.save writes .*Copy it again",
    flip_a_bit: "is damaged: 1 of its storages",
    fifo: "expected a regular file, found a FIFO",
    beyond_its_storage: "larger than its 32 bytes",
    code_in_args: r"refused, nothing was run: it names posix\.system",
    code_in_the_old_format: r"refused, nothing was run: it names posix\.system",
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    on_ranks(2, configuration(sizes(2), shape="llama2_tiny"), train_and_save, folder)
    with_recipe(configuration(sizes(), shape="llama2_tiny"), folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(
    damage: Callable[[Path, Path], None], two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_ranks / "theirs/iter_0000002", tmp_path / "theirs")
    damage(tmp_path / "theirs", tmp_path / "executed")
    given = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--recipe", str(two_ranks / "recipe.toml")]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert re.search(DAMAGES[damage], said)
    assert said.count("\n") == 1
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "ours").exists()


def test_a_hybrid_is_refused_by_name(two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A matrix of two ranks' mixers, one below the other, would be another one."""
    for shape in ("nemotron_h_tiny", "qwen35_tiny"):
        (tmp_path / "hybrid.toml").write_text(f'[model]\nshape = "{shape}"\nvocab_size = 257\n')
        folder = two_ranks / "theirs/iter_0000002"
        given = [str(folder), str(tmp_path / "ours"), "--recipe", str(tmp_path / "hybrid.toml")]
        assert main(given) == 2
        assert "such mp_rank folders are not read. Save the checkpoint" in capsys.readouterr().err


def test_a_recipe_of_another_model(two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in (
        ({"num_layers": 3}, "has no place for decoder.layers.6"),
        ({"ffn_hidden_size": 64}, "differs in decoder.layers.1.mlp.linear_fc1.weight"),
        ({"add_qkv_bias": True}, "lacks layers.0.self_attention.linear_qkv.bias"),
    ):
        given = with_recipe(configuration(sizes(), shape="llama2_tiny", **changes), tmp_path)
        assert main([str(two_ranks / "theirs/iter_0000002"), str(tmp_path / "ours"), *given]) == 2
        assert message in capsys.readouterr().err


# ---- torch_dist, of optimizers that are not the distributed one


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], ["bf16"]))
def test_plain_optimizers_of_torch_dist(dtype: str, tmp_path: Path) -> None:
    """FP32Optimizer has no other fp32 weights than the model's; Float16Optimizer calls them fp32_param."""

    def save_both(parts: Any, folder: Path) -> None:
        parts.train(2)
        parts.keep(folder / "ours")
        save(parts, folder / "theirs", "fully_reshardable")

    parallel = sizes(2, use_distributed_optimizer=False)
    on_ranks(2, configuration(parallel, dtype, shape="llama2_tiny"), save_both, tmp_path)
    given = with_recipe(configuration(sizes(), dtype, shape="llama2_tiny"), tmp_path)
    assert main([str(tmp_path / "theirs"), str(tmp_path / "read"), "--verify", *given]) == 0
    with FileReader(tmp_path / "ours/iter_0000002") as ours, FileReader(tmp_path / "read") as read:
        states = [key for key in ours.tensors if key.startswith("optimizer.state.")]
        assert len(states) > 60
        assert {key for key in read.tensors if key.startswith("optimizer.state.")} == set(states)
        assert [key for key in states if not np.array_equal(ours.whole(key), read.whole(key))] == []
    state = (tmp_path / "read/state.json").read_text()
    assert '"step": 2' in state or '"step":2' in state
