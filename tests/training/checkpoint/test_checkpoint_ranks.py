"""Checkpoints on ranks: what one layout saves, every other one restores bit for bit."""

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.init import global_tensors
from models.names import canonical
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.ddp import unwrap
from parallel.errors import UserError
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks
from tests.faults.trainer import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEQ_LENGTH, VOCABULARY, FaultTrainer
from training import checkpoint, train
from training.checkpoint import folders, optimizer_state, saving, storage
from training.checkpoint.format.tables import IncompleteError
from training.checkpoint.model_state import model_boxes
from training.config.run_config import CheckpointConfig, RunConfig, TrainConfig
from training.progress import Progress

SAVED_AT, UNTIL = 2, 4
OWN = CheckpointConfig()


def configuration(parallel: ParallelConfig, dtype: str = "fp32", **model: Any) -> RunConfig:
    return RunConfig(
        parallel=parallel,
        model=ModelConfig(**{"seq_length": SEQ_LENGTH, "vocab_size": VOCABULARY, **model}),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, seed=7),
    )


def sizes(tp: int = 1, pp: int = 1, vpp: int | None = None, **more: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **more,
    )


@dataclasses.dataclass
class Parts(FaultTrainer):
    """A rank's model and optimizer, and how far they have come."""

    def keep(self, root: Path, **more: Any) -> Path:
        """A checkpoint of this moment; of all, three are kept."""
        return self.save(root, checkpoint.Contents(**{"keep": 3, **more}))

    def restore(self, root: Path, config: CheckpointConfig = OWN) -> checkpoint.Restored:
        restored = checkpoint.restore(root, config, self.chunks, self.optimizer, self.ranks)
        assert restored is not None
        self.progress = restored.progress
        return restored


def on_ranks(world_size: int, config: RunConfig, check: Callable[..., None], *args: Any) -> None:
    """Call ``check(parts, *args)`` on every rank of a layout."""

    def run(identity: Identity) -> None:
        layout = config.layout(world_size)
        with groups.start(
            layout, identity, device="cpu", seed=config.train.seed, timeout_minutes=1, parallel=config.parallel
        ) as ranks:
            chunks, optimizer = train.build_parts(config, resolve(config.model, VOCABULARY), ranks)
            check(Parts(ranks, chunks, optimizer), *args)

    run_ranks(world_size, run)


# ---- global tensors, put together from what the ranks hold


def held(parts: Parts) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """(name, global shape, offset, data) of each piece of weights, as mcore has them, and of their state."""
    for box in model_boxes(parts.chunks, parts.ranks):
        yield canonical(box.key), box.global_shape, box.offset, box.data
    for box in optimizer_state.optimizer_boxes(parts.chunks, parts.optimizer, parts.ranks):
        state, key = box.key.removeprefix(optimizer_state.PREFIX).split(".", 1)
        yield f"{state} of {canonical(key)}", box.global_shape, box.offset, box.data


def assembled(parts: Parts, folder: Path) -> dict[str, torch.Tensor] | None:
    """On rank 0: every global tensor. Copies must agree bit for bit, and each element is some rank's."""
    folder.mkdir(parents=True, exist_ok=True)
    with checkpoint.settled(parts.chunks):
        pieces = [(name, shape, offset, data.detach().clone()) for name, shape, offset, data in held(parts)]
    torch.save(pieces, folder / f"{parts.ranks.rank}.pt")
    dist.barrier()
    if parts.ranks.rank:
        return None
    whole: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.pt"):
        for name, shape, offset, data in torch.load(path):
            tensor = whole.setdefault(name, torch.full(shape, math.nan, dtype=data.dtype))
            view = tensor[tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))]
            assert bool((view.isnan() | (view == data)).all()), f"copies of {name} differ"
            view.copy_(data)
    assert not [name for name, tensor in whole.items() if bool(tensor.isnan().any())]
    return whole


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


# ---- save in one layout, restore in every other


