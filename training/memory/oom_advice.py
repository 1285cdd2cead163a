"""What takes most of a memory that was too small, which single changes hold less, and who knows other layouts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.costs.predict import SAFE_HOST_SHARE, SAFE_SHARE, Predicted, fullest, largest_first, size
from models.shapes import GPTShape
from training.config.activation_offload import offloadable
from training.config.run_config import RunConfig, with_fields
from training.config.train_config import LOSS_CHUNK_TOKENS
from training.memory.planned import Modules, as_case

LESS = 0.9
"""Of its own prediction, at most, that a change must come to where the prediction alone would have fitted."""
WORTH = 0.01
"""Share of the prediction that a change must save to be named."""
LOWER_BUDGETS = (0.9, 0.8, 0.6)
"""Of train.recompute's."""
FULL = {"train.recompute": "full:uniform:1"}

Fields = Mapping[str, Any]
"""New values by the fields' dotted names."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """What a rank can have."""

    bytes: float
    words: str
    """With ``{}`` for the size."""
    host_bytes: float = math.inf
    """A rank's share of its node's memory, for what is offloaded."""

    def __str__(self) -> str:
        return self.words.format(size(self.bytes))


def advice(config: RunConfig, world_size: int, shape: GPTShape, modules: Modules, room: Room, recipe: str) -> str:
    """The last words of a run that ran out of memory. recipe: where the planner can read its configuration."""
    expected = fullest([as_case(config, world_size, shape, modules)], shape)[0]
    most, safe = SAFE_SHARE * room.bytes, f"{SAFE_SHARE:.0%} of that, which is safe"
    lines = [
        f"out of memory: predicted are {size(expected.total)} on a rank of stage {expected.stage} "
        f"({largest_first(expected)}), of {room}"
    ]
    if expected.total <= most:
        most, safe = LESS * expected.total, "a tenth less than predicted here"
        lines.append(
            "By that it should have fitted: look for other processes there, then for what no formula knows "
            "(fragmentation, uneven experts, a field of model.megatron)."
        )
    found = changes(config, world_size, shape, modules, most, SAFE_HOST_SHARE * room.host_bytes)
    if found:
        lines.append(f"Single changes, those first that fit below {size(most)} ({safe}):")
        lines += [_line(fields, expected, held, most) for fields, held in found]
    lines.append(
        "Other layouts, and how many GPUs would do: "
        f"python -m tools.plan --recipe {recipe} --num_gpus {world_size} --cluster CLUSTER (of slurm/clusters)"
    )
    return "\n".join(lines)


def _line(fields: Fields, expected: Predicted, held: Predicted, most: float) -> str:
    words = " ".join(
        f"--{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in fields.items()
    )
    fits = "fits" if held.total <= most else "not enough alone"
    return f"  {words}: {size(expected.total - held.total)} less, {size(held.total)}, {fits}"


def changes(
    config: RunConfig, world_size: int, shape: GPTShape, modules: Modules, most: float, most_on_host: float
) -> list[tuple[Fields, Predicted]]:
    """Of each switch its mildest setting that fits, else the one that saves most: what fits first, then by bytes."""
    expected, found = fullest([as_case(config, world_size, shape, modules)], shape)[0], []
    for settings in _switches(config, shape):
        altered = [(fields, with_fields(config, fields)) for fields in settings]
        legal = [(fields, other) for fields, other in altered if not other.problems(world_size)]
        held = fullest([as_case(other, world_size, shape, modules) for _, other in legal], shape) if legal else []
        saving = [
            (fields, each)
            for (fields, _), each in zip(legal, held, strict=True)
            if each.total <= (1 - WORTH) * expected.total and each.host <= max(most_on_host, expected.host)
        ]
        if saving:
            fitting = next((each for each in saving if each[1].total <= most), None)
            found.append(fitting or min(saving, key=lambda each: each[1].total))
    return sorted(found, key=lambda each: max(most, each[1].total))


def _switches(config: RunConfig, shape: GPTShape) -> Iterator[Sequence[Fields]]:
    """The settings of each, the mildest first; about in the order of what they cost in speed. Legal or not."""
    yield _shards(config)
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield [{"parallel.sequence_parallel": True}]
    yield [{"train.micro_batch_size": size} for size in _divisors(config.train.micro_batch_size)]
    if (config.train.cross_entropy_chunk_tokens or math.inf) > LOSS_CHUNK_TOKENS:
        yield [{"train.cross_entropy_chunk_tokens": LOSS_CHUNK_TOKENS}]
    yield _recomputations(config, shape)
    if not config.optimizer.optimizer_cpu_offload:
        yield _kept_states(config)
    yield _offloaded(config, shape)


def _divisors(size: int) -> list[int]:
    return [each for each in range(size - 1, 0, -1) if size % each == 0]


def _shards(config: RunConfig) -> list[Fields]:
    """The optimizer's state in shards, or all of a model, in one copy; DDP's buckets go with DDP."""
    parallel, name = config.parallel, "parallel.data_parallel_sharding_strategy"
    found: list[Fields] = []
    if parallel.sharding == "no_shard":
        strategy = parallel.data_parallel_sharding_strategy is not None  # which goes before the other
        found.append({name: "optim"} if strategy else {"parallel.use_distributed_optimizer": True})
    whole: dict[str, Any] = {name: "optim_grads_params"}
    if parallel.ddp_bucket_size is not None:
        whole["parallel.ddp_bucket_size"] = None
    if parallel.num_distributed_optimizer_instances > 1:
        whole["parallel.num_distributed_optimizer_instances"] = 1
    return [*found, whole]


def _recomputations(config: RunConfig, shape: GPTShape) -> list[Fields]:
    """A lower budget; else selective, of the widest module, then full."""
    train = config.train
    if train.recompute_budget is not None:
        budget = train.recompute_budget / 2**20
        return [{"train.recompute": f"auto:{budget * share:.0f}MiB"} for share in LOWER_BUDGETS]
    if train.recompute_granularity == "full":
        return [FULL]
    module = "moe" if shape.num_moe_experts else "mlp"
    kept = train.recompute_modules if train.recompute_granularity == "selective" else ()
    can = module not in kept and (module == "moe" or not shape.fc_bias)  # training/config/incompatible.py says why
    selective = {"train.recompute": f"selective:{','.join((*kept, module))}"}
    return [*([selective] if can else []), FULL]


def _kept_states(config: RunConfig) -> list[Fields]:
    """Main weights as remainders, moments in bf16, or all of it on the host."""
    aware = {"use_precision_aware_optimizer": True}
    low = aware | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    own = config.optimizer
    names = ("optimizer_cpu_offload", "optimizer_offload_fraction", *low, "main_params_dtype")
    host = {name: getattr(own.on_the_host(), name) for name in names}
    settings = [{name: new for name, new in each.items() if getattr(own, name) != new} for each in (aware, low, host)]
    return [{f"optimizer.{name}": new for name, new in each.items()} for each in settings if each]


def _offloaded(config: RunConfig, shape: GPTShape) -> list[Fields]:
    """Activations wait on the host: inputs of the modules that the model has, or those of every block."""
    train = config.train
    found: list[Fields] = []
    named = offloadable(shape, config.precision, config.kernels, train)
    if not train.cpu_offloading_num_layers and not set(named) <= set(train.offload_modules):
        found.append({"train.offload_modules": named})
    if not train.recomputes:
        found.append({"train.cpu_offloading_num_layers": -(-shape.num_layers // config.parallel.chunks)})
    return found
