"""Seconds that activations on their way to the host's memory and back add to a block (models/layers/offload.py)."""

import numpy as np

from models.costs.cases import Column
from models.costs.mixers import kind_bytes
from models.costs.offloaded_modules import offloaded_bytes
from models.costs.peak import offloaded_share
from models.costs.sizes import ATTENTION_AND_MLP
from tools.plan.cost.cases import PricedColumns


def offload_s(columns: PricedColumns, kind: str, forward: Column, backward: Column) -> Column:
    """Exposed seconds of the mean block of these sublayers, of one microbatch.

    All that a block keeps travels once each way, as fast as datasheets have the GPU's link to the host, or its share of
    the host's memory, if that is slower. Assumed: the next block computes as long as this one, and its forward pass
    hides the copy out, its backward pass the copy back; what travels longer counts. The copy back for the last block
    of a chunk has none before it that would hide it. Not counted: that the program fetches one sublayer ahead, not one
    block, which hides less where attention and MLP differ; and launches of copies. Depths of multi-token prediction,
    whose activations stay, are priced as blocks are. No run was measured.
    """
    share, machine = offloaded_share(columns), columns.machine
    rate = np.minimum(machine.host_link_bytes_per_s, machine.host_memory_bytes_per_s)
    found = _of_modules_s(columns, kind, rate, forward, backward)
    if not np.any(share > 0):
        return found
    travel = kind_bytes(columns, kind).kept / rate
    out, back = (np.maximum(0.0, travel - computes) for computes in (forward, backward))
    in_a_chunk = columns.model.layers / (columns.layout.pp * columns.layout.vpp)
    return found + np.where(share > 0, share * (out + back) + (travel - back) / in_a_chunk, 0.0)


def _of_modules_s(columns: PricedColumns, kind: str, rate: Column, forward: Column, backward: Column) -> Column:
    """The same of train.offload_modules: of every block, the last of a chunk, whose bytes stay, among them."""
    if kind not in ATTENTION_AND_MLP or not np.any(columns.software.offloaded_modules > 0):
        return np.zeros(columns.count)
    travel = offloaded_bytes(columns, experts="E" in kind).sent / rate
    return np.maximum(0.0, travel - forward) + np.maximum(0.0, travel - backward)