def save_and_go_on(parts: Parts, folder: Path) -> None:
    """Leave a checkpoint of iteration ``SAVED_AT``, the global tensors in it, and the losses that follow."""
    parts.train(SAVED_AT)
    parts.keep(folder / "checkpoints", entries={"note": [1, None, 0.1]}, texts={"config.toml": "x = 1\n"})
    whole = assembled(parts, folder / "source")
    losses = parts.train(UNTIL)
    if whole is not None:
        torch.save(whole, folder / "global.pt")
        (folder / "losses.json").write_text(json.dumps(losses))


def restore_and_compare(parts: Parts, folder: Path, pieces: Path, tolerance: float) -> None:
    restored = parts.restore(folder / "checkpoints")
    assert restored.progress == Progress(iteration=SAVED_AT, consumed_samples=SAVED_AT * GLOBAL_BATCH_SIZE)
    assert restored.optimizer_restored
    assert restored.rng_restored == (restored.layout_before == parts.ranks.layout)
    assert restored.entries == {"note": [1, None, 0.1]}
    whole = assembled(parts, pieces)
    if whole is not None:
        assert differing(whole, torch.load(folder / "global.pt")) == []
    assert parts.train(UNTIL) == pytest.approx(json.loads((folder / "losses.json").read_text()), rel=tolerance)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TP2 PP2 DP2, with sequence parallelism, several buckets, and parameters that are gathered late."""
    folder = tmp_path_factory.mktemp("llama")
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    on_ranks(8, configuration(sizes(tp=2, pp=2, sequence_parallel=True, **overlap)), save_and_go_on, folder)
    return folder


TARGETS: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, sizes()),
    "TP4": (4, sizes(tp=4)),
    "PP4": (4, sizes(pp=4)),
    "DP4": (4, sizes(ddp_bucket_size=7000, overlap_grad_reduce=True, overlap_param_gather=True)),
    "PP2 VPP2 DP2": (4, sizes(pp=2, vpp=2)),
    "DP2 without ZeRO-1": (2, sizes(use_distributed_optimizer=False)),
    "TP2 PP2, uneven": (4, sizes(tp=2, pp=2, num_layers_in_first_pipeline_stage=3)),
    "ZeRO-3 DP4": (4, sizes(data_parallel_sharding_strategy="zero3")),
    "ZeRO-2 TP2 DP2": (4, sizes(tp=2, data_parallel_sharding_strategy="zero2")),
    "HSDP": (4, sizes(data_parallel_sharding_strategy="HYBRID_SHARD", num_distributed_optimizer_instances=2)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_any_layout_restores_every_bit(name: str, llama: Path, tmp_path: Path) -> None:
    world_size, parallel = TARGETS[name]
    on_ranks(world_size, configuration(parallel), restore_and_compare, llama, tmp_path, 1e-5)


def test_threads_restore_every_bit_too(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as a machine with cores to spare would have, and every box a large one."""
    monkeypatch.setattr(storage, "LARGE_BYTES", 1)
    monkeypatch.setattr(storage, "MOST_THREADS", 3)
    monkeypatch.setattr(storage.os, "cpu_count", lambda: 16)
    on_ranks(2, configuration(sizes(tp=2)), restore_and_compare, llama, tmp_path, 1e-5)


