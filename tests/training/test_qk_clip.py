"""QK-clip: largest logits of what queries see, and rows scaled by them, on every layout and as megatron-core does."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from campaign import some
from checkpoint_parts import Parts, assembled, configuration, on_ranks, sizes
from models.config import ModelConfig
from models.kernels import KernelsConfig
from models.layers import max_logits
from models.layers.blockwise_attention import AttentionMask
from models.layers.documents import Documents
from models.layers.max_logits import largest_logits
from models.names import canonical
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import ddp
from parallel.config import ParallelConfig
from tests.faults.trainer import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, VOCABULARY
from tests.oracle.qk_clip import factors
from tests.oracle.trained import randomise
from training.config.lr_schedule import ScheduledRates
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.optimizer import set_schedule
from training.qk_clip import ScaledRows
from training.step import clip_and_update, zero_gradients

CLIP = OptimizerConfig(qk_clip=True, qk_clip_threshold=2.0, qk_clip_alpha=0.3)
BIASED = {"shape": "qwen2_tiny"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], ParallelConfig]] = {
    "TP4 of 2 groups, SP": (4, BIASED, sizes(tp=4, sequence_parallel=True)),
    "TP2 ZeRO-3 DP2": (4, BIASED, sizes(tp=2, data_parallel_sharding_strategy="zero3")),
    "latent, TP2 CP2 EP2": (
        4, {"shape": "deepseek_v3_tiny"},
        sizes(tp=2, sequence_parallel=True, context_parallel_size=2, expert_model_parallel_size=2),
    ),
    "bf16 ZeRO-1 CP2 PP2 DP2": (8, BIASED, sizes(pp=2, context_parallel_size=2, ddp_bucket_size=7000)),
    "PP2, a stage without attention": (2, {"shape": "nemotron_h_tiny"}, sizes(pp=2)),
    "HSDP": (4, BIASED, sizes(data_parallel_sharding_strategy="HYBRID_SHARD", num_distributed_optimizer_instances=2)),
    "no shards": (2, BIASED, sizes(use_distributed_optimizer=False)),
    "an output gate": (2, {"shape": "qwen3_next_tiny", "qk_layernorm": False}, sizes(tp=2, sequence_parallel=True)),
}  # fmt: skip


def clipped(model: dict[str, Any], parallel: ParallelConfig, dtype: str = "fp32") -> RunConfig:
    return dataclasses.replace(configuration(parallel, dtype, **model), optimizer=CLIP)


def logits_of(path: str, heads: int) -> Tensor:
    """Of the global batch: from half the threshold to three times it."""
    seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "big")
    return 1 + 5 * torch.rand(heads, generator=torch.Generator().manual_seed(seed))


def seen(parts: Parts, heads: int) -> None:
    """Of its own samples, each rank of DP and CP has the largest logit of some heads only."""
    replica, replicas = parts.ranks.pgs.dp_cp.rank(), parts.ranks.pgs.dp_cp.size()
    for chunk in parts.chunks:
        for path, module in ddp.unwrap(chunk).named_modules():
            if hasattr(module, "core_attention"):
                here = torch.arange(heads) % replicas == replica
                own = logits_of(_block(path, parts), heads).where(here, 0.25)
                module.core_attention.current_max_attn_logits = own.chunk(parts.ranks.layout.tp)[parts.ranks.at.tp]


def _block(path: str, parts: Parts) -> str:
    """``layers.3`` of the whole model."""
    weight = next(key for key in _keys(parts) if key[0].startswith(path + "."))
    return ".".join(canonical(weight[1]).split(".")[:2])


def _keys(parts: Parts) -> list[tuple[str, str]]:
    return [(path, one.regions[0].key) for chunk in parts.chunks for path, one in ddp.held_by_path(chunk).items()]


def scaled(parts: Parts, folder: Path, shape: GPTShape) -> None:
    """Leave all weights before and after an update that adds nothing."""
    randomise(parts.chunks, shape, 1)  # biases too
    parts.optimizer.reload_model_params()
    before = assembled(parts, folder / "before")
    set_schedule(parts.optimizer, ScheduledRates(0.0, 0.0))
    zero_gradients(parts.chunks, parts.optimizer)
    for chunk in parts.chunks:
        for one in ddp.held(chunk):
            if one.tensor.requires_grad:
                _no_gradient(one.tensor)
    seen(parts, shape.num_attention_heads)
    parts.optimizer.prepare_grads()
    assert clip_and_update(parts.optimizer, 1.0)
    largest = parts.optimizer.qk_clip.report()["max_attention_logit"]
    after = assembled(parts, folder / "after")
    if before is not None and after is not None:
        torch.save((before, after, largest), folder / "tensors.pt")


def _no_gradient(param: Any) -> None:
    param.main_grad = (
        torch.zeros_like(param, dtype=torch.float32) if param.main_grad is None else param.main_grad.zero_()
    )


@pytest.mark.parametrize("name", some(LAYOUTS, list(LAYOUTS)[:5]))
def test_rows_are_scaled_by_the_largest_logit_of_all_ranks(name: str, tmp_path: Path) -> None:
    world_size, model, parallel = LAYOUTS[name]
    config = clipped(model, parallel, "bf16" if name.startswith("bf16") else "fp32")
    shape = resolve(config.model, VOCABULARY)
    on_ranks(world_size, config, scaled, tmp_path, shape)
    before, after, largest = torch.load(tmp_path / "tensors.pt")
    names = {key: key.removeprefix("param of ") for key in before if key.startswith("param of ")}
    blocks = [f"layers.{number}" for number, symbols in enumerate(shape.blocks) if set(symbols) & {"*", "+"}]
    blocks += [f"mtp.{depth}" for depth in range(shape.mtp_num_layers)]
    logits = [logits_of(block, shape.num_attention_heads) for block in blocks]
    times = factors({names[key]: before[key] for key in names}, logits, CLIP, shape)
    assert sum(bool((each != 1).any()) for each in times.values()) >= len(blocks)
    for key, own in names.items():
        torch.testing.assert_close(after[key], before[key] * times[own], rtol=1e-6, atol=0, msg=own)
        assert torch.equal(after[own], after[key].to(after[own].dtype)), own
    assert largest == pytest.approx(max(each.max().item() for each in logits))


@pytest.mark.parametrize("model", [{"shape": "llama3_tiny"}, {"shape": "deepseek_v3_tiny"}])
def test_megatrons_own_classes_scale_the_same(model: dict[str, Any]) -> None:
    """One rank, without shards, as they need it."""
    config = clipped(model, sizes(use_distributed_optimizer=False))
    on_ranks(1, config, _as_megatron, resolve(config.model, VOCABULARY).num_attention_heads)


@torch.no_grad()
def _as_megatron(parts: Parts, heads: int) -> None:
    chunk: Any = ddp.unwrap(parts.chunks[0])
    before = {name: param.clone() for name, param in chunk.named_parameters()}
    set_schedule(parts.optimizer, ScheduledRates(0.0, 0.0))
    zero_gradients(parts.chunks, parts.optimizer)
    seen(parts, heads)
    parts.optimizer.prepare_grads()
    assert clip_and_update(parts.optimizer, 1.0)
    ours = {name: param.clone() for name, param in chunk.named_parameters()}
    for name, param in chunk.named_parameters():
        param.copy_(before[name])
    chunk.config.qk_clip, chunk.config.qk_clip_threshold, chunk.config.qk_clip_alpha = True, 2.0, 0.3
    for module in chunk.modules():
        if hasattr(module, "clip_qk"):
            module.clip_qk()
    changed = [name for name, param in chunk.named_parameters() if not torch.equal(param, before[name])]
    assert changed
    for name, param in chunk.named_parameters():
        torch.testing.assert_close(ours[name], param, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(("left", "documents"), [(None, False), (5, False), (None, True)])
def test_the_largest_logit_is_of_what_a_query_sees(left: int | None, documents: bool) -> None:
    """Beside the whole matrix; in pieces of a context rank's, and in blocks."""
    length, heads, groups, width = 600, 4, 2, 8
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(length, 2, heads, width, generator=draw)
    key = torch.randn(length, 2, groups, width, generator=draw)
    starts = torch.zeros(2, length, dtype=torch.long)
    starts[0, 100:], starts[1, 580:] = 100, 580
    at = torch.arange(length)
    logits = torch.einsum("sbnd,tbnd->bnst", query, key.repeat_interleave(2, dim=2)) * 0.5
    hidden = at > at[:, None]
    if left is not None:
        hidden = hidden | (at < at[:, None] - left)
    hidden = hidden.expand(2, 1, -1, -1)
    if documents:
        hidden = hidden | (at < starts[:, None, :, None])
    expected = logits.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    sight = AttentionMask(left=left, documents=Documents(starts, at - starts) if documents else None)
    torch.testing.assert_close(largest_logits(query, key, sight, 0.5), expected)
    if not documents:
        pieces = [(0, 450), (150, 300)]
        halves = [torch.cat([query[first : first + 150] for first in starts]) for starts in pieces]
        found = [largest_logits(own, key, sight, 0.5, starts) for own, starts in zip(halves, pieces, strict=True)]
        torch.testing.assert_close(torch.maximum(*found), expected)


