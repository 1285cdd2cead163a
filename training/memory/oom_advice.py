"""What takes most of a memory that was too small, and which changes would fit."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.costs.peak import SAFE_HOST_SHARE, SAFE_SHARE
from models.shapes import GPTShape
from parallel.config import Sharding
from parallel.launch import Identity
from training.config.run_config import RunConfig
from training.memory.oom_candidates import AlteredPlan, altered, stage_fields
from training.memory.planned import Modules, Planned
from training.memory.predicted import Predicted, fullest, largest_first, size

SHOWN = 3
LESS = 0.9
"""Of its own prediction, at most, that a change must come to where the prediction alone would have fitted."""
DOUBLINGS = 10
"""Of the ranks, when it is asked how many would do."""
LEANEST: tuple[Sharding | None, ...] = (None, "optim_grads_params")
"""Strategies; None: the distributed optimizer."""


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


def advice(config: RunConfig, identity: Identity, shape: GPTShape, modules: Modules, room: Room) -> str:
    """The last words of a run that ran out of memory."""
    asked = Planned(config=config, world_size=identity.world_size)
    expected = fullest([asked], shape, modules)[0]
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
    fitting = changes_that_fit(
        asked, shape, modules, most, SAFE_HOST_SHARE * room.host_bytes, identity.local_world_size
    )
    if not fitting:
        return "\n".join([*lines, *no_change(asked, shape, modules, most, identity.local_world_size)])
    lines.append(f"These would fit below {size(most)} ({safe}), what costs least speed first:")
    return "\n".join([*lines, *(f"  {found}: {size(held.total)}" for found, held in fitting)])


def changes_that_fit(
    asked: Planned, shape: GPTShape, modules: Modules, most: float, most_on_host: float, ranks_per_node: int
) -> list[tuple[AlteredPlan, Predicted]]:
    """At most ``SHOWN``: of the same axes the fastest, and none of which a part alone is enough."""
    choices = altered(asked, shape, ranks_per_node)
    if not choices:
        return []
    priced = fullest([choice.planned for choice in choices], shape, modules)
    fit = [
        (choice, held)
        for choice, held in zip(choices, priced, strict=True)
        if held.total <= most and held.host <= most_on_host
    ]
    found: list[tuple[AlteredPlan, Predicted]] = []
    for choice, held in fit:
        more = any(choice.has_all_of(other) for other, _ in fit)
        if not more and all(choice.axes != other.axes for other, _ in found):
            found.append((choice, held))
        if len(found) == SHOWN:
            break
    return found


def no_change(asked: Planned, shape: GPTShape, modules: Modules, most: float, ranks_per_node: int) -> Iterator[str]:
    """How many ranks would do, at the leanest."""
    yield f"No change of this configuration fits below {size(most)} on {asked.world_size:,} ranks."
    for power in range(DOUBLINGS + 1):
        world = asked.world_size * 2**power
        lean = list(_leanest(asked, shape, world, ranks_per_node))
        held = fullest(lean, shape, modules) if lean else []
        fit = [(each.total, number) for number, each in enumerate(held) if each.total <= most]
        if fit:
            total, number = min(fit)
            batch = lean[number].config.train.global_batch_size
            grown = f", train.global_batch_size {batch:,}" if batch != asked.config.train.global_batch_size else ""
            sharded = "ZeRO-3" if lean[number].config.parallel.fully_sharded else "the distributed optimizer"
            yield (
                f"{world:,} ranks would do: {lean[number].config.layout(world)}, micro-batches of 1, full "
                f"recomputation, {sharded}{grown}: {size(total)}"
            )
            return
    yield f"Nor would {asked.world_size * 2**DOUBLINGS:,} ranks do: use cards with more memory, or a smaller model."


def _leanest(asked: Planned, shape: GPTShape, world_size: int, ranks_per_node: int) -> Iterator[Planned]:
    """Layouts of so many ranks that recompute and shard whatever they can."""
    config = asked.config
    train = dataclasses.replace(
        config.train, micro_batch_size=1, recompute=None, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1, rampup_batch_size=None,
    )  # fmt: skip
    for tp in _powers(min(ranks_per_node, world_size)):
        for pp in _powers(min(world_size // tp, shape.num_layers)):
            for cp in _powers(world_size // (tp * pp)):
                dp = world_size // (tp * pp * cp)
                batch = -(-max(train.global_batch_size, dp) // dp) * dp
                parallel = dataclasses.replace(
                    config.parallel, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
                    pipeline_model_parallel_size=pp, context_parallel_size=cp, use_distributed_optimizer=True,
                    num_distributed_optimizer_instances=1, **stage_fields(shape.num_layers, pp),
                )  # fmt: skip
                for strategy in LEANEST:
                    own = dataclasses.replace(parallel, data_parallel_sharding_strategy=strategy)
                    own = own if strategy is None else dataclasses.replace(own, ddp_bucket_size=None)
                    lean = dataclasses.replace(
                        config, parallel=own, train=dataclasses.replace(train, global_batch_size=batch)
                    )
                    if not lean.problems(world_size):
                        yield Planned(config=lean, world_size=world_size)


def _powers(most: int) -> Sequence[int]:
    return [2**power for power in range(max(1, most).bit_length())]