def deepseek_on(parallel: ParallelConfig) -> RunConfig:
    """Latent attention, experts with a bias that no gradient moves, shared experts, multi-token prediction."""
    return configuration(parallel, shape="deepseek_v3_tiny")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the experts on each rank of a stage, whose attention is split over TP: experts and the rest differ."""
    folder = tmp_path_factory.mktemp("deepseek")
    parallel = sizes(tp=2, pp=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    on_ranks(4, deepseek_on(parallel), save_and_go_on, folder)
    return folder


EXPERT_TARGETS: dict[str, tuple[int, ParallelConfig]] = {
    "one rank": (1, sizes()),
    "EP4": (4, sizes(expert_model_parallel_size=4, overlap_grad_reduce=True, ddp_bucket_size=7000)),
    "TP2 EP2 ETP2": (4, sizes(tp=2, sequence_parallel=True, expert_model_parallel_size=2)),
    "EP2 PP2 VPP2": (4, sizes(pp=2, vpp=2, expert_model_parallel_size=2)),
    "EP2 ZeRO-3": (4, sizes(expert_model_parallel_size=2, data_parallel_sharding_strategy="zero3")),
}


@pytest.mark.parametrize("name", EXPERT_TARGETS)
def test_experts_move_with_their_moments_to_any_layout(name: str, deepseek: Path, tmp_path: Path) -> None:
    """Moments included: megatron-core 0.19.2 cannot load those of its own checkpoint at another EP size."""
    world_size, parallel = EXPERT_TARGETS[name]
    on_ranks(world_size, deepseek_on(parallel), restore_and_compare, deepseek, tmp_path, 1e-5)


SHARDED: dict[str, tuple[int, ParallelConfig]] = {
    "ZeRO-3 DP4": TARGETS["ZeRO-3 DP4"],
    "HSDP x TP2": (
        8, sizes(tp=2, data_parallel_sharding_strategy="zero3", num_distributed_optimizer_instances=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", SHARDED)
def test_shards_restore_on_any_layout(source: str, tmp_path: Path) -> None:
    world_size, parallel = SHARDED[source]
    on_ranks(world_size, configuration(parallel), save_and_go_on, tmp_path)
    for target in ("one rank", "TP2 PP2, uneven", "ZeRO-2 TP2 DP2"):
        world_size, parallel = TARGETS[target]
        on_ranks(world_size, configuration(parallel), restore_and_compare, tmp_path, tmp_path / target, 1e-5)


def test_shards_of_experts_restore_on_any_layout(tmp_path: Path) -> None:
    world_size, parallel = EXPERT_TARGETS["EP2 ZeRO-3"]
    on_ranks(world_size, deepseek_on(parallel), save_and_go_on, tmp_path)
    for target in ("one rank", "EP2 PP2 VPP2"):
        world_size, parallel = EXPERT_TARGETS[target]
        on_ranks(world_size, deepseek_on(parallel), restore_and_compare, tmp_path, tmp_path / target, 1e-5)


def test_experts_saved_by_one_rank_restore_on_many(tmp_path: Path) -> None:
    on_ranks(1, deepseek_on(sizes()), save_and_go_on, tmp_path)
    world_size, parallel = EXPERT_TARGETS["EP2 PP2 VPP2"]
    on_ranks(world_size, deepseek_on(parallel), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


def test_state_that_was_not_cut_restores_where_it_is(tmp_path: Path) -> None:
    parallel = sizes(tp=2, use_distributed_optimizer=False)
    on_ranks(4, configuration(parallel), save_and_go_on, tmp_path)
    on_ranks(2, configuration(sizes()), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-5)


def with_padded_buckets(parts: Parts, folder: Path) -> None:
    """A bucket that ends in padding before another one: there mcore's fully_reshardable form goes wrong."""
    buckets = [bucket for chunk in parts.chunks for buffer in chunk.buffers for bucket in buffer.buckets[:-1]]
    if parts.ranks.is_first_stage:
        assert any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buckets)
    save_and_go_on(parts, folder)


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_layout_resumes_the_same_curve_with_dropout(dtype: str, tmp_path: Path) -> None:
    parallel = sizes(tp=2, sequence_parallel=True)
    config = configuration(parallel, dtype=dtype, hidden_dropout=0.1, attention_dropout=0.1)
    on_ranks(4, config, save_and_go_on, tmp_path)
    on_ranks(4, config, perturb_and_compare, tmp_path)


# ---- precisions


def restore_bits(parts: Parts, folder: Path, pieces: Path) -> None:
    parts.restore(folder / "checkpoints")
    whole = assembled(parts, pieces)
    if whole is not None:
        assert differing(whole, torch.load(folder / "global.pt")) == []


def restore_in_another_dtype(parts: Parts, folder: Path, dtype: torch.dtype) -> None:
    """The weights come from the optimizer's fp32 ones, not from the rounded ones of the bf16 model."""
    parts.restore(folder / "checkpoints")
    saved = torch.load(folder / "global.pt")
    for entry in global_tensors(unwrap(parts.chunks[0])):
        name = canonical(entry.key)
        place = tuple(slice(at, at + size) for at, size in zip(entry.global_offset, entry.data.shape, strict=True))
        assert torch.equal(entry.data, saved[f"param of {name}"][place].to(dtype))


