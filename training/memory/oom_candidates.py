"""Configurations that hold less than one that ran out of memory, and about what each costs in speed."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.shapes import GPTShape
from parallel.layout import bubble, replica_size
from training.config.activation_offload import offloadable
from training.config.executed_flops import executed_flops_per_token
from training.config.run_config import RunConfig, batch_schedule
from training.config.train_config import RecomputeModule, recompute_budget
from training.memory.planned import Planned

TOGETHER = 3
"""Changes that are tried at once."""
DOUBLINGS = 3
"""Of each axis."""
SHORTEST_PIECE = 1024
"""Tokens of a sequence on one context rank; below, a ring of them is all latency."""
LOSS_CHUNK_TOKENS = 1024
"""Enough for the output layer's products to fill a GPU."""
LOWER_BUDGETS = (0.9, 0.8, 0.6)
"""Of train.recompute's."""
SLOWER = {
    # Rough, for the order alone (tools.plan prices layouts): of each doubling, beside bubble and recomputation.
    "tp": 0.08, "pp": 0.03, "cp": 0.05, "ep": 0.04, "micro-batch": 0.02, "states": 0.001, "shards": 0.1,
    "ranks": 1.0, "remainders": 0.002, "bf16 moments": 0.02, "host": 0.3,
    "activations": 0.5, "modules": 0.1, "budget": 0.05,  # over PCIe at 8,192 tokens; over C2C a tenth
}  # fmt: skip

ON_THE_HOST: dict[str, Any] = {
    "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "main_params_dtype": "fp32",
}  # fmt: skip
"""Fields of the section optimizer: all of its state in the host's memory, where Adam keeps fp32."""

Value = int | float | bool | str | tuple[str, ...] | None


