"""What train.recompute chooses: within the budget, for no more FLOPs than any other setting that fits."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import campaign
from models.costs.predict import fullest, of_stages
from models.costs.recompute_plan import Kind, Place, cheapest, recompute_plans, recomputed_flops
from models.resolve import resolve
from models.shapes import GPTShape
from program.errors import SharedMistake
from training.cli.parse import parse_config
from training.config.executed_flops import executed_flops_per_token
from training.config.run_config import RunConfig
from training.memory.planned import Modules, as_case

GPU = Modules(cuda=True, transformer_engine=True)
GIB = 2**30
LONG = "--model.seq_length 8192 --train.global_batch_size 256 --precision.dtype bf16 --model.shape "
FIVE = {
    "llama3_8b, TP2 PP4": (16, "llama3_8b --parallel.tensor_model_parallel_size 2 "
    "--parallel.sequence_parallel True --parallel.pipeline_model_parallel_size 4"),
    "llama3_70b, TP8 PP4 VPP5": (64, "llama3_70b --parallel.tensor_model_parallel_size 8 "
    "--parallel.sequence_parallel True --parallel.pipeline_model_parallel_size 4 "
    "--parallel.virtual_pipeline_model_parallel_size 5"),
    "gemma3_27b, TP4 PP2": (16, "gemma3_27b --parallel.tensor_model_parallel_size 4 "
    "--parallel.sequence_parallel True --parallel.pipeline_model_parallel_size 2"),
    "qwen3_30b_a3b, EP8 PP2": (64, "qwen3_30b_a3b --parallel.expert_model_parallel_size 8 "
    "--parallel.pipeline_model_parallel_size 2"),
    "nemotron_h_8b, TP2 PP2": (16, "nemotron_h_8b --parallel.tensor_model_parallel_size 2 "
    "--parallel.sequence_parallel True --parallel.pipeline_model_parallel_size 2"),
}  # fmt: skip
"""GPUs and flags."""
FULL = {"recompute": "full:uniform:1"}


def asked(flags: str, world_size: int = 16, **train_fields: object) -> tuple[RunConfig, GPTShape]:
    config = with_train(parse_config((LONG + flags).split()), **train_fields)
    assert config.problems(world_size) == []
    return config, resolve(config.model, None)


def with_train(config: RunConfig, **fields: object) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))  # type: ignore[arg-type]


def settings_of(shape: GPTShape, layers: int) -> Iterator[dict[str, object]]:
    """What can be asked for by Megatron's names. layers: blocks of a chunk. Modules of hybrids have no prediction."""
    yield {}
    if not shape.hybrid_layer_pattern:
        yield {"recompute": f"selective:{'moe' if shape.num_moe_experts else 'mlp'}"}
    yield from ({"recompute": f"full:block:{count}"} for count in range(1, layers))
    yield FULL