@pytest.mark.parametrize("zero", [True, False])
def test_bf16_weights_and_their_fp32_originals_restore(zero: bool, tmp_path: Path) -> None:
    on_ranks(4, configuration(sizes(tp=2, use_distributed_optimizer=zero), dtype="bf16"), save_and_go_on, tmp_path)
    on_ranks(
        2,
        configuration(sizes(use_distributed_optimizer=not zero), dtype="bf16"),
        restore_bits,
        tmp_path,
        tmp_path / "x",
    )
    on_ranks(2, configuration(sizes()), restore_in_another_dtype, tmp_path, torch.float32)
    on_ranks(2, configuration(sizes(), dtype="fp16"), restore_in_another_dtype, tmp_path, torch.float16)


def overflow_and_save(parts: Parts, root: Path) -> None:
    first = float(parts.optimizer.get_loss_scale())
    parts.train(4)
    assert float(parts.optimizer.get_loss_scale()) < first
    parts.keep(root)


def restore_loss_scale(parts: Parts, root: Path) -> None:
    parts.restore(root)
    saved = json.loads((root / "iter_0000004/state.json").read_text())["optimizer"]
    (part,) = optimizer_state.parts(parts.optimizer)
    assert float(parts.optimizer.get_loss_scale()) == saved["grad_scaler"]["scale"] == 2.0**30
    assert part.grad_scaler._hysteresis_tracker == saved["grad_scaler"]["hysteresis_tracker"]
    assert {group["step"] for group in parts.optimizer.param_groups} == {saved["step"]} == {0}


def test_fp16_loss_scale_restores_also_before_any_update(tmp_path: Path) -> None:
    config = configuration(sizes(), dtype="fp16")
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, initial_loss_scale=2.0**33))
    on_ranks(1, config, overflow_and_save, tmp_path)
    on_ranks(1, config, restore_loss_scale, tmp_path)


# ---- --checkpoint.load and what of it


def moments(parts: Parts) -> list[torch.Tensor]:
    boxes = optimizer_state.optimizer_boxes(parts.chunks, parts.optimizer, parts.ranks)
    return [box.data for box in boxes if ".exp_avg." in box.key]


