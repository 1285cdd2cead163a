"""dp_reshardable, Megatron-LM's default: flat memory of ranks, of which each element must find its tensor."""

import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaign import some
from checkpoint_parts import Parts, assembled, configuration, on_ranks, sizes
from models.names import canonical
from parallel.config import ParallelConfig
from tests.tools.reshard_sources import gpt_on_ranks, save
from tests.tools.test_reshard_megatron import refused, with_recipe
from tools.reshard.__main__ import main
from tools.reshard.megatron.files import TorchDist
from training.checkpoint import optimizer_state
from training.checkpoint.format.reader import FileReader
from training.checkpoint.state import read_state

STACKED = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
"""GPTModel's local modules call the norm before experts so."""

OF_BUCKETS: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 20000}


def moments(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


@torch.no_grad()
def fill(parts: Parts) -> None:
    """Moments that tell every element from every other, the same wherever a tensor is held twice."""
    for box in optimizer_state.optimizer_boxes(parts.chunks, parts.optimizer, parts.ranks):
        if ".param." not in box.key:
            whole = moments(box.key, box.global_shape)
            region = [slice(at, at + size) for at, size in zip(box.offset, box.data.shape, strict=True)]
            box.data.copy_(whole[tuple(region)])
    for part in optimizer_state.parts(parts.optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = 2


def save_flat(parts: Parts, folder: Path) -> None:
    """A checkpoint, and what the ranks hold, put together."""
    fill(parts)
    save(parts, folder / "theirs", "dp_reshardable")
    whole = assembled(parts, folder / "pieces")
    if whole is not None:
        torch.save(whole, folder / "global.pt")


def save_stacked(parts: Parts, folder: Path) -> None:
    fill(parts)
    save(parts, folder / "theirs", "dp_reshardable")


def train_and_save_flat(parts: Parts, folder: Path) -> None:
    parts.train(2)
    save_flat(parts, folder)


def check(folder: Path, target: Path) -> None:
    """Every state in the target is the ranks', bit by bit."""
    held = torch.load(folder / "global.pt")
    states = {name for name in held if " of " in name}
    with FileReader(target) as reader:
        for key in reader.tensors:
            if match := re.match(r"optimizer\.state\.(\w+)\.(.+)", key):
                name = f"{match[1]} of {canonical(match[2])}"
                states.remove(name)
                assert np.array_equal(reader.whole(key), held[name].contiguous().view(torch.uint32).numpy()), name
    assert not states
    assert read_state(target).optimizer["step"] == 2


CASES: dict[str, tuple[int, ParallelConfig, dict[str, Any]]] = {
    "fp32, DP2": (2, sizes(), {"shape": "llama2_tiny"}),
    "bf16, TP2 DP2, buckets": (4, sizes(2, **OF_BUCKETS), {"shape": "llama2_tiny", "dtype": "bf16"}),
    "tied, biases, PP2 DP2, buckets": (4, sizes(pp=2, **OF_BUCKETS), {"shape": "gpt2_tiny"}),
    "tied, biases, TP2, bf16": (2, sizes(2), {"shape": "gpt2_tiny", "dtype": "bf16"}),
    "VPP2": (2, sizes(pp=2, vpp=2), {"shape": "llama2_tiny"}),
    "EP2": (2, sizes(expert_model_parallel_size=2), {"shape": "qwen3_moe_tiny", "dtype": "bf16"}),
    "latent attention, MTP, PP2": (2, sizes(pp=2), {"shape": "deepseek_v3_tiny"}),
}


@pytest.mark.parametrize("name", some(CASES, ["bf16, TP2 DP2, buckets"]))
def test_every_moment_finds_its_tensor(name: str, tmp_path: Path) -> None:
    """Untrained, but for the moments: norms are ones, biases zeros, and only their order tells them apart."""
    world_size, parallel, model = CASES[name]
    config = configuration(parallel, **model)
    on_ranks(world_size, config, save_flat, tmp_path)
    arguments = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--verify", *with_recipe(config, tmp_path)]
    assert main(arguments) == 0
    check(tmp_path, tmp_path / "ours")


def test_stacked_blocks_of_experts(tmp_path: Path) -> None:
    """GPTModel: each block is an index of a stack, each expert another."""
    config = configuration(sizes(expert_model_parallel_size=2), shape="qwen3_moe_tiny")
    gpt_on_ranks(2, config, save_stacked, tmp_path)
    arguments = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--verify", *with_recipe(config, tmp_path)]
    assert main(arguments) == 0
    count = 0
    with FileReader(tmp_path / "ours") as reader:
        for key in reader.tensors:
            name = canonical(key.partition("optimizer.state.exp_avg.")[2] or "output_layer.weight")
            if key.startswith("optimizer.state.exp_avg.") and name.startswith("layers."):
                block, rest = re.findall(r"layers\.(\d+)\.(.*)", name)[0]
                stack = STACKED.get(rest, rest).replace("mlp.experts.", "mlp.experts.experts.")
                stack = f"optimizer.state.exp_avg.decoder.layers.{stack}"
                shape = reader.tensors[key].shape
                wanted = moments(stack, (4, *shape))[int(block)]
                assert np.array_equal(reader.whole(key), wanted.contiguous().view(torch.uint32).numpy()), key
                count += 1
    assert count == 4 * 9


# ---- what is refused


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of TP after two steps: no two tensors are equal."""
    folder = tmp_path_factory.mktemp("trained")
    on_ranks(2, LLAMA, train_and_save_flat, folder)
    return folder


LLAMA = configuration(sizes(2), shape="llama2_tiny")


def words_of(folder: Path, first: int) -> np.ndarray:
    """Where elements of the first rank's fp32 weights lie in its file, to be changed: [elements, 4] bytes."""
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.param"
    files = TorchDist(folder)
    (chunk,) = [each for each in files.tensors[key].chunks if each.offset[0] <= first < each.offset[0] + each.shape[0]]
    start = files._data_start(key, files.tensors[key], chunk) + 4 * (first - chunk.offset[0])
    files.close()
    return np.memmap(folder / chunk.file, np.uint8, "r+", offset=start, shape=(chunk.shape[0], 4))


def corrupted_inside(folder: Path) -> None:
    """Of fc2 of the last block, far from its ends."""
    words_of(folder, 12288 + 64)[3000, 0] ^= 1


def corrupted_at_its_start(folder: Path) -> None:
    words_of(folder, 12288 + 64)[0, 0] ^= 1


def shuffled(folder: Path) -> None:
    """The last two blocks' fc1 change places, which no model would have."""
    later, earlier = words_of(folder, 12288 + 64 + 5632), words_of(folder, 12288 + 64 + 5632 + 11264 + BLOCK)
    later[:], earlier[:] = earlier[:].copy(), later[:].copy()


BLOCK = 64 + 6144 + 2048 + 64 + 5632
"""Elements between a block's fc1 and that of the block before it."""

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "inside": (corrupted_inside, r"param of decoder\.layers\.7\.mlp\.linear_fc2\.weight does not round"),
    "start": (
        corrupted_at_its_start,
        r"does not round to any weight from element 12,352 on.*layers\.7\.mlp\.linear_fc2",
    ),
    "shuffled": (shuffled, r"linear_fc1\.weight.*is not the order of megatron-core's modules"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_the_weights_is_refused(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGES[name]
    shutil.copytree(trained / "theirs", tmp_path / "theirs")
    damage(tmp_path / "theirs")
    arguments = [str(tmp_path / "theirs"), str(tmp_path / "ours"), *with_recipe(LLAMA, tmp_path)]
    refused(arguments, message, capsys, tmp_path / "ours")
    assert main([*arguments, "--drop_optimizer"]) == 0


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages that both have the embedding, of more elements than are looked at to find it."""
    folder = tmp_path_factory.mktemp("tied")
    on_ranks(2, TIED, save_flat, folder)
    return folder


TIED = configuration(sizes(pp=2), shape="gpt2_tiny")


def with_a_changed_copy(tied: Path, target: Path, state: str) -> Path:
    """One bit of the later stage's embedding, far from its ends."""
    shutil.copytree(tied / "theirs", target)
    dtypes = "dtype_(torch.float32, torch.float32)"
    key = f"optimizer.distributed.dp_group_idx_1.gbuf_idx_0.{dtypes}.bucket_idx_0.{state}"
    files = TorchDist(target)
    (chunk,) = files.tensors[key].chunks
    assert chunk.shape == (384 * 64,)
    start = files._data_start(key, files.tensors[key], chunk)
    files.close()
    np.memmap(target / chunk.file, np.uint8, "r+", offset=start, shape=(chunk.shape[0], 4))[12000, 0] ^= 1
    return target


def test_a_copy_is_compared_whole(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moments of copies may drift apart, and that is said; weights that differ are not copies."""
    more = with_recipe(TIED, tmp_path)
    source = with_a_changed_copy(tied, tmp_path / "moments", "exp_avg")
    assert main([str(source), str(tmp_path / "ours"), *more]) == 0
    assert "state of embedding.word_embeddings.weight differs between the ranks" in capsys.readouterr().out
    check(tied, tmp_path / "ours")
    source = with_a_changed_copy(tied, tmp_path / "weights", "param")
    message = r"begins and ends as embedding\.word_embeddings\.weight, but is not the same weight"
    refused([str(source), str(tmp_path / "out"), *more], message, capsys, tmp_path / "out")


def test_what_training_left_is_read_whole(trained: Path, tmp_path: Path) -> None:
    arguments = [str(trained / "theirs"), str(tmp_path / "ours"), *with_recipe(LLAMA, tmp_path), "--workers", "2"]
    assert main(arguments) == 0
    check(trained, tmp_path / "ours")
