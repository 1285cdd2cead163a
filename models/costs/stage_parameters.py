"""Parameters of every pipeline stage, one by one, and the size of a checkpoint."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from models.costs.parameters import Parameter, block_parameters, embedding_parameters, head_parameters, mtp_parameters
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import expert_tensor_parallel_size
from parallel.stages import layers_per_chunk

SPLIT_BY_TP = (
    "word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_fc1.weight",
    "linear_fc1.bias", "linear_fc2.weight", "output_layer.weight", "linear_q_proj.weight", "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight", "eh_proj.weight", ".dt_bias", ".A_log", "mixer.D", ".in_proj.weight", ".conv1d.weight",
    ".conv1d.bias", "mixer.norm.weight", ".out_proj.weight",
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
FP4_COPIES = 2 * (1 / 2 + 1 / 16)
"""The same under fp4: four bits, and an 8-bit scale for 16 of them."""


def product_copies(precision: PrecisionConfig) -> float:
    """Bytes a parameter of Transformer Engine's copies, beside its 2 of 16 bits.

    Weights that are kept in fp8 have none: a copy for each direction that they are multiplied in takes these 2 bytes
    (Blackwell needs one of the two but for mxfp8, which is not counted).
    """
    if precision.fp8_param_gather:
        return 0
    return {"fp8": FP8_COPIES, "fp4": FP4_COPIES}.get(precision.products or "", 0)


def checkpoint_bytes(parameters: int, precision: PrecisionConfig) -> int:
    """About what a checkpoint weighs: the weights as computed with, fp32 main weights, two fp32 moments."""
    return parameters * (12 + (4 if precision.dtype == "fp32" else 2))