@dataclass(kw_only=True, slots=True, frozen=True)
class Change:
    """One axis moved."""

    axis: str
    fields: Mapping[str, Value]
    """New values by the fields' dotted names."""
    slower: float = 0.0
    """See ``SLOWER``."""
    ranks: int = 1
    """Times as many."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AlteredPlan:
    """Some changes together, and the configuration that they make."""

    changes: tuple[Change, ...]
    planned: Planned
    slower: float
    """Times as slow as before, about."""

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(change.axis for change in self.changes)

    def has_all_of(self, other: "AlteredPlan") -> bool:
        """Whether ``other`` is a part of these changes, and not the whole."""
        return len(other.changes) < len(self.changes) and all(change in self.changes for change in other.changes)

    def __str__(self) -> str:
        """What a user types."""
        words = [f"{self.planned.world_size:,} ranks"] if any(change.ranks > 1 for change in self.changes) else []
        fields = {name: value for change in self.changes for name, value in change.fields.items()}
        return " ".join([*words, *(f"--{name} {_typed(value)}" for name, value in fields.items())])


def _typed(value: Value) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def altered(asked: Planned, shape: GPTShape, ranks_per_node: int) -> list[AlteredPlan]:
    """Every legal configuration that differs in up to ``TOGETHER`` axes, the fastest first."""
    axes = list(_axes(asked, shape, ranks_per_node))
    found = []
    for count in range(1, TOGETHER + 1):
        for some in itertools.combinations(axes, count):
            for changes in itertools.product(*some):
                planned = applied(asked, changes)
                if planned.world_size % replica_size(planned.config.parallel):
                    continue  # by far the most frequent of all problems
                if not planned.config.problems(planned.world_size):
                    found.append(AlteredPlan(changes=changes, planned=planned, slower=_slower(asked, changes)))
    return sorted(found, key=lambda each: (each.slower, len(each.changes)))


def applied(asked: Planned, changes: Sequence[Change]) -> Planned:
    """The configuration with these changes, legal or not."""
    fields = {name: value for change in changes for name, value in change.fields.items()}
    ranks = math.prod(change.ranks for change in changes)
    return Planned(config=with_fields(asked.config, fields), world_size=asked.world_size * ranks)


def with_fields(config: RunConfig, fields: Mapping[str, Value]) -> RunConfig:
    """With some fields set, by their dotted names."""
    sections: dict[str, dict[str, Value]] = {}
    for name, value in fields.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    new = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **new)


def _slower(asked: Planned, changes: Sequence[Change]) -> float:
    """The pipeline's bubble, and the changes' own share."""
    before, after = (_with_bubble(planned) for planned in (asked, applied(asked, changes)))
    return after / before + sum(change.slower for change in changes)


def _with_bubble(planned: Planned) -> float:
    layout, train = planned.config.layout(planned.world_size), planned.config.train
    microbatches = batch_schedule(train).sizes()[-1] // (train.micro_batch_size * layout.dp)
    return 1 + bubble(layout, max(1, microbatches))


def _axes(asked: Planned, shape: GPTShape, ranks_per_node: int) -> Iterator[list[Change]]:
    """The choices of each axis that hold less."""
    parallel = asked.config.parallel
    choices = [
        _micro_batches(asked.config),
        _recomputations(asked.config, shape),
        _logits(asked.config, shape),
        _offloaded(asked.config, shape),
        _states(asked),
        _kept_states(asked.config),
        _tensor(asked.config, ranks_per_node),
        _stages(asked.config, shape.num_layers),
        _sizes("cp", "parallel.context_parallel_size", parallel.context_parallel_size)
        if asked.config.model.seq_length >= 2 * SHORTEST_PIECE * parallel.context_parallel_size
        else [],
        _sizes("ep", "parallel.expert_model_parallel_size", parallel.expert_model_parallel_size)
        if shape.num_moe_experts
        else [],
        [Change(axis="ranks", fields={}, ranks=2**power, slower=SLOWER["ranks"] * power) for power in (1, 2)],
    ]
    yield from (choice for choice in choices if choice)


def _micro_batches(config: RunConfig) -> list[Change]:
    own = config.train.micro_batch_size
    sizes = [size for size in range(own - 1, 0, -1) if own % size == 0]
    return [
        Change(
            axis="micro-batch",
            fields={"train.micro_batch_size": size},
            slower=SLOWER["micro-batch"] * math.log2(own / size),
        )
        for size in sizes
    ]


def _recomputations(config: RunConfig, shape: GPTShape) -> list[Change]:
    """Selective, of the widest module, then full: what is recomputed already is no choice."""
    train = config.train
    if train.recompute is not None:
        budget = recompute_budget(train.recompute) / 2**20
        lower = [f"auto:{budget * share:.0f}MiB" for share in LOWER_BUDGETS]
        return [Change(axis="recompute", fields={"train.recompute": each}, slower=SLOWER["budget"]) for each in lower]
    found: list[dict[str, Value]] = []
    full: dict[str, Value] = {
        "train.recompute_granularity": "full",
        "train.recompute_method": "uniform",
        "train.recompute_num_layers": 1,
    }
    module: RecomputeModule = "moe" if shape.num_moe_experts else "mlp"
    kept = train.recompute_modules if train.recompute_granularity == "selective" else ()
    can = module == "moe" or not shape.fc_bias  # training/config/incompatible.py says why
    if train.recompute_granularity != "full" and module not in kept and can:
        found.append({"train.recompute_granularity": "selective", "train.recompute_modules": (*kept, module)})
    if train.recompute_granularity != "full" or train.recompute_method == "block":
        found.append(full)
    before = executed_flops_per_token(config, shape)
    return [
        Change(
            axis="recompute",
            fields=each,
            slower=executed_flops_per_token(with_fields(config, each), shape) / before - 1,
        )
        for each in found
    ]


def _logits(config: RunConfig, shape: GPTShape) -> list[Change]:
    """Of fewer tokens at once."""
    own = config.train.cross_entropy_chunk_tokens
    tokens = config.train.micro_batch_size * config.model.seq_length // config.parallel.context_parallel_size
    if min(own or tokens, tokens) <= LOSS_CHUNK_TOKENS:
        return []
    fields: dict[str, Value] = {"train.cross_entropy_chunk_tokens": LOSS_CHUNK_TOKENS}
    slower = executed_flops_per_token(with_fields(config, fields), shape) / executed_flops_per_token(config, shape) - 1
    return [Change(axis="logits", fields=fields, slower=slower)]


def _offloaded(config: RunConfig, shape: GPTShape) -> list[Change]:
    """Activations wait on the host: inputs of the modules that the model has, or those of every block."""
    return [*_offloaded_modules(config, shape), *_offloaded_blocks(config, shape)]


def _offloaded_modules(config: RunConfig, shape: GPTShape) -> list[Change]:
    """Transformer Engine's alone can be: elsewhere none is predicted to leave, and so none is offered."""
    train = config.train
    named = offloadable(shape, config.precision, config.kernels, train)
    if train.cpu_offloading_num_layers or set(named) <= set(train.offload_modules):
        return []
    fields: dict[str, Value] = {"train.fine_grained_activation_offloading": True, "train.offload_modules": named}
    return [Change(axis="activations", fields=fields, slower=SLOWER["modules"])]