@pytest.mark.parametrize("name", campaign.some(FIVE, ["qwen3_30b_a3b, EP8 PP2"]))
def test_no_other_setting_within_the_budget_costs_less(name: str) -> None:
    """Of five shapes, at three budgets between full recomputation and none. In brackets: the best other setting."""
    world_size, flags = FIVE[name]
    config, shape = asked(flags, world_size)
    chunks = config.parallel.chunks
    fixed = [with_train(config, **each) for each in settings_of(shape, shape.num_layers // chunks)]
    held = [found.total for found in fullest([as_case(c, world_size, shape, GPU) for c in fixed], shape)]
    model = executed_flops_per_token(config, shape)
    costs = [executed_flops_per_token(each, shape) / model - 1 for each in fixed]
    priced = list(zip(held, costs, strict=True))
    sizes = [f"{size / GIB:.1f} GiB +{cost:.1%}" for size, cost in priced]
    cells = [name, sizes[0], "" if shape.hybrid_layer_pattern else sizes[1], sizes[-1]]
    for share in (0.25, 0.5, 0.75):
        budget = held[-1] + share * (held[0] - held[-1])
        chosen = with_train(config, recompute=f"auto:{budget / GIB:.6f}GiB")
        stages = of_stages(
            as_case(chosen, world_size, shape, GPU), shape, range(config.parallel.pipeline_model_parallel_size)
        )
        more = recomputed_flops(as_case(chosen, world_size, shape, GPU), shape) / model
        assert max(stage.total for stage in stages) <= budget * (1 + 1e-6)
        least = min(cost for size, cost in priced if size <= budget)
        assert more <= least + 1e-9
        cells.append(f"{budget / GIB:.1f} GiB +{more:.1%} (+{least:.1%})")
    print(" | ".join(cells))  # as docs/parallelism.md has it


kinds = some.lists(
    some.tuples(some.integers(1, 4), some.integers(1, 3), some.integers(0, 9), some.integers(1, 9)), max_size=3
)


@given(kinds, some.integers(0, 60))
@settings(max_examples=200)
def test_the_cheapest_is_the_cheapest_of_all(drawn: list[tuple[int, int, int, int]], needed: int) -> None:
    """drawn: groups, width, bytes and FLOPs of each kind."""
    own = [
        Kind(symbol="-", groups=((Place(chunk=at, number=0),) * width,) * count, spared=spared, flops=flops)
        for at, (count, width, spared, flops) in enumerate(drawn)
    ]
    choices = [
        sum(count * kind.width * kind.flops for count, kind in zip(counts, own, strict=True))
        for counts in itertools.product(*(range(len(kind.groups) + 1) for kind in own))
        if sum(count * kind.width * kind.spared for count, kind in zip(counts, own, strict=True)) >= needed
    ]
    found = cheapest([(kind, len(kind.groups)) for kind in own], float(needed))
    assert (found is None) == (not choices)
    if found is not None:
        assert sum(count * kind.width * kind.flops for kind, count in found.items()) == min(choices)
        assert sum(count * kind.width * kind.spared for kind, count in found.items()) >= needed * (1 - 1e-6)


def test_enough_room_recomputes_nothing_and_too_little_is_refused() -> None:
    config, shape = asked("llama3_8b", recompute="auto:500GiB")
    (plan,) = recompute_plans(as_case(config, 16, shape, GPU), shape)
    assert (plan.words, plan.flops, plan.places) == ("nothing", 0, frozenset())
    with pytest.raises(
        SharedMistake, match=r"train.recompute, 8.38 GiB: stage 0 is predicted to hold [\d.]+ GiB .* every block"
    ):
        recompute_plans(as_case(with_train(config, recompute="auto:9GB"), 16, shape, GPU), shape)


def test_whole_blocks_where_sublayers_spare_too_little() -> None:
    full, shape = asked("llama3_8b", **FULL)
    (least,) = of_stages(as_case(full, 16, shape, GPU), shape, [0])
    config = with_train(asked("llama3_8b")[0], recompute=f"auto:{(least.total + 1e6) / GIB:.6f}GiB")
    (plan,) = recompute_plans(as_case(config, 16, shape, GPU), shape)
    assert (plan.whole_blocks, plan.words) == (True, "all 32 blocks")
    assert of_stages(as_case(config, 16, shape, GPU), shape, [0]) == [least]
    assert recomputed_flops(as_case(config, 16, shape, GPU), shape) == pytest.approx(
        executed_flops_per_token(full, shape) - executed_flops_per_token(config, shape)
    )


def test_attention_and_mlp_of_a_parallel_residual_recompute_as_one() -> None:
    config, shape = asked("pythia_6_9b --train.micro_batch_size 4", recompute="auto:200GiB")
    none = of_stages(as_case(with_train(config, recompute=None), 16, shape, GPU), shape, [0])[0].total
    (plan,) = recompute_plans(
        as_case(with_train(config, recompute=f"auto:{none / GIB - 1:.3f}GiB"), 16, shape, GPU), shape
    )
    assert plan.whole_blocks and not plan.places


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--train.recompute 70GiB", 'or "auto:70GiB" (modules'),
        ("--train.recompute auto:70", 'found "auto:70"'),
        ("--train.recompute auto:70GiB --train.cpu_offloading_num_layers 2", "train.cpu_offloading_num_layers changes"),
        ("--train.recompute auto:70GiB --train.compile True", "train.compile changes"),
        ("--train.recompute auto:70GiB --kernels.cuda_graph_impl local", "was not captured yet"),
    ],
)
def test_what_it_cannot_be_with_is_refused(flags: str, problem: str) -> None:
    found = parse_config(f"{LONG} llama3_8b {flags}".split()).problems(16)
    assert any(problem in each for each in found), found