def load_weights_only(parts: Parts, folder: Path, pieces: Path, config: CheckpointConfig) -> None:
    restored = parts.restore(pieces / "own", config)
    assert not restored.optimizer_restored
    assert restored.progress.iteration == (0 if config.finetune else SAVED_AT)
    assert not any(bool(moment.any()) for moment in moments(parts))
    whole, saved = assembled(parts, pieces), torch.load(folder / "global.pt")
    assert whole is not None
    for name in (name for name in saved if " of " not in name):
        assert torch.equal(whole[name], saved[name]), name
        assert torch.equal(whole[f"param of {name}"].to(whole[name].dtype), whole[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("option", ["finetune", "no_load_optim"])
def test_weights_alone(option: str, dtype: str, llama: Path, tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(llama), **{option: True})  # type: ignore[arg-type]
    if dtype == "fp32":
        on_ranks(1, configuration(sizes()), load_weights_only, llama, tmp_path, config)
    else:
        on_ranks(1, configuration(sizes(), dtype="bf16"), finetune_in_bf16, llama, tmp_path, config)


def finetune_in_bf16(parts: Parts, folder: Path, pieces: Path, config: CheckpointConfig) -> None:
    """The optimizer's fp32 weights are those of the model, so the first update does not undo the load."""
    parts.restore(pieces / "own", config)
    whole, saved = assembled(parts, pieces), torch.load(folder / "global.pt")
    assert whole is not None
    for name in (name for name in saved if " of " not in name):
        assert torch.equal(whole[name], saved[name].bfloat16())
        assert torch.equal(whole[f"param of {name}"], whole[name].float())


def own_checkpoint_wins(parts: Parts, root: Path) -> None:
    config = CheckpointConfig(load=str(root / "other"), finetune=True)
    assert checkpoint.restore(root / "own", OWN, parts.chunks, parts.optimizer, parts.ranks) is None
    parts.train(1)
    parts.keep(root / "other")
    assert parts.restore(root / "own", config).progress.iteration == 0
    parts.train(2)
    parts.keep(root / "own")
    restored = parts.restore(root / "own", config)
    assert (restored.progress.iteration, restored.optimizer_restored, restored.rng_restored) == (
        2,
        True,
        True,
    )
    assert restored.path == root / "own/iter_0000002"
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert parts.restore(root / "none", CheckpointConfig(load=str(root / "own"))).rng_restored
    assert torch.equal(torch.get_rng_state(), state)
    assert not parts.restore(root / "none", CheckpointConfig(load=str(root / "own"), no_load_rng=True)).rng_restored


def test_a_run_continues_its_own_checkpoint_whole_whatever_it_started_from(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), own_checkpoint_wins, tmp_path)


# ---- what does not fit


def refuse(parts: Parts, folder: Path, expected: list[str]) -> None:
    before = [param.detach().clone() for chunk in parts.chunks for param in chunk.parameters()]
    with pytest.raises(UserError) as caught:
        parts.restore(folder / "checkpoints")
    for text in [str(folder), *expected]:
        assert text in str(caught.value)
    after = [param for chunk in parts.chunks for param in chunk.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hidden size": (
        {"hidden_size": 128},
        ["[64, 64] in the checkpoint and [128, 128] here", "model.hidden_size"],
    ),
    "padding": (
        {"make_vocab_size_divisible_by": 512},
        [
            "word_embeddings.weight is [384, 64] in the checkpoint and [512, 64] here",
            "make_vocab_size_divisible_by",
        ],
    ),
    "fewer layers": (
        {"num_layers": 2},
        [
            "The checkpoint has layers.2.",
            "which this model lacks (and 11 more)",
            "Probably different: model.num_layers",
        ],
    ),
    "biases": (
        {"add_bias_linear": True},
        ["The checkpoint lacks layers.0.", ".bias", "model.add_bias_linear"],
    ),
    "tied": ({"untie_embeddings_and_output_weights": False}, ["has output_layer.weight", "untie_embeddings"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_another_model_is_refused_by_every_rank_before_a_parameter_is_touched(name: str, llama: Path) -> None:
    model, expected = MISFITS[name]
    on_ranks(2, configuration(sizes(pp=2), **model), refuse, llama, expected)


EXPERT_MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "experts": ({"num_moe_experts": 4}, ["Probably different: model.num_moe_experts."]),
    "width of experts": ({"moe_ffn_hidden_size": 64}, ["Probably different: model.moe_ffn_hidden_size"]),
    "latents": ({"kv_lora_rank": 16}, ["Probably different: model.kv_lora_rank"]),
    "depths": ({"mtp_num_layers": 0}, ["has mtp.0.", "Probably different: model.mtp_num_layers."]),
    "no shared expert": (
        {"moe_shared_expert_intermediate_size": 0},
        ["shared_experts.linear_fc", "Probably different: model.moe_shared_expert_intermediate_size."],
    ),
    "dense": (
        {"moe_layer_freq": "[0]*2+[1]*2"},
        ["Probably different: model.num_moe_experts or model.moe_layer_freq;"],
    ),
    "fewer layers": (
        {"num_layers": 2, "moe_layer_freq": "[0,1]"},
        ["has layers.2.", "Probably different: model.num_layers."],
    ),
}


@pytest.mark.parametrize("name", EXPERT_MISFITS)
def test_another_mixture_is_refused_with_the_field_that_differs(name: str, deepseek: Path) -> None:
    model, expected = EXPERT_MISFITS[name]
    on_ranks(1, configuration(sizes(), **{"shape": "deepseek_v3_tiny", **model}), refuse, deepseek, expected)


def without_optimizer(parts: Parts, root: Path) -> None:
    complete = saving.saved_boxes
    saving.saved_boxes = lambda chunks, optimizer, ranks: model_boxes(chunks, ranks)  # as tools.convert leaves them
    parts.keep(root / "weights")
    saving.saved_boxes = complete
    with pytest.raises(UserError, match="lacks the optimizer's state of this model"):
        parts.restore(root / "weights")
    before = [param.detach().clone() for chunk in parts.chunks for param in chunk.parameters()]
    parts.train(1)
    parts.restore(root / "none", CheckpointConfig(load=str(root / "weights"), no_load_optim=True))
    after = [param for chunk in parts.chunks for param in chunk.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_checkpoint_of_weights_alone_says_how_to_load_it(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), without_optimizer, tmp_path)


def lose_boxes(parts: Parts, root: Path) -> None:
    """An optimizer's slices that do not add up to its tensors are noticed before the commit."""
    complete = optimizer_state.held_slices
    optimizer_state.held_slices = (
        lambda optimizer: (  # type: ignore[assignment]
            (param, held._replace(tensors={name: tensor[:-1] for name, tensor in held.tensors.items()}))
            for param, held in complete(optimizer)
        )
    )
    with pytest.raises(IncompleteError, match=r"optimizer\.state\..* do not hold each element once"):
        parts.keep(root)
    optimizer_state.held_slices = complete
    assert folders.complete(root) == []


def test_a_checkpoint_with_holes_is_never_committed(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), lose_boxes, tmp_path)


# ---- a save that does not come to its end, and what is kept


def die_before_the_name(parts: Parts, root: Path) -> None:
    for until in (1, 2, 3, 4):
        parts.train(until)
        parts.keep(root, keep=2)
    parts.train(5)
    folders.give_name = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    parts.keep(root, keep=2)


def go_on(parts: Parts, root: Path) -> None:
    assert parts.restore(root).progress.iteration == 4
    parts.train(5)
    parts.keep(root, keep=2)


def names(root: Path) -> list[str]:
    """But for the file that only Megatron's scripts read."""
    return sorted(path.name for path in root.iterdir() if path.name != folders.LATEST_OF_MEGATRON)


def test_killed_before_its_end_a_save_leaves_the_one_before_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError):
        on_ranks(1, configuration(sizes()), die_before_the_name, tmp_path)
    *rest, unfinished, latest = names(tmp_path)
    assert [*rest, latest] == ["iter_0000003", "iter_0000004", "latest"]
    assert unfinished.startswith("iter_0000005.tmp-")
    assert (tmp_path / unfinished / "manifest.json").exists()
    assert folders.latest(tmp_path) == tmp_path / "iter_0000004"
    on_ranks(1, configuration(sizes()), go_on, tmp_path)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", "latest"]


