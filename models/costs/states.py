"""Weights, gradients and optimizer state of every stage, exactly as the program holds them, and what fully sharded data
parallelism gathers while units compute.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from models.costs.activations import in_flight
from models.costs.candidate import Candidate, chunks
from models.costs.cases import FORMATS, Column, MemoryColumns, States, element_bytes
from models.costs.parameters import Parameter, block_parameters, embedding_parameters, head_parameters, mtp_parameters
from models.costs.program import OURS, Software, sharded
from models.costs.stage_parameters import FP4_COPIES, FP8_COPIES, local_size
from models.shapes import GPTShape
from parallel.config import ParallelConfig


class Blocks(NamedTuple):
    """Blocks of one stage: those without experts, and mixtures of experts."""

    plain: int
    mixtures: int
    kinds: Mapping[str, int]
    """How many there are of each kind of ``GPTShape.blocks``."""


class HeldParameters(NamedTuple):
    """Parameters on a rank of one stage: of experts, which other ranks share than those of the rest."""

    dense: int
    expert: int
    dense_matrices: int = 0
    expert_matrices: int = 0
    """Of both, those that Muon updates."""


HOST_STATE_BYTES = 16
"""Of a parameter whose optimizer state is on the host: fp32 weight and gradient, and both moments. Copies of gradients
stay from step to step (HybridDeviceOptimizer's; FSDP2's in torch's cache of pinned memory)."""


class BlockStack:
    """The blocks of one shape, dealt out to stages; each way of dealing is worked out once."""

    def __init__(self, shape: GPTShape) -> None:
        self.shape = shape
        self._before = {
            kind: list(itertools.accumulate((block == kind for block in shape.blocks), initial=0))
            for kind in dict.fromkeys(shape.blocks)
        }
        self._blocks: dict[tuple[object, ...], list[Blocks]] = {}
        self._chunks: dict[tuple[object, ...], list[int]] = {}
        self._held: dict[tuple[object, ...], HeldParameters] = {}
        self._sizes: dict[tuple[int, int, int], _ShardSizes] = {}

    def blocks(self, layout: Candidate) -> list[Blocks]:
        """Of each stage."""
        key = _dealt(layout)
        if key not in self._blocks:
            self._blocks[key] = self._deal(layout)
        return self._blocks[key]

    def chunks(self, layout: Candidate) -> list[int]:
        """Blocks of each chunk, first to last."""
        key = _dealt(layout)
        if key not in self._chunks:
            self._chunks[key] = chunks(self.shape.num_layers, layout)
        return self._chunks[key]

    def richest(self, layout: Candidate) -> int:
        """The first stage of those with the most mixtures of experts."""
        found = [blocks.mixtures for blocks in self.blocks(layout)]
        return found.index(max(found))

    def held(self, layout: Candidate, stage: int) -> HeldParameters:
        """Parameters of a rank of one stage."""
        key = (stage, layout.tp, layout.ep, layout.etp, *_dealt(layout))
        if key not in self._held:
            self._held[key] = self._count(layout, stage)
        return self._held[key]

    def _count(self, layout: Candidate, stage: int) -> HeldParameters:
        key = (layout.tp, layout.ep, layout.etp)
        if key not in self._sizes:
            self._sizes[key] = _sizes(self.shape, *key)
        sizes, own = self._sizes[key], self.blocks(layout)[stage]
        first, last = stage == 0, stage == layout.pp - 1
        ends = zip((first, last, last and not first), (sizes.embedding, sizes.head, sizes.copy), strict=True)
        held = [*ends, *((count, sizes.blocks[kind]) for kind, count in own.kinds.items())]
        return HeldParameters(*(sum(count * part[at] for count, part in held) for at in range(4)))

    def _deal(self, layout: Candidate) -> list[Blocks]:
        start, stages = 0, [dict.fromkeys(self._before, 0) for _ in range(layout.pp)]
        for number, count in enumerate(self.chunks(layout)):
            for kind, before in self._before.items():
                stages[number % layout.pp][kind] += before[start + count] - before[start]
            start += count
        mixtures = [sum(count for kind, count in kinds.items() if "E" in kind) for kinds in stages]
        return [Blocks(sum(kinds.values()) - own, own, kinds) for own, kinds in zip(mixtures, stages, strict=True)]


def _dealt(layout: Candidate) -> tuple[object, ...]:
    """What decides which blocks are where."""
    return (layout.pp, layout.vpp, layout.split, layout.first_layers, layout.last_layers, layout.chunk_layers)


class _ShardSizes(NamedTuple):
    blocks: Mapping[str, HeldParameters]
    """By their kind."""
    embedding: HeldParameters
    head: HeldParameters
    copy: HeldParameters
    """The last stage's word embeddings, where a tied output layer or multi-token prediction needs them."""


def _sizes(shape: GPTShape, tp: int, ep: int, etp: int) -> _ShardSizes:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )

    def local(parameters: list[Parameter]) -> HeldParameters:
        sizes = [(local_size(parameter, parallel), parameter) for parameter in parameters]
        return HeldParameters(*(
            sum(size for size, one in sizes if one.of_experts == expert and (one.is_matrix or not matrices))
            for matrices in (False, True) for expert in (False, True)
        ))  # fmt: skip

    numbers = {kind: shape.blocks.index(kind) for kind in dict.fromkeys(shape.blocks)}
    nothing = HeldParameters(0, 0)
    depths = [parameter for depth in range(shape.mtp_num_layers) for parameter in mtp_parameters(shape, depth)]
    word = next(iter(embedding_parameters(shape)))
    return _ShardSizes(
        blocks={kind: local(list(block_parameters(shape, number))) for kind, number in numbers.items()},
        embedding=local(list(embedding_parameters(shape))),
        head=local([*head_parameters(shape), *depths]),
        copy=local([word]) if shape.tied or shape.mtp_num_layers else nothing,
    )


