"""What one layout saves, every other one restores bit for bit, and goes on as if nothing had been."""

import json
from pathlib import Path

import pytest
import torch

from campaign import some
from checkpoint_parts import (
    UNTIL,
    Parts,
    configuration,
    deepseek_on,
    on_ranks,
    restore_and_compare,
    restore_bits,
    save_and_go_on,
    sizes,
)  # fmt: skip
from parallel.config import ParallelConfig
from training.checkpoint import storage

TARGETS: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, sizes()),
    "TP4": (4, sizes(tp=4)),
    "PP4": (4, sizes(pp=4)),
    "DP4": (4, sizes(ddp_bucket_size=7000, overlap_grad_reduce=True, overlap_param_gather=True)),
    "PP2 VPP2 DP2": (4, sizes(pp=2, vpp=2)),
    "DP2 without ZeRO-1": (2, sizes(use_distributed_optimizer=False)),
    "TP2 PP2, uneven": (4, sizes(tp=2, pp=2, num_layers_in_first_pipeline_stage=3)),
    "ZeRO-3 DP4": (4, sizes(data_parallel_sharding_strategy="zero3")),
    "ZeRO-3 PP2 DP2": (4, sizes(pp=2, data_parallel_sharding_strategy="zero3")),
    "ZeRO-3 TP2SP DP2": (4, sizes(tp=2, sequence_parallel=True, data_parallel_sharding_strategy="zero3")),
    "ZeRO-2 TP2 DP2": (4, sizes(tp=2, data_parallel_sharding_strategy="zero2")),
    "HSDP": (4, sizes(data_parallel_sharding_strategy="HYBRID_SHARD", num_distributed_optimizer_instances=2)),
}


def there_and_back(parts: Parts, folder: Path, again: Path) -> None:
    """What is restored on this layout is saved on it, too, and training goes on."""
    parts.restore(folder / "checkpoints")
    parts.keep(again / "checkpoints")
    restore_and_compare(parts, folder, again / "pieces", 1e-5)


# Each mechanism once: fewer, more and other stages, buckets in another order, no shards, shards beside TP, copies.
@pytest.mark.parametrize(
    "name",
    some(TARGETS, ("one rank", "DP4", "DP2 without ZeRO-1", "TP2 PP2, uneven", "ZeRO-3 TP2SP DP2", "HSDP")),
)
def test_any_layout_restores_every_bit(name: str, llama: Path, tmp_path: Path) -> None:
    world_size, parallel = TARGETS[name]
    on_ranks(world_size, configuration(parallel), there_and_back, llama, tmp_path)
    if world_size > 1:
        on_ranks(1, configuration(sizes()), restore_bits, tmp_path, llama, tmp_path / "back")