def fail_to_write(parts: Parts, root: Path) -> None:
    with pytest.raises(OSError, match="Not a directory"):
        parts.keep(root)


def test_a_save_that_rank_0_cannot_begin_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    on_ranks(2, configuration(sizes()), fail_to_write, tmp_path / "file/checkpoints")


# ---- the format


def look_inside(parts: Parts, folder: Path) -> None:
    with storage.TensorReader(folder / "checkpoints/iter_0000002") as reader:
        shapes = reader.shapes
    (chunk,) = parts.chunks
    weights = {entry.key for entry in global_tensors(unwrap(chunk))}
    assert not weights & shapes.keys()  # they are the optimizer's, rounded
    assert {key for key in shapes if key.startswith("optimizer.")} == {
        f"optimizer.state.{state}.{key}" for state in ("param", "exp_avg", "exp_avg_sq") for key in weights
    }
    assert {key for key in shapes if key.startswith("rng.")} == {
        "rng.torch",
        "rng.python",
        "rng.numpy",
        "rng.megatron.model-parallel-rng",
        "rng.megatron.data-parallel-rng",
        "rng.megatron.expert-parallel-rng",
    }
    assert shapes["rng.torch"][0] == 8


def test_what_lies_in_the_folder(llama: Path) -> None:
    folder = llama / "checkpoints/iter_0000002"
    assert names(folder) == sorted(
        [
            "config.toml",
            "index.json",
            "manifest.json",
            "pieces.jsonl",
            "state.json",
            *(f"rank_{rank:05d}.bin" for rank in range(8)),
        ]
    )
    assert (folder / "config.toml").read_text() == "x = 1\n"
    assert (folder.parent / "latest").read_text() == "iter_0000002\n"
    state = json.loads((folder / "state.json").read_text())
    assert state["format"] == 1
    assert state["progress"] == {"iteration": 2, "consumed_samples": 16}
    assert Layout(**state["layout"]) == Layout(tp=2, pp=2, dp=2, etp=2)
    assert state["optimizer"]["step"] == 2
    on_ranks(1, configuration(sizes()), look_inside, llama)
