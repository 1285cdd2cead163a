"""Parameters and bytes of every pipeline stage: what a rank holds before it sees a token."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from models.parameters import (
    Parameter,
    block_parameters,
    embedding_parameters,
    head_parameters,
    mtp_parameters,
)
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout, expert_tensor_parallel_size
from parallel.stages import layers_per_chunk

SPLIT_BY_TP = (
    "word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_fc1.weight",
    "linear_fc1.bias", "linear_fc2.weight", "output_layer.weight", "linear_q_proj.weight", "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight", "eh_proj.weight",
)  # fmt: skip
"""Endings of the parameters that TP splits; the others are whole on every TP rank (arXiv:1909.08053).

Latent attention's down projections are whole in Transformer Engine's modules; ours on the CPU split them."""


@dataclass(slots=True, frozen=True)
class StageParameters:
    """One pipeline stage: its layers, chunk by chunk, and its parameters, padded vocabulary included."""

    layers: tuple[range, ...]
    parameters: int
    parameters_per_rank: int
    expert_parameters_per_rank: int
    """Those of parameters_per_rank that are of experts, which other ranks share than those of the rest."""


def stages(shape: GPTShape, parallel: ParallelConfig) -> list[StageParameters]:
    """Every stage, first to last."""
    pp = parallel.pipeline_model_parallel_size
    counts = layers_per_chunk(parallel, shape.num_layers)
    ends = list(itertools.accumulate(counts))
    chunks = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    found = []
    for stage in range(pp):
        held = list(_held(shape, chunks[stage::pp], first=stage == 0, last=stage == pp - 1))
        local = [(parameter, local_size(parameter, parallel)) for parameter in held]
        found.append(
            StageParameters(
                layers=tuple(chunks[stage::pp]),
                parameters=sum(parameter.size for parameter in held),
                parameters_per_rank=sum(size for _, size in local),
                expert_parameters_per_rank=sum(size for parameter, size in local if parameter.of_experts),
            )
        )
    return found


def _held(shape: GPTShape, chunks: list[range], first: bool, last: bool) -> Iterator[Parameter]:
    """What a stage holds.

    The last stage predicts further tokens, and has a copy of the embeddings for that, or for a tied output layer,
    where it is not also the first.
    """
    if first:
        yield from embedding_parameters(shape)
    for block in itertools.chain.from_iterable(chunks):
        yield from block_parameters(shape, block)
    if last:
        yield from head_parameters(shape)
        for depth in range(shape.mtp_num_layers):
            yield from mtp_parameters(shape, depth)
        if not first and (shape.tied or shape.mtp_num_layers):
            yield next(embedding_parameters(shape))


def local_size(parameter: Parameter, parallel: ParallelConfig) -> int:
    """Elements on one rank: whole experts go to EP, the matrices of each to ETP, all other matrices to TP."""
    if parameter.of_experts:
        return parameter.size // (parallel.expert_model_parallel_size * expert_tensor_parallel_size(parallel))
    split = parameter.name.endswith(SPLIT_BY_TP)
    return parameter.size // parallel.tensor_model_parallel_size if split else parameter.size


FP8_COPIES = 2
"""Bytes a parameter that Transformer Engine keeps beside a 16-bit weight under fp8: in fp8, and so transposed, made
again in each step's first microbatch and kept for the others. Counted for every parameter, for nearly all are in
matrices that are multiplied in fp8; embeddings, norms and the output layer are not."""


@dataclass(slots=True, frozen=True)
class Bytes:
    """Bytes that a rank holds throughout a step: for one parameter, or for all of its own."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(precision: PrecisionConfig, parallel: ParallelConfig, shards: int) -> Bytes:
    """Weights, main gradients, and AdamW's fp32 state, which the distributed optimizer splits over ``shards`` ranks.

    The table in megatron-core's user guide, "Distributed Optimizer": 6 + 12/d for bf16 with fp32 gradients,
    8 + 8/d for fp32. Gradients that are not fp32 have an fp32 copy while the optimizer steps. Under fp8 weights have
    their copies (``FP8_COPIES``).
    """
    weights = (4 if precision.dtype == "fp32" else 2) + (FP8_COPIES if precision.fp8 else 0)
    gradients = 4 if precision.dtype == "fp32" or precision.grad_reduce_in_fp32 else 2
    main_weights = 0 if precision.dtype == "fp32" else 4
    main_gradients = 0 if gradients == 4 else 4
    divisor = shards if parallel.use_distributed_optimizer else 1
    return Bytes(weights, gradients, (main_weights + main_gradients + 8) / divisor)


def rank_bytes(stage: StageParameters, precision: PrecisionConfig, parallel: ParallelConfig, layout: Layout) -> Bytes:
    """What a rank of ``stage`` holds. Optimizer state is split over the ranks that hold the same parameters.

    These are DP x CP; of experts, what EP x ETP leaves of TP x CP x DP.
    """
    rest = bytes_per_parameter(precision, parallel, layout.dp * layout.cp)
    expert = bytes_per_parameter(precision, parallel, layout.edp)
    experts = stage.expert_parameters_per_rank
    others = stage.parameters_per_rank - experts
    return Bytes(
        weights=others * rest.weights + experts * expert.weights,
        gradients=others * rest.gradients + experts * expert.gradients,
        optimizer=others * rest.optimizer + experts * expert.optimizer,
    )


def checkpoint_bytes(parameters: int, precision: PrecisionConfig) -> int:
    """About what a checkpoint weighs: the weights as computed with, fp32 main weights, two fp32 moments."""
    return parameters * (12 + (4 if precision.dtype == "fp32" else 2))