def states(own: HeldParameters, layout: Candidate, software: Software | None = None) -> States:
    """Bytes of a stage's rank; sharded parts are split over DP x CP, those of experts over what EP x ETP leaves.

    ZeRO-2 and -3 shard gradients, and weights, as well (arXiv:1910.02054, section 5); of HSDP, each copy.

    software: None: pretrain_gpt.py, with gradients in fp32.
    """
    program = sharded(OURS, layout.zero) if software is None else software
    return States(*state_bytes(own, layout, layout.precision == "fp32", program))


def state_bytes(own: Any, layout: Any, fp32: Any, software: Any) -> list[Any]:
    """``states`` of one case, or of many: all may be columns over the cases (models/costs/cases.py), so that there
    are no branches. own: as HeldParameters."""
    gradient_bytes = software.main_gradient_bytes
    everywhere = layout.dp * layout.cp // layout.copies
    apart = layout.tp * everywhere // (layout.ep * layout.etp)
    apart = apart + (apart < 1)
    weight = 4 * fp32 + software.main_weight_bytes * (1 - fp32)
    gradient = 4 * fp32 + gradient_bytes * (1 - fp32)
    shards = (1 - fp32) + fp32 * (layout.zero == 2)  # fp32 weights are stepped as they are, where they are not whole
    copies = 4 * (gradient < 4) * software.keeps_fp32_gradients
    rest = software.main_param_bytes * shards + copies + software.moment_bytes

    here = 1 - software.host_state * (layout.zero >= 2)  # of HSDP, copies add up a step's gradients on the GPU
    sizes = (
        weight * (1 - (layout.zero == 3) * (1 - here)),
        gradient * (1 - (layout.copies == 1) * (1 - here)),
        rest * here + software.average_bytes,
        HOST_STATE_BYTES * software.host_state + software.host_average_bytes,
    )
    shared, matrices = (list(zip(held, (everywhere, apart), strict=True)) for held in (own[:2], own[2:]))
    found = [
        sum(size * count / (1 + (ranks - 1) * (layout.zero >= zero)) for count, ranks in shared)
        for size, zero in zip(sizes, (3, 2, 1, 1), strict=True)
    ]
    found[2] -= (software.muon_steps > 0) * sum(4 * n / (1 + (ranks - 1) * (layout.zero >= 1)) for n, ranks in matrices)
    return found


