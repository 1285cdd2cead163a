"""Bandwidth and time of collectives over the links that a group really has.

A group of ``size`` ranks, ``stride`` ranks apart. Within one scale-up domain it has NVLink (or PCIe); beyond, all its
ranks of a domain drive their own adapters ("rails"), and a ring's traffic between two domains is shared among them.
"""

import numpy as np

from models.costs.cases import Column
from tools.plan.cost.cases import PricedColumns
from tools.plan.cost.constants import Constants

SEND_S, FAR_SEND_S = 3.4e-6, 14.0e-6
"""Of one send of much data over NVLink, and over a network: NCCL 2.29, src/graph/tuning.cc, a hop of a ring in the
protocol Simple, which its sends use. Cluster files have the protocol of small messages."""


def bandwidth(columns: PricedColumns, constants: Constants, size: Column, stride: Column) -> Column:
    """Bytes per second that leave a domain, or a GPU within one, in a ring over the group."""
    machine = columns.machine
    inside = machine.scale_up_bytes_per_s * machine.nvlink_share
    rails = ranks_in_domain(columns, size, stride)
    outside = np.minimum(inside, machine.nic_bytes_per_s * constants.nics * rails)
    return np.where(within_domain(columns, size, stride), inside, outside)


def within_domain(columns: PricedColumns, size: Column, stride: Column) -> Column:
    return np.asarray(size * stride <= columns.machine.domain)


def ranks_in_domain(columns: PricedColumns, size: Column, stride: Column) -> Column:
    """Ranks of the group that share a scale-up domain."""
    return np.clip(np.floor(columns.machine.domain / stride), 1, size)


def latency(columns: PricedColumns, constants: Constants, size: Column, stride: Column) -> Column:
    """Seconds that a collective takes beside its bytes: its start, and trees (log2 n) within and between domains."""
    machine = columns.machine
    near = ranks_in_domain(columns, size, stride)
    far = size / near
    hops = machine.scale_up_latency_s * (1 + np.log2(near)) + machine.nic_latency_s * 2 * np.log2(np.maximum(far, 1))
    return np.where(size > 1, constants.collective_s + hops, 0.0)


def gather_s(
    columns: PricedColumns,
    constants: Constants,
    whole_bytes: Column,
    size: Column,
    stride: Column,
    calls: Column | float = 1.0,
) -> Column:
    """All-gather to, or reduce-scatter from, ``whole_bytes`` on every rank, in so many collectives."""
    moved = whole_bytes * (size - 1) / size
    seconds = moved / bandwidth(columns, constants, size, stride) + calls * latency(columns, constants, size, stride)
    return np.where(size > 1, seconds, 0.0)


def sends_s(columns: PricedColumns, constants: Constants, size: Column, stride: Column) -> Column:
    """Seconds that an all-to-all takes beside its bytes: its start, and a send to each other rank. NCCL has no
    algorithm for it, so that nothing grows with the logarithm."""
    machine = columns.machine
    near = ranks_in_domain(columns, size, stride)
    inside, outside = np.maximum(machine.scale_up_latency_s, SEND_S), np.maximum(machine.nic_latency_s, FAR_SEND_S)
    return np.where(size > 1, constants.collective_s + (near - 1) * inside + (size - near) * outside, 0.0)


def exchange_s(
    columns: PricedColumns, constants: Constants, rank_bytes: Column, size: Column, stride: Column, copies: Column
) -> Column:
    """All-to-all of ``rank_bytes`` from every rank, in which each token goes to ``copies`` experts.

    Where a program sends a token once to each place and not once per copy (DeepSeek-V3, arXiv:2412.19437, section
    3.2.2; DeepEP and HybridEP do so), n (1 - (1 - 1/n)^copies) of n ranks, or domains, get it. What leaves the domain
    goes through the rank's own adapter.
    """
    machine = columns.machine
    near = ranks_in_domain(columns, size, stride)
    domains, copies = np.maximum(1, size / near), np.maximum(1, copies)
    once = columns.published.sends_once > 0
    to_ranks, to_domains = (
        np.where(once, places * (1 - (1 - 1 / places) ** copies) / copies, 1.0) for places in (size, domains)
    )
    # Those that send once have kernels of their own, which write into the others' memory.
    start = np.where(once, latency(columns, constants, size, stride), sends_s(columns, constants, size, stride))
    inner = rank_bytes * to_ranks * (near - 1) / near / (machine.scale_up_bytes_per_s * constants.dispatch)
    outer = rank_bytes * to_domains * (domains - 1) / domains / (machine.nic_bytes_per_s * constants.dispatch)
    return np.where(size > 1, np.maximum(inner, outer) + start, 0.0)