@pytest.mark.parametrize("columns", [1, 5])
def test_a_shard_may_begin_and_end_within_a_row(columns: int) -> None:
    """Every range of a matrix of 6 rows, and of its bias."""
    whole, etas = torch.arange(1.0, 6 * columns + 1), torch.tensor([[0.5, 0.25]])
    groups, powers = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 0.5, 0.0, 1.0, 0.5, 0.0])
    expected = whole * (etas[0, groups] ** powers).repeat_interleave(columns)
    for start in range(len(whole)):
        for end in range(start + 1, len(whole) + 1):
            rows = slice(start // columns, -(-end // columns))
            own = whole[start:end].clone()
            ScaledRows(own, 0, groups[rows], powers[rows], columns, start % columns).scale(etas)
            torch.testing.assert_close(own, expected[start:end], rtol=1e-6, atol=0)


def test_a_step_collects_from_all_its_microbatches_and_forgets() -> None:
    on_ranks(1, clipped({"shape": "llama2_tiny"}, sizes()), _collects)


def _collects(parts: Parts) -> None:
    """With a patch of this rank's own process."""
    cores = [module for module in parts.chunks[0].modules() if hasattr(module, "current_max_attn_logits")]
    calls: dict[Any, list[Tensor]] = {core: [] for core in cores}

    def heard(core: Any, *args: Any) -> None:
        before, core.current_max_attn_logits = core.current_max_attn_logits, None
        collect(core, *args)
        calls[core].append(core.current_max_attn_logits)
        core.current_max_attn_logits = before
        collect(core, *args)

    collect, max_logits.collect = max_logits.collect, heard
    for core in cores:
        core.current_max_attn_logits = torch.full((4,), torch.nan)  # of a step that is done once more
    parts.train(1)
    for core in cores:
        assert len(calls[core]) == GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE > 1
        assert torch.equal(core.current_max_attn_logits, torch.stack(calls[core]).amax(0))
        assert not torch.equal(core.current_max_attn_logits, calls[core][-1])
    assert parts.optimizer.qk_clip.report() == {"max_attention_logit": max(map(_largest, calls.values()))}
    zero_gradients(parts.chunks, parts.optimizer)  # a step begins, whose update does not come
    assert parts.optimizer.qk_clip.report() == {}


def _largest(calls: list[Tensor]) -> float:
    return torch.stack(calls).max().item()


def test_an_optimizer_whose_step_calls_its_base_s_is_followed_once() -> None:
    on_ranks(1, clipped({"shape": "llama2_tiny"}, sizes(use_distributed_optimizer=False)), _follows)


@torch.no_grad()
def _follows(parts: Parts) -> None:
    clip, weight = parts.optimizer.qk_clip, next(one for rows in parts.optimizer.qk_clip.rows for one in rows).main
    before = weight.clone()
    seen(parts, 4)
    clip.agree()
    clip._scale(0)
    once = weight.clone()
    assert not torch.equal(once, before)
    clip._scale(0)  # torch's second call
    assert torch.equal(weight, once)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": dataclasses.replace(CLIP, qk_clip_threshold=0.0)}, "qk_clip_threshold > 0"),
        ({"model": ModelConfig(shape="qwen3_tiny")}, "norms of queries and keys"),
        ({"model": ModelConfig(shape="mamba2_tiny")}, "a model without attention"),
        ({"model": ModelConfig(shape="gemma2_tiny")}, "model.attn_logit_softcapping"),
        (
            {"kernels": KernelsConfig(attention_backend="flash")},
            'kernels.attention_backend = "flash", which returns no',
        ),
        ({"model": ModelConfig(shape="llama2_tiny", megatron=("fp8_dot_product_attention=True",))}, "attention in fp8"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(fields: dict[str, Any], said: str) -> None:
    config = dataclasses.replace(clipped({"shape": "llama2_tiny"}, sizes()), **fields)
    assert [line for line in config.problems(1) if said in line]
