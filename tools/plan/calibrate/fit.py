"""From curves to the figures of a cluster file: those under which the planner's formulas give what was measured."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from models.costs.candidate import Candidate
from models.costs.sizes import sizes
from models.families import named
from tools.clusters import Cluster
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.hardware import machine
from tools.plan.cost.products import moved_s, shape_share, share_of_peak
from tools.plan.search.pricing import program

if TYPE_CHECKING:  # they import torch
    from tools.plan.calibrate.collectives import Collective, Operation, Over
    from tools.plan.calibrate.measure import Product

BYTES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Of ``product_bytes``, tried one by one: caches leave less than 1, repacking the operands takes more."""


class Speed(NamedTuple):
    """Of matrix products."""

    peak_tflops: float
    product_bytes: float


def speed(products: "Sequence[Product]", cluster: Cluster, constants: Constants, *, bytes_too: bool) -> Speed:
    """Of one number format: the peak that agrees best with all products, and how much their bytes cost.

    cluster: its memory's rate counts; whatever its peak is does not. bytes_too: False keeps the constants' own share.
    """
    columns = _columns(products[0].dtype, cluster, len(products))
    m, n, k = (np.array([getattr(each, name) for each in products], dtype=float) for name in "mnk")
    share = share_of_peak(columns, constants, columns.format) * shape_share(columns, constants, m, n, k)
    work = 2 * m * n * k / share
    took = work * share / np.array([each.tflops for each in products])  # in picoseconds, as a peak in TFLOPS asks
    moved = 1e12 * moved_s(columns, m, n, k)
    best = (np.inf, Speed(1.0, 0.0))
    for part in BYTES if bytes_too else (constants.product_bytes,):
        left = np.maximum(took - part * moved, 0.5 * took)  # beyond that, a product tells of memory
        peak = float(np.median(work / left))
        error = float(np.abs(np.log((work / peak + part * moved) / took)).mean())
        best = min(best, (error, Speed(peak, part)))
    return best[1]


def _columns(dtype: str, cluster: Cluster, count: int) -> PricedColumns:
    own = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, peak_tflops={dtype: 1.0}))
    layout = Candidate(precision=dtype)
    model, software = sizes(named("debug"), 64), program(cluster)
    return PricedColumns(
        [PricedCase(model=model, layout=layout, machine=machine(own, dtype), software=software)] * count
    )


class Link(NamedTuple):
    """What collectives reach, and what the smallest of them takes."""

    gb_per_s: float
    us: float


def link(curves: "Sequence[Collective]", over: "Over") -> Link:
    """All-gather and reduce-scatter, which are what the planner prices most, of the largest size; of the least."""
    both = [each for each in curves if each.over == over and each.operation in ("all_gather", "reduce_scatter")]
    largest, least = (pick(each.bytes for each in both) for pick in (max, min))
    rates = [each.gb_per_s for each in both if each.bytes == largest]
    return Link(statistics.harmonic_mean(rates), statistics.fmean(each.us for each in both if each.bytes == least))


def rate(curves: "Sequence[Collective]", over: "Over", operation: "Operation") -> float:
    """Bus bandwidth of an operation's largest size, GB/s."""
    own = [each for each in curves if each.over == over and each.operation == operation]
    return max(own, key=lambda each: each.bytes).gb_per_s
