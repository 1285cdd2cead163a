"""Weights and gradients in shards: what is gathered and reduced in a step, what shards hold, and what is refused.

That losses and gradients are those of one rank is in tests/test_layouts.py.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch.distributed import DeviceMesh

from campaign import param, some
from data.loader import Batch
from models import gpt
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import groups
from parallel.ddp import held
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.regions import HeldTensor
from program.errors import SharedFault
from ranks import run_ranks
from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig
from training.forward_backward import run_schedule
from training.health.replica_check import Replicas
from training.parts.model import build_parts
from training.progress import Progress

RECIPE = "slurm/recipes/debug.toml"
MICROBATCHES = 4
VOCABULARY = 257


def on_ranks(layout: str, check: Callable[..., None], shape: str = "debug", *args: Any) -> None:
    """check(configuration, shape, ranks, ...) on every rank of a layout of a model of two blocks."""
    config = parse.load(Path(RECIPE))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, shape=shape))
    config, world_size = with_layout(shrink(config, num_layers=2), layout)

    def run(identity: Identity) -> None:
        with groups.start(config.layout(world_size), identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
            check(config, resolve(config.model, VOCABULARY), ranks, *args)

    run_ranks(world_size, run)


def microbatches(config: RunConfig, ranks: Ranks, count: int = MICROBATCHES) -> list[Batch]:
    """The same on every rank."""
    size = config.model.seq_length
    tokens = torch.arange(count * size).view(count, 1, size) % VOCABULARY
    ones = torch.ones(1, size)
    return [
        Batch(tokens=own, labels=(own + 1) % VOCABULARY, loss_mask=ones, position_ids=torch.arange(size)[None])
        for own in tokens
    ]


def one_pass(config: RunConfig, chunks: Any, ranks: Ranks, count: int = MICROBATCHES) -> None:
    """Gradients of some microbatches, reduced and divided by their tokens."""
    run_schedule(chunks, microbatches(config, ranks, count), ranks, config.model.seq_length, 1, forward_only=False)


# A model of two blocks: embedding, two blocks, output layer; the root has the last norm. ZeRO-3 gathers each once for a
# forward and once for a backward pass, but the root, the embedding and, without a pipeline, the output layer once.
@pytest.mark.parametrize(
    ("layout", "gathers", "reductions", "all_reduces"),
    [
        ("dp2zero2", [5], [MICROBATCHES * 5], [0]),
        (
            "pp2dp4hsdp2zero3", [MICROBATCHES * (1 + 2), MICROBATCHES * (1 + 2 + 2)],
            [MICROBATCHES * 2, MICROBATCHES * 3], [2, 3],
        ),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in [
            ("dp2zero3", [MICROBATCHES * (3 + 2 * 2)], [MICROBATCHES * 5], [0]),
            ("pp2dp2zero3", [MICROBATCHES * (1 + 2), MICROBATCHES * (1 + 2 + 2)],
             [MICROBATCHES * 2, MICROBATCHES * 3], [0, 0]),
            ("pp2dp2zero2", [2, 3], [MICROBATCHES * 2, MICROBATCHES * 3], [0, 0]),
            ("dp4hsdp2zero3", [MICROBATCHES * (3 + 2 * 2)], [MICROBATCHES * 5], [5]),
            ("dp4hsdp2zero2", [5], [MICROBATCHES * 5], [5]),
        ]),
    ],
)  # fmt: skip
def test_so_many_collectives_are_in_a_step(
    layout: str, gathers: list[int], reductions: list[int], all_reduces: list[int]
) -> None:
    """By pipeline stage. all_reduces: over HSDP's copies."""
    on_ranks(layout, _count, "debug", gathers, reductions, all_reduces)


@pytest.mark.campaign
def test_copies_are_added_up_after_each_microbatch_in_16_bits() -> None:
    """Between microbatches torch would keep sums in the type of the reductions."""
    counted = [MICROBATCHES * (3 + 2 * 2)], [MICROBATCHES * 5], [MICROBATCHES * 5]
    on_ranks("dp4hsdp2zero3", _count_in_16_bits, "debug", *counted)


