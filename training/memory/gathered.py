"""Bytes that fully sharded data parallelism holds while units compute, beside a rank's shards."""

import numpy as np

from training.memory.activations import element_bytes
from training.memory.cases import FORMATS, Column, MemoryColumns


def gathered_bytes(columns: MemoryColumns, stage: Column, parameters: Column, blocks: Column) -> Column:
    """At most, on a rank of one stage: of ZeRO-3 the weights, and gradients, of the two blocks at work, or the weights
    of all where they stay; of ZeRO-2 the gradients of these two. parameters: of its rank, were nothing sharded."""
    layout, software = columns.layout, columns.software
    two = 2 * parameters / np.maximum(1, blocks)
    held = np.where(software.gathers_once > 0, element_bytes(columns) * parameters, 0.0)
    gradients = software.gradient_bytes * two
    otherwise = np.select([layout.zero >= 3, layout.zero == 2], [4 * two + held, gradients], 0.0)
    return np.where(software.by_unit > 0, _by_unit(columns, stage, parameters, blocks), otherwise)


def _by_unit(columns: MemoryColumns, stage: Column, parameters: Column, blocks: Column) -> Column:
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
    whole = np.where(layout.zero >= 3, 1, 0)  # of ZeRO-2, weights are counted as such
    of_block = (whole + 2) * element * block
    at_work = np.maximum(of_block + wide * np.maximum(block, head), (whole + 1) * element * head + element * block)
    kept = np.where(tied & (first | last), (whole + 1) * element * table, 0.0)
    return np.where(layout.zero >= 2, at_work + kept, 0.0)