def _offloaded_blocks(config: RunConfig, shape: GPTShape) -> list[Change]:
    parallel = config.parallel
    chunks = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    blocks = -(-shape.num_layers // chunks)
    train = config.train
    if train.cpu_offloading_num_layers >= blocks or train.recompute_granularity == "full" or train.recompute:
        return []
    fields: dict[str, Value] = {"train.cpu_offloading_num_layers": blocks}
    return [Change(axis="activations", fields=fields, slower=SLOWER["activations"])]


def _states(asked: Planned) -> list[Change]:
    """The optimizer's state in shards, or all of a model, or shards in fewer copies."""
    layout, parallel = asked.config.layout(asked.world_size), asked.config.parallel
    found: list[Change] = []
    if layout.dp * layout.cp == 1:
        return found
    name = "parallel.data_parallel_sharding_strategy"
    if parallel.sharding == "no_shard":
        fields: dict[str, Value] = {"parallel.use_distributed_optimizer": True}
        if parallel.data_parallel_sharding_strategy is not None:  # which goes before the other
            fields = {name: "optim"}
        found.append(Change(axis="states", fields=fields, slower=SLOWER["states"]))
    if parallel.sharding != "optim_grads_params":
        more: dict[str, Value] = {name: "optim_grads_params"}
        if parallel.ddp_bucket_size is not None:  # DDP's, which shards do without
            more["parallel.ddp_bucket_size"] = None
        found.append(Change(axis="states", fields=more, slower=SLOWER["shards"]))
    if parallel.num_distributed_optimizer_instances > 1:
        one: dict[str, Value] = {name: "optim_grads_params", "parallel.num_distributed_optimizer_instances": 1}
        found.append(Change(axis="states", fields=one, slower=SLOWER["shards"]))
    return found


def _kept_states(config: RunConfig) -> list[Change]:
    """Main weights as remainders, moments in bf16, or all of it on the host: what a run may not have is refused."""
    optimizer, found = config.optimizer, list[Change]()
    if optimizer.optimizer_cpu_offload:
        return found
    aware: dict[str, Value] = {"optimizer.use_precision_aware_optimizer": True}
    if not optimizer.use_precision_aware_optimizer:
        found.append(Change(axis="kept states", fields=aware, slower=SLOWER["remainders"]))
    moments = ("exp_avg_dtype", "exp_avg_sq_dtype")
    if wide := [name for name in moments if getattr(optimizer, name) == "fp32"]:
        fields = aware | {f"optimizer.{name}": "bf16" for name in wide}
        found.append(Change(axis="kept states", fields=fields, slower=SLOWER["bf16 moments"]))
    host = {f"optimizer.{name}": new for name, new in ON_THE_HOST.items() if getattr(optimizer, name) != new}
    return [*found, Change(axis="kept states", fields=host, slower=SLOWER["host"])]


def _tensor(config: RunConfig, ranks_per_node: int) -> list[Change]:
    """Within a node, with sequence parallelism, which costs nothing more; alone where TP is there without it."""
    tp, found = config.parallel.tensor_model_parallel_size, []
    name, sequence = "parallel.tensor_model_parallel_size", {"parallel.sequence_parallel": True}
    own: dict[str, Value] = {} if config.parallel.sequence_parallel else {**sequence}
    if tp > 1 and own:
        found.append(Change(axis="tp", fields=own))
    wider = _sizes("tp", name, tp)
    return found + [
        dataclasses.replace(change, fields={**change.fields, **own})
        for power, change in enumerate(wider, start=1)
        if tp * 2**power <= ranks_per_node
    ]


def _stages(config: RunConfig, layers: int) -> list[Change]:
    """More of them, dealt again: what described the old number in detail is dropped."""
    parallel, name = config.parallel, "parallel.pipeline_model_parallel_size"
    own = parallel.pipeline_model_parallel_size
    found = []
    for power, change in enumerate(_sizes("pp", name, own), start=1):
        dealt = stage_fields(layers, own * 2**power)
        new = {f"parallel.{key}": value for key, value in dealt.items() if getattr(parallel, key) != value}
        found.append(dataclasses.replace(change, fields={**change.fields, **new}))
    return found


def stage_fields(layers: int, pp: int) -> dict[str, Any]:
    """Equal stages; else fewer layers on the first and the last, which hold the vocabulary besides."""
    rest = layers - (pp - 2) * -(-layers // pp)
    uneven = layers % pp > 0
    return {
        "num_layers_in_first_pipeline_stage": rest - rest // 2 if uneven else None,
        "num_layers_in_last_pipeline_stage": rest // 2 if uneven else None,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
    }


def _sizes(axis: str, name: str, own: int) -> list[Change]:
    return [
        Change(axis=axis, fields={name: own * 2**power}, slower=SLOWER[axis] * power)
        for power in range(1, DOUBLINGS + 1)
    ]