def _count_in_16_bits(config: RunConfig, shape: GPTShape, ranks: Ranks, *counted: list[int]) -> None:
    precision = dataclasses.replace(config.precision, dtype="bf16", grad_reduce_in_fp32=False)
    _count(dataclasses.replace(config, precision=precision), shape, ranks, *counted)


def _count(
    config: RunConfig, shape: GPTShape, ranks: Ranks, gathers: list[int], reductions: list[int], all_reduces: list[int]
) -> None:
    chunks = build_parts(config, shape, ranks).chunks
    one_pass(config, chunks, ranks)  # the first one also finds its root
    counts, copies, all_reduce = Counter[str](), ranks.pgs.inter_dist_opt, dist.all_reduce
    named = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    for name in (name for name in named if hasattr(dist, name)):  # torch 2.11 has only the second of each
        setattr(dist, name, _counted(getattr(dist, name), name.split("_")[0], counts))

    def over_copies(*args: Any, **kwargs: Any) -> Any:
        counts["copies"] += config.parallel.num_distributed_optimizer_instances > 1 and kwargs.get("group") is copies
        return all_reduce(*args, **kwargs)

    dist.all_reduce = over_copies
    one_pass(config, chunks, ranks)
    expected = [own[ranks.at.pp] for own in (gathers, reductions, all_reduces)]
    assert [counts[name] for name in ("all", "reduce", "copies")] == expected, counts
    (chunk,) = chunks
    assert all(param.to_local().numel() < param.numel() for param in chunk.sharded.values())  # nothing stays whole


def test_the_next_unit_is_gathered_while_one_computes() -> None:
    on_ranks("dp2zero3", _ahead)


