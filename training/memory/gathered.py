"""Bytes that fully sharded data parallelism holds while units compute, beside a rank's shards."""

from typing import NamedTuple

import numpy as np

from training.memory.activations import element_bytes, in_flight
from training.memory.cases import FORMATS, Column, MemoryColumns
from training.memory.stage_parameters import FP4_COPIES, FP8_COPIES


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
    stays = np.where(software.gathers_once > 0, element_bytes(columns) * parameters, 0.0)
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
