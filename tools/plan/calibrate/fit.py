"""From curves to the figures of a cluster file: those under which the planner's formulas give what was measured."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from models.families import named
from models.sizes import sizes
from tools.clusters import Cluster
from tools.plan.calibrate.collectives import Collective, Operation, Over
from tools.plan.calibrate.measure import Product
from tools.plan.cases import Case, Columns
from tools.plan.cost.constants import Constants
from tools.plan.cost.products import shape_share, share_of_peak
from tools.plan.machine import machine
from tools.plan.pricing import program
from training.memory.layouts import Candidate

RAMPS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Speed(NamedTuple):
    """Of matrix products."""

    peak_tflops: float
    k_ramp: float
    m_ramp: float


def speed(products: Sequence[Product], cluster: Cluster, constants: Constants, *, ramps: bool) -> Speed:
    """Of one number format: the peak that agrees best with all products, and how much short dims cost.

    cluster: whatever its peak is, it does not matter. ramps: False keeps the constants' own.
    """
    choices = list(itertools.product(RAMPS, RAMPS)) if ramps else [(constants.k_ramp, constants.m_ramp)]
    columns = _columns(products[0].dtype, cluster, len(products))
    m, n, k = (np.array([getattr(each, name) for each in products], dtype=float) for name in "mnk")
    best = (np.inf, Speed(1.0, 0.0, 0.0))
    for k_ramp, m_ramp in choices:
        own = dataclasses.replace(constants, k_ramp=k_ramp, m_ramp=m_ramp)
        share = share_of_peak(columns, own, columns.format) * shape_share(columns, own, m, n, k)
        peaks = np.array([each.tflops for each in products]) / share
        peak = float(np.median(peaks))
        best = min(best, (float(np.abs(np.log(peaks / peak)).mean()), Speed(peak, k_ramp, m_ramp)))
    return best[1]


def _columns(dtype: str, cluster: Cluster, count: int) -> Columns:
    own = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, peak_tflops={dtype: 1.0}))
    layout = Candidate(precision=dtype)
    model, software = sizes(named("debug"), 64), program(cluster)
    return Columns([Case(model=model, layout=layout, machine=machine(own, dtype), software=software)] * count)


class Link(NamedTuple):
    """What collectives reach, and what the smallest of them takes."""

    gb_per_s: float
    us: float


def link(curves: Sequence[Collective], over: Over) -> Link:
    """All-gather and reduce-scatter, which are what the planner prices most, of the largest size; of the least."""
    both = [each for each in curves if each.over == over and each.operation in ("all_gather", "reduce_scatter")]
    largest, least = (pick(each.bytes for each in both) for pick in (max, min))
    rates = [each.gb_per_s for each in both if each.bytes == largest]
    return Link(statistics.harmonic_mean(rates), statistics.fmean(each.us for each in both if each.bytes == least))


def rate(curves: Sequence[Collective], over: Over, operation: Operation) -> float:
    """Bus bandwidth of an operation's largest size, GB/s."""
    own = [each for each in curves if each.over == over and each.operation == operation]
    return max(own, key=lambda each: each.bytes).gb_per_s
