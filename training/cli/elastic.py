"""A layout for the ranks that were given, near to the one that was asked for (``parallel.elastic``).

Global batch, micro-batch and data order stay as they are, so that losing a node, or finding it again, costs a restart.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from models.resolve import resolve
from parallel.config import ParallelConfig
from parallel.layout import Layout, layout_of, replica_size
from training.config.run_config import RunConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class ElasticLayout:
    """What runs instead of what was asked for."""

    config: RunConfig
    world_size: int
    """Ranks that take part, from rank 0 on; the others have nothing to do."""
    words: str
    """What changed, for people; empty where everything fits as it is."""


def elastic_layout(config: RunConfig, world_size: int) -> ElasticLayout:
    """The nearest workable DP for the sizes that were asked for; where there is none, fewer copies of the shards
    (HSDP), then another PP, then another TP.

    Of the layouts that change as little, the one that uses most ranks. Where no layout helps, or without
    ``parallel.elastic``, everything stays, for ``RunConfig.problems`` to say what is wrong. Memory is not considered: a
    replica on fewer ranks needs more of each.
    """
    as_asked = ElasticLayout(config=config, world_size=world_size, words="")
    if not config.parallel.elastic or not config.problems(world_size):
        return as_asked
    for changes in _changes(config):
        found = [
            (ranks, -distance, other)
            for other, distance in changes
            if (ranks := _most_ranks(other, world_size)) is not None
        ]
        if found:
            ranks, _, other = max(found, key=lambda entry: entry[:2])
            return ElasticLayout(config=other, world_size=ranks, words=_words(config, other, world_size, ranks))
    return as_asked


def _changes(config: RunConfig) -> Iterator[list[tuple[RunConfig, float]]]:
    """Configurations in the order in which they are tried, each with how far its sizes are from what was asked for."""
    layers = resolve(config.model, None).num_layers
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    others = [size for size in range(1, layers + 1) if size != pp]
    smaller = [size for size in range(1, tp) if tp % size == 0]
    copies = config.parallel.num_distributed_optimizer_instances
    yield [(config, 0.0)]
    yield [(_with_copies(config, size), _distance(size, copies)) for size in range(1, copies) if copies % size == 0]
    one = _with_copies(config, 1)
    yield [(_with(one, tp, size), _distance(size, pp)) for size in others]
    yield [
        (_with(one, fewer, size), _distance(size, pp) + _distance(fewer, tp))
        for fewer in smaller
        for size in (pp, *others)
    ]


def _distance(size: int, asked: int) -> float:
    return abs(math.log2(size / asked))


def _with_copies(config: RunConfig, copies: int) -> RunConfig:
    parallel = dataclasses.replace(config.parallel, num_distributed_optimizer_instances=copies)
    if copies == 1 and parallel.data_parallel_sharding_strategy == "HYBRID_SHARD":
        parallel = dataclasses.replace(parallel, data_parallel_sharding_strategy="FULL_SHARD")
    return dataclasses.replace(config, parallel=parallel)


def _with(config: RunConfig, tp: int, pp: int) -> RunConfig:
    """Other sizes; what a number of stages was described by in detail falls away with it."""
    parallel = dataclasses.replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        sequence_parallel=config.parallel.sequence_parallel and tp > 1,
        pipeline_model_parallel_size=pp,
    )
    if pp != config.parallel.pipeline_model_parallel_size:
        parallel = dataclasses.replace(
            parallel,
            virtual_pipeline_model_parallel_size=None,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            pipeline_model_parallel_layout=None,
        )
    return dataclasses.replace(config, parallel=parallel)


def _most_ranks(config: RunConfig, world_size: int) -> int | None:
    """The most of ``world_size`` ranks on which ``config`` runs, whole replicas with whole microbatches."""
    replica, train = replica_size(config.parallel), config.train
    for dp in range(world_size // replica, 0, -1):
        if train.global_batch_size % (train.micro_batch_size * dp) == 0 and not config.problems(replica * dp):
            return replica * dp
    return None


def _words(asked: RunConfig, fitted: RunConfig, world_size: int, ranks: int) -> str:
    layout = layout_of(fitted.parallel, ranks)
    changed = _changed(asked.parallel, fitted.parallel)
    text = f"parallel.elastic: {asked.problems(world_size)[0].partition('. ')[0]}. Running as {layout} on {ranks} ranks"
    text += f", with {changed}" if changed else ""
    if ranks < world_size:
        text += f"; {world_size - ranks} of {world_size} ranks stay idle{_remedy(fitted, layout, world_size)}"
    return text


def _changed(asked: ParallelConfig, fitted: ParallelConfig) -> str:
    return ", ".join(
        f"{field.name} {getattr(fitted, field.name)} (was: {getattr(asked, field.name)})"
        for field in dataclasses.fields(ParallelConfig)
        if getattr(asked, field.name) != getattr(fitted, field.name)
    )


def _remedy(config: RunConfig, layout: Layout, world_size: int) -> str:
    """Which global batch would have used every whole replica."""
    replica = replica_size(config.parallel)
    dp = world_size // replica
    unit = config.train.micro_batch_size * dp
    if dp == layout.dp or config.train.changes_batch:
        return ""
    size = max(1, round(config.train.global_batch_size / unit)) * unit
    return f" (train.global_batch_size {size} would use {replica * dp} of them)"
