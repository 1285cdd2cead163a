"""Seconds of matrix products: multiplications and memory, with the shapes that cards are slow at."""

import numpy as np
from numpy.typing import NDArray

from models.costs.cases import FORMATS, Column, element_bytes
from tools.plan.cost.cases import GENERATIONS, PricedColumns
from tools.plan.cost.constants import Constants

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8))
"""Output tiles that cuBLAS chooses among, with the share of peak that each keeps (its smaller reuse of operands)."""

SUSTAINED_MEMORY = 0.8
"""Share of a datasheet's memory bandwidth that kernels reach which do nothing else."""


def tuned(columns: PricedColumns, constants: Constants) -> Column:
    """What kernels that are still new to a card reach of what they reach later."""
    return np.asarray(constants.first_kernels ** (0.5 ** (columns.software.card_age / constants.tuning_years)))


def share_of_peak(columns: PricedColumns, constants: Constants, formats: NDArray[np.intp]) -> Column:
    """What a large, aligned product reaches of the peak of its number format, one of ``FORMATS`` each."""
    ampere, hopper, blackwell = (constants.gemm_ampere, constants.gemm_hopper, constants.gemm_blackwell)
    by_format = {
        "volta": (0.9 * ampere, 0.9 * ampere, 0.9 * ampere, 0.9 * ampere, 0.9),
        "ampere": (ampere, ampere, ampere, ampere, ampere),
        "hopper": (hopper, constants.gemm_hopper_fp8, 0.9 * constants.gemm_hopper_fp8, hopper, hopper),
        "blackwell": (
            blackwell,
            constants.gemm_blackwell_fp8,
            constants.gemm_blackwell_mxfp8,
            constants.gemm_blackwell_fp4,
            blackwell,
        ),
    }
    table = np.array([by_format[generation] for generation in GENERATIONS])
    clock = columns.published.power_share * columns.machine.sustained
    return np.asarray(table[columns.generation, formats] * tuned(columns, constants) * clock)


def product_s(
    columns: PricedColumns,
    constants: Constants,
    m: Column,
    n: Column,
    k: Column,
    wide: NDArray[np.bool_] | None = None,
    matrices: Column | float = 1.0,
) -> Column:
    """[m, k] x [k, n]: multiplications, the exposed part of the memory traffic, and a launch. Nothing where a dim
    is 0.

    wide: the cases that multiply in 16 bits here, whatever their number format is. matrices: [k, n] ones, among which
    the rows are dealt within one kernel.
    """
    wide = np.zeros(columns.count, dtype=np.bool_) if wide is None else wide & (columns.format != FORMATS.index("fp32"))
    formats = np.where(wide, FORMATS.index("16bit"), columns.format)
    peak = np.where(wide, columns.machine.attention_flops, columns.machine.peak_flops)
    there = (n > 0) & (k > 0)
    m, n, k = np.maximum(m, 1), np.maximum(n, 1), np.maximum(k, 1)
    share = share_of_peak(columns, constants, formats) * shape_share(columns, constants, m, n, k)
    moved = moved_s(columns, m, n, k, matrices)
    seconds = np.maximum(2 * m * n * k / (peak * share) + constants.product_bytes * moved, moved / SUSTAINED_MEMORY)
    return np.where(there, seconds + gap_s(columns, constants), 0.0)


def moved_s(columns: PricedColumns, m: Column, n: Column, k: Column, matrices: Column | float = 1.0) -> Column:
    """Both operands and the result at the memory's rate.

    In 16 bits, fp8's and fp4's, too: what is written is, in all three products of a pass forward and back.
    """
    return element_bytes(columns) * (m * k + matrices * k * n + m * n) / columns.machine.memory_bytes_per_s


def gap_s(columns: PricedColumns, constants: Constants) -> Column:
    """Between two kernels: queued one behind the other, or each waited for."""
    return np.where(columns.published.waits_for_kernels > 0, constants.blocked_s, constants.launch_s)


def shape_share(columns: PricedColumns, constants: Constants, m: Column, n: Column, k: Column) -> Column:
    """What a product's shape leaves of the peak: whole tiles, whole waves of multiprocessors, aligned rows."""
    waves = np.maximum.reduce([_tiling(columns, m, n, *tile) for tile in TILES])
    ragged = (np.mod(n, 64) > 0) | (np.mod(k, 64) > 0)
    return waves * np.where(ragged, constants.misaligned, 1.0)


def _tiling(columns: PricedColumns, m: Column, n: Column, rows: int, width: int, share: float) -> Column:
    """The useful part of the last tiles and of the last wave; stream-K schedules win half of the latter back."""
    tiles = np.ceil(m / rows) * np.ceil(n / width)
    padded = (m / (np.ceil(m / rows) * rows)) * (n / (np.ceil(n / width) * width))
    waves = tiles / columns.machine.multiprocessors
    full = waves / np.ceil(waves)
    return share * padded * np.where(waves < 1, full, (1 + full) / 2)
