"""Seconds of the embedding, the output layer and the loss, forward and backward."""

import numpy as np

from models.costs.cases import Column, tokens
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.products import product_s

PADDED = 128
"""Megatron pads a rank's share of the vocabulary to a multiple of it (make_vocab_size_divisible_by)."""
LOSS_BYTES = 22
"""Per logit: written in 16 bits, read and written in fp32 by softmax and its gradient, read again by two products."""


def head_s(columns: PricedColumns, constants: Constants) -> Column:
    """The output layer, in 16 bits as a rule, and the softmax over the vocabulary, on the last stage."""
    local, rows = PADDED * np.ceil(columns.model.vocab / (PADDED * columns.layout.tp)), tokens(columns)
    product = product_s(columns, constants, rows, local, columns.model.hidden, columns.published.fp8_head == 0)
    loss = LOSS_BYTES * rows * local / columns.machine.memory_bytes_per_s
    return (3 * product + loss) * (1 + columns.model.extra_heads)


def embedding_s(columns: PricedColumns) -> Column:
    """A look-up, its scatter backward, and the copy into the sequence's piece."""
    return 12 * tokens(columns) * columns.model.hidden / columns.machine.memory_bytes_per_s