def _ahead(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    """Root, embedding, two blocks and output layer are 5 gathers; a backward pass, from the last block on, 2 more."""
    chunks = build_parts(config, shape, ranks).chunks
    one_pass(config, chunks, ranks, 1)
    (chunk,), counts, seen = chunks, Counter[str](), dict[str, int]()

    def note(name: str, *_: Any) -> None:
        seen[name] = counts["all"]

    for block in range(2):
        mlp = f"decoder.layers.{2 * block + 1}.mlp.linear_fc2"
        chunk.module.get_submodule(mlp).register_forward_hook(partial(note, f"forward {block}"))
    for path, leaf in chunk.whole_parameters():
        if path.endswith("mlp.linear_fc2.weight"):
            leaf.register_hook(partial(note, f"backward {path.split('.')[2]}"))
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    setattr(dist, name, _counted(getattr(dist, name), "all", counts))
    one_pass(config, chunks, ranks, 1)
    assert seen == {"forward 0": 4, "forward 1": 5, "backward 3": 7, "backward 1": 7}


def _counted(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return call(*args, **kwargs)

    return counting


@pytest.mark.parametrize(("layout", "shape"), [("dp4zero3hsdp2", "debug"), ("dp4ep2zero3", "mixtral_tiny")])
def test_collectives_run_in_groups_that_megatron_has_named(layout: str, shape: str) -> None:
    """By these names a hang is reported (NCCL's flight recorder)."""
    on_ranks(layout, _named, shape)


def _named(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    (chunk,) = build_parts(config, shape, ranks).chunks
    found = set()
    for unit in chunk.units:
        group = unit._get_fsdp_state()._fsdp_param_group
        used = [group._all_gather_process_group, group._reduce_scatter_process_group]
        used += [group._all_reduce_process_group] if config.parallel.num_distributed_optimizer_instances > 1 else []
        found |= {one.group_desc for one in used}
    assert found == (
        {"DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"}
        if shape.num_moe_experts
        else {"INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"}
    )


def test_nothing_is_whole_after_an_evaluation() -> None:
    on_ranks("dp2zero2", _evaluate)


def _evaluate(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    (chunk,) = build_parts(config, shape, ranks).chunks
    batch = microbatches(config, ranks)[0]
    with torch.no_grad():
        chunk(batch.tokens, batch.position_ids, None, labels=batch.labels)
    assert all(param is chunk.sharded[path] for path, param in chunk.module.named_parameters())


@pytest.mark.parametrize("shape", some(["debug", "gpt2_tiny", "deepseek_v3_tiny"], ["deepseek_v3_tiny"]))
def test_parameters_without_memory_have_the_marks_of_others(shape: str) -> None:
    on_ranks("ep2zero3" if shape == "deepseek_v3_tiny" else "dp2zero3", _marks, shape)


def _marks(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    whole_parallel = dataclasses.replace(config.parallel, data_parallel_sharding_strategy="optim")
    blueprint = gpt.Blueprint(model=config.model, shape=shape, parallel=whole_parallel, precision=config.precision)
    built = [
        gpt.build(dataclasses.replace(blueprint, parallel=parallel), ranks)[0]
        for parallel in (whole_parallel, config.parallel)
    ]
    whole, empty = (dict(chunk.named_parameters()) for chunk in built)
    assert whole.keys() == empty.keys() and all(param.is_meta for param in empty.values())
    assert {path: vars(param) for path, param in whole.items()} == {path: vars(param) for path, param in empty.items()}
    assert not any(buffer.is_meta for buffer in built[1].buffers())
    for own, other in zip(built[0].buffers(), built[1].buffers(), strict=True):
        assert torch.equal(own, other)


def test_shards_are_what_is_gathered_and_updated() -> None:
    """Also where a shard is padded (64 rows over 3 ranks), which the first gather moves."""
    on_ranks("dp3zero3", _same_memory)


def _same_memory(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    parts = build_parts(config, shape, ranks)
    (chunk,) = parts.chunks
    one_pass(config, parts.chunks, ranks)
    updated = {param for group in parts.optimizer.param_groups for param in group["params"]}
    for path, one in chunk.shards.items():
        assert one.tensor.data_ptr() == chunk.sharded[path].to_local().data_ptr()
        assert (one.tensor in updated) == bool(one.tensor.numel())


@pytest.mark.campaign
def test_megatrons_own_wrapper_of_fully_shard_is_wrong_by_a_factor() -> None:
    """Why it is not used: with a loss per token it averages over ranks, and never divides by tokens."""
    on_ranks("dp2zero3", _compare_with_megatrons)


def _compare_with_megatrons(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    import megatron.core.distributed.torch_fully_sharded_data_parallel as megatrons
    from megatron.core.distributed import DistributedDataParallelConfig

    chunks = build_parts(config, shape, ranks).chunks
    run_schedule(chunks, microbatches(config, ranks), ranks, config.model.seq_length, 1, forward_only=False)
    (ours,) = chunks
    right = ours.sharded["decoder.final_norm.weight"].grad.full_tensor()
    whole = dataclasses.replace(config.parallel, data_parallel_sharding_strategy="optim")
    (chunk,) = gpt.build(
        gpt.Blueprint(
            model=config.model, shape=shape, parallel=whole, precision=config.precision, seed=config.train.seed
        ),
        ranks,
    )
    megatrons.DeviceMesh = type("OnCPU", (), {"from_group": staticmethod(lambda g, _: DeviceMesh.from_group(g, "cpu"))})
    wrapped = megatrons.TorchFullyShardedDataParallel(
        chunk.config, DistributedDataParallelConfig(), chunk, process_group=ranks.pgs.dp_cp
    )
    wrapped.own_loss = None  # as of a chunk, which our unwrap() does not find in this wrapper
    chunk.config.no_sync_func, chunk.config.finalize_model_grads_func = wrapped.no_sync, finalize_model_grads
    run_schedule([wrapped], microbatches(config, ranks), ranks, config.model.seq_length, 1, forward_only=False)
    found = chunk.decoder.final_norm.weight.grad.full_tensor()
    factor = found.norm() / right.norm()
    assert torch.allclose(found, right * factor, rtol=1e-3, atol=1e-5 * float(found.abs().max()))  # the same direction
    assert not 0.9 < factor < 1.1, factor


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("tp2spdp2zero3", "debug"), ("pp2dp2zero2", "gpt2_tiny"), ("dp4ep2zero3hsdp2", "mixtral_tiny"),
        param(("dp4zero3hsdp2", "debug")), param(("tp4sppp2ep2etp1zero3", "deepseek_v3_tiny")),
    ],
)  # fmt: skip
def test_replicas_of_shards_are_compared(layout: str, shape: str) -> None:
    on_ranks(layout, _drift, shape)


def _drift(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    parts = build_parts(config, shape, ranks)
    replicas = Replicas(parts.chunks, parts.optimizer, ranks)
    replicas.check(Progress())
    copied = config.parallel.num_distributed_optimizer_instances > 1
    own = [
        one
        for chunk in parts.chunks
        for one in held(chunk)
        if one.tensor.numel() and _has_copies(one, copied, ranks.layout.tp > 1)
    ]
    if ranks.rank == ranks.identity.world_size - 1:
        with torch.no_grad():
            own[-1].tensor.view(-1)[0] += 1
    with pytest.raises(SharedFault, match=f"differs between|rank {ranks.identity.world_size - 1} .*differs"):
        replicas.check(Progress())


def _has_copies(one: HeldTensor, copied: bool, over_tp: bool) -> bool:
    """HSDP's; or a norm's, on all TP ranks; or tied embeddings', on two stages."""
    whole = one.regions[0].shape == one.regions[0].global_shape
    return copied or getattr(one.tensor, "shared_embedding", False) or (whole and over_tp)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--precision.dtype fp16", "no loss scale"),
        ("--parallel.ddp_bucket_size 1000", "is of Megatron's DDP"),
        ("--parallel.num_distributed_optimizer_instances 3", "cannot be split into so many. Use one of 1, 2, 4"),
        ("--parallel.data_parallel_sharding_strategy HYBRID_SHARD", "the number of copies, found 1"),
        (
            "--parallel.data_parallel_sharding_strategy zero1 --parallel.num_distributed_optimizer_instances 2",
            'needs parallel.data_parallel_sharding_strategy "optim_grads"',
        ),
        ("--device cuda --precision.fp8 hybrid --precision.fp8_param_gather True", "gathered in 16 bits"),
        ("--device cuda --precision.fp8 hybrid --precision.fp8_shadow warn:5", "fp8_shadow"),
        ("--device cuda --kernels.cuda_graph_impl local", "cuda_graph_impl"),
    ],
)
def test_what_cannot_be_with_shards_is_refused_before_a_start(flags: str, words: str) -> None:
    asked = f"--parallel.data_parallel_sharding_strategy FULL_SHARD --model.ffn_hidden_size 192 {flags}"
    config = parse.parse_config([RECIPE, *asked.split()])
    assert words in "\n".join(config.problems(4))


@pytest.mark.parametrize(
    ("name", "megatrons"),
    [
        ("NO_SHARD", "no_shard"), ("zero1", "optim"), ("SHARD_GRAD_OP", "optim_grads"), ("zero2", "optim_grads"),
        ("FULL_SHARD", "optim_grads_params"), ("zero3", "optim_grads_params"),
    ],
)  # fmt: skip
def test_torchs_and_deepspeeds_names_are_megatrons(name: str, megatrons: str) -> None:
    config = parse.parse_config([RECIPE, "--parallel.data_parallel_sharding_strategy", name])
    assert config.parallel.sharding == megatrons and config.problems(4) == []


def test_a_chunk_shows_the_optimizer_plain_shards_in_fp32() -> None:
    on_ranks("dp2zero3", _views)


def _views(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype="bf16"))
    (chunk,) = build_parts(config, shape, ranks).chunks
    assert isinstance(chunk, FullyShardedChunk)
    assert {type(param) for param in chunk.parameters()} == {torch.nn.Parameter}
    assert {param.dtype for param in chunk.parameters()} == {torch.float32}
    one_pass(config, [chunk], ranks)
    assert {param.main_grad.dtype for param in chunk.parameters()} == {torch.float32}
    _, whole = next(chunk.whole_parameters())
    assert whole.dtype == torch.bfloat16