def test_threads_restore_every_bit_too(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as a machine with cores to spare would have, and every box a large one."""
    monkeypatch.setattr(storage, "LARGE_BYTES", 1)
    monkeypatch.setattr(storage, "MOST_THREADS", 3)
    monkeypatch.setattr(storage.os, "cpu_count", lambda: 16)
    on_ranks(2, configuration(sizes(tp=2)), restore_and_compare, llama, tmp_path, 1e-5)


EXPERT_TARGETS: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, sizes()),
    "EP4": (4, sizes(expert_model_parallel_size=4, overlap_grad_reduce=True, ddp_bucket_size=7000)),
    "TP2 EP2 ETP2": (4, sizes(tp=2, sequence_parallel=True, expert_model_parallel_size=2)),
    "EP2 PP2 VPP2": (4, sizes(pp=2, vpp=2, expert_model_parallel_size=2)),
    "EP2 ZeRO-3": (4, sizes(expert_model_parallel_size=2, data_parallel_sharding_strategy="zero3")),
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the experts on each rank of a stage, whose attention is split over TP: experts and the rest differ."""
    folder = tmp_path_factory.mktemp("deepseek")
    parallel = sizes(tp=2, pp=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    on_ranks(4, deepseek_on(parallel), save_and_go_on, folder, 3)
    return folder


@pytest.mark.parametrize("name", some(EXPERT_TARGETS, ("EP2 ZeRO-3",)))
def test_experts_move_with_their_moments_to_any_layout(name: str, deepseek: Path, tmp_path: Path) -> None:
    """Moments included: megatron-core 0.19.2 cannot load those of its own checkpoint at another EP size."""
    world_size, parallel = EXPERT_TARGETS[name]
    on_ranks(world_size, deepseek_on(parallel), there_and_back, deepseek, tmp_path)
    if world_size > 1:
        on_ranks(1, deepseek_on(sizes()), restore_bits, tmp_path, deepseek, tmp_path / "back")


# ---- saved after training there, not after a restore: a campaign's but for padding

SHARDED: dict[str, tuple[int, ParallelConfig]] = {
    "ZeRO-3 DP4": TARGETS["ZeRO-3 DP4"],
    "HSDP x TP2": (
        8, sizes(tp=2, data_parallel_sharding_strategy="zero3", num_distributed_optimizer_instances=2)
    ),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("source", SHARDED)
def test_shards_restore_on_any_layout(source: str, tmp_path: Path) -> None:
    world_size, parallel = SHARDED[source]
    on_ranks(world_size, configuration(parallel), save_and_go_on, tmp_path)
    for target in ("one rank", "ZeRO-2 TP2 DP2"):
        world_size, parallel = TARGETS[target]
        on_ranks(world_size, configuration(parallel), restore_and_compare, tmp_path, tmp_path / target, 1e-5)


@pytest.mark.campaign
def test_shards_of_experts_restore_on_any_layout(tmp_path: Path) -> None:
    world_size, parallel = EXPERT_TARGETS["EP2 ZeRO-3"]
    on_ranks(world_size, deepseek_on(parallel), save_and_go_on, tmp_path)
    on_ranks(1, deepseek_on(sizes()), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


@pytest.mark.campaign
def test_experts_saved_by_one_rank_restore_on_many(tmp_path: Path) -> None:
    on_ranks(1, deepseek_on(sizes()), save_and_go_on, tmp_path)
    world_size, parallel = EXPERT_TARGETS["EP2 PP2 VPP2"]
    on_ranks(world_size, deepseek_on(parallel), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


@pytest.mark.campaign
def test_state_that_was_not_cut_restores_where_it_is(tmp_path: Path) -> None:
    parallel = sizes(tp=2, use_distributed_optimizer=False)
    on_ranks(4, configuration(parallel), save_and_go_on, tmp_path)
    on_ranks(2, configuration(sizes()), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


def with_padded_buckets(parts: Parts, folder: Path) -> None:
    """A bucket that ends in padding before another one: there mcore's fully_reshardable form goes wrong."""
    buckets = [bucket for chunk in parts.chunks for buffer in chunk.buffers for bucket in buffer.buckets[:-1]]
    if parts.ranks.is_first_stage:
        assert any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buckets)
    save_and_go_on(parts, folder, 3)


def test_tied_embeddings_in_padded_buckets_restore_on_one_rank(tmp_path: Path) -> None:
    parallel = sizes(pp=2, overlap_grad_reduce=True, ddp_bucket_size=20000)
    config = configuration(parallel, shape="gpt2_tiny")
    on_ranks(4, config, with_padded_buckets, tmp_path)
    alone = configuration(sizes(), shape="gpt2_tiny")
    on_ranks(1, alone, restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


# ---- resume in the same layout


def perturb_and_compare(parts: Parts, folder: Path) -> None:
    torch.manual_seed(1000 + parts.ranks.rank)
    restored = parts.restore(folder / "checkpoints")
    assert restored.rng_restored
    assert parts.train(UNTIL) == json.loads((folder / "losses.json").read_text())


@pytest.mark.campaign  # in a whole run, fp32: ../test_runs.py
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_layout_resumes_the_same_curve_with_dropout(dtype: str, tmp_path: Path) -> None:
    parallel = sizes(tp=2, sequence_parallel=True)
    config = configuration(parallel, dtype=dtype, hidden_dropout=0.1, attention_dropout=0.1)
    on_ranks(4, config, save_and_go_on, tmp_path)
    on_ranks(4, config, perturb_and_compare, tmp_path)
