"""Parameters and bytes of every pipeline stage: what a rank holds before it sees a token. No torch here."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from models.shapes import GPTShape, Parameter, block_parameters, embedding_parameters, head_parameters
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout
from parallel.stages import layers_per_chunk

SPLIT_BY_TP = (
    "word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight",
    "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "output_layer.weight",
)  # fmt: skip
"""Endings of the parameters that TP splits; the others are whole on every TP rank (arXiv:1909.08053)."""


@dataclass(slots=True, frozen=True)
class Stage:
    """One pipeline stage: its layers, chunk by chunk, and its parameters, padded vocabulary included."""

    layers: tuple[range, ...]
    parameters: int
    parameters_per_rank: int


def stages(shape: GPTShape, parallel: ParallelConfig) -> list[Stage]:
    """Every stage, first to last."""
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    counts = layers_per_chunk(parallel, shape.num_layers)
    ends = list(itertools.accumulate(counts))
    chunks = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    found = []
    for stage in range(pp):
        held = list(_held(shape, chunks[stage::pp], first=stage == 0, last=stage == pp - 1))
        found.append(
            Stage(
                layers=tuple(chunks[stage::pp]),
                parameters=sum(parameter.size for parameter in held),
                parameters_per_rank=sum(_local_size(parameter, tp) for parameter in held),
            )
        )
    return found


def _held(shape: GPTShape, chunks: list[range], first: bool, last: bool) -> Iterator[Parameter]:
    """What a stage holds; of tied embeddings the last stage has a copy where it is not also the first."""
    if first:
        yield from embedding_parameters(shape)
    for block in itertools.chain.from_iterable(chunks):
        yield from block_parameters(shape, block)
    if last:
        yield from head_parameters(shape)
        if shape.tied and not first:
            yield next(embedding_parameters(shape))


def _local_size(parameter: Parameter, tp: int) -> int:
    return parameter.size // tp if parameter.name.endswith(SPLIT_BY_TP) else parameter.size


@dataclass(slots=True, frozen=True)
class BytesPerParameter:
    """Bytes that a rank holds for each of its parameters, throughout a step."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(precision: PrecisionConfig, parallel: ParallelConfig, layout: Layout) -> BytesPerParameter:
    """Weights, main gradients, and AdamW's fp32 state, which the distributed optimizer splits over DP x CP.

    The table in megatron-core's user guide, "Distributed Optimizer": 6 + 12/d for bf16 with fp32 gradients,
    8 + 8/d for fp32. Gradients that are not fp32 have an fp32 copy while the optimizer steps.
    """
    weights = 4 if precision.dtype == "fp32" else 2
    gradients = 4 if precision.dtype == "fp32" or precision.grad_reduce_in_fp32 else 2
    main_weights = 0 if precision.dtype == "fp32" else 4
    main_gradients = 0 if gradients == 4 else 4
    shards = layout.dp * layout.cp if parallel.use_distributed_optimizer else 1
    return BytesPerParameter(weights, gradients, (main_weights + main_gradients + 8) / shards)


def checkpoint_bytes(parameters: int, precision: PrecisionConfig) -> int:
    """About what a checkpoint weighs: the weights as computed with, fp32 main weights, two fp32 moments."""
    return parameters * (12 + (4 if precision.dtype == "fp32" else 2))