class Gathered(NamedTuple):
    """At most, at two moments of a step."""

    at_work: Column
    """While a block's backward pass runs."""
    at_the_loss: Column
    """On the last stage, beside the logits and the activations of all blocks: no block's gradients are there yet."""


def gathered_bytes(columns: MemoryColumns, stage: Column, held: tuple[Column, Column], blocks: Column) -> Gathered:
    """On a rank of one stage: of ZeRO-3 the weights, and gradients, of the two blocks at work, or the weights
    of all where they stay; of ZeRO-2 the gradients of these two. held: parameters of its rank, dense and of experts,
    were nothing sharded."""
    layout, software, (dense, expert) = columns.layout, columns.software, held
    parameters = dense + expert
    two = 2 * parameters / np.maximum(1, blocks)
    stays = np.where(columns.published.gathers_once > 0, element_bytes(columns) * parameters, 0.0)
    gradients = software.gradient_bytes * two
    otherwise = np.select([layout.zero >= 3, layout.zero == 2], [4 * two + stays, gradients], 0.0)
    casts, by_unit = _casts_of_experts(columns, stage, expert), _by_unit(columns, stage, parameters, blocks)
    return Gathered(*(np.where(software.by_unit > 0, each + casts, otherwise) for each in by_unit))


def _casts_of_experts(columns: MemoryColumns, stage: Column, expert: Column) -> Column:
    """Transformer Engine's grouped products keep their weights as they cast them for the backward pass, of each
    microbatch in flight (2.19, grouped_linear.py: weights_fp8), unless they are computed again; its other products
    cast again."""
    small = (columns.format >= 1) & (columns.format <= 3)
    again = columns.recomputes("full") | columns.recomputes("moe")
    copies = np.where(columns.format == FORMATS.index("fp4"), FP4_COPIES, FP8_COPIES)
    return np.where(small & ~again, copies * expert * in_flight(columns, stage), 0.0)


def _by_unit(columns: MemoryColumns, stage: Column, parameters: Column, blocks: Column) -> Gathered:
    """FSDP2 (torch 2.13, _fsdp_param_group.py). While a block's backward pass runs: its weights and their gradients,
    the buffer that the next unit is gathered into, and the one that the last unit's gradients are reduced in. The last
    unit is another block, or the output layer, which is whole itself while its own gradient is computed, beside the
    buffer of the last block. Tied embeddings, in the root, are whole with their gradient until the pass ends.
    """
    layout, model = columns.layout, columns.model
    element = element_bytes(columns)
    wide = np.where(columns.format == FORMATS.index("fp32"), 4, columns.software.gradient_bytes)
    table = model.vocab * model.hidden / layout.tp
    first, last = stage == 0, stage == layout.pp - 1
    tied = model.tied > 0
    tables = table * (first.astype(float) + last * (1 - tied * first))
    block = (parameters - tables) / np.maximum(1, blocks)
    head = np.where(last & ~tied, table, 0.0)
    whole = np.where(layout.zero >= 3, 1, 0)  # of ZeRO-2, weights are counted as such, and none is gathered again
    of_block = (2 * whole + 1) * element * block
    at_the_loss = (whole + 1) * element * head + element * block
    at_work = np.maximum(of_block + wide * np.maximum(block, head), at_the_loss)
    kept = np.where(tied & (first | last), (whole + 1) * element * table, 0.0)
    return Gathered(*(np.where(layout.zero >= 2, each + kept, 0.0) for each in (at_work, at_the_loss)))
