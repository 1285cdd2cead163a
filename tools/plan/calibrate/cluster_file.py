"""What was measured, as a cluster file and as a table for people."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from program.printing import columns
from tools.clusters import Cluster, Fabric, Gpu, NodeHardware, Price
from tools.plan.calibrate import fit
from tools.plan.cost.constants import Constants
from tools.plan.cost.hardware import NVLINK_SHARE, generation
from tools.plan.cost.products import SUSTAINED_MEMORY

if TYPE_CHECKING:  # they import torch
    from tools.plan.calibrate.collectives import Collective, Over
    from tools.plan.calibrate.measure import Product

HEAD = """\
# Written by python -m tools.plan calibrate; [measured] says when, by which versions, and holds the curves.
# What the planner computes with is [gpu], [node], [fabric] and measured.constants: datasheet figures under which its
# own formulas give what was measured, so they are above it. The curves themselves are for people.
"""
ONE_RANK = """\
# One rank: no link was measured, and [fabric] is made up. Run it under srun or torchrun (slurm/calibrate.sbatch).
"""
ONE_NODE = """\
# One node: nothing between nodes was measured. Write your adapters' figures into [fabric], or run it on two nodes.
"""
SEVERAL = """\
# scale_up_domain is a node's ranks: where NVLink reaches further (GB200, GB300), write how far.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Host:
    """Where it was measured."""

    name: str
    """Of the card, or "CPU" and the architecture."""
    memory_bytes: int
    """Of the card; of a CPU, a rank's share of the host's."""
    host_gib: float
    cpus: int
    ranks: int
    nodes: int
    fabric: Literal["infiniband", "efa", "ethernet"]
    versions: Mapping[str, str]


@dataclass(kw_only=True, slots=True, frozen=True)
class Curves:
    """What one run of ``calibrate`` measured."""

    products: "Sequence[Product]"
    copy_gb_per_s: float
    collectives: "Sequence[Collective]"
    """Empty on one rank."""
    launches_us: Mapping[str, float] = field(default_factory=dict)
    """Fields of [node] that were measured: what launching takes the host. Empty on CPUs, which launch nothing."""

    @property
    def between_nodes(self) -> bool:
        return any(each.over == "nodes" for each in self.collectives)


def fitted_cluster(host: Host, curves: Curves, constants: Constants, *, on_cpu: bool) -> tuple[Cluster, Constants]:
    """The cluster, and ``constants`` with what was measured in place of some. On GPUs all stay as they were fitted:
    published runs tell more of sustained work than a minute of products.
    """
    bare = _bare(host, curves)
    formats = list(dict.fromkeys(each.dtype for each in curves.products))
    peaks = {}
    for name in formats:
        own = [each for each in curves.products if each.dtype == name]
        found = fit.speed(own, bare, constants, bytes_too=on_cpu)
        peaks[name] = found.peak_tflops
        if on_cpu:
            constants = dataclasses.replace(constants, product_bytes=found.product_bytes)
    fabric, constants = _fabric(host, curves, bare.fabric, constants, on_cpu=on_cpu)
    return dataclasses.replace(
        bare, gpu=dataclasses.replace(bare.gpu, peak_tflops=_rounded(peaks)), fabric=fabric
    ), constants  # fmt: skip


def _bare(host: Host, curves: Curves) -> Cluster:
    """All but the peaks and the links."""
    per_node = max(1, host.ranks // host.nodes)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Cluster(
        name="measured",
        gpu=Gpu(
            name=host.name,
            memory_gib=round(host.memory_bytes / 2**30, 1),
            memory_gb_per_s=round(curves.copy_gb_per_s / SUSTAINED_MEMORY, 1),
            peak_tflops={},
        ),
        node=NodeHardware(
            gpus_per_node=per_node, cpus_per_node=host.cpus, memory_gib=host.host_gib, **_rounded(curves.launches_us)
        ),
        fabric=Fabric(
            scale_up_gb_per_s=1.0, scale_up_domain=per_node, scale_up_latency_us=1.0, kind=host.fabric,
            nics_per_node=1, nic_gb_per_s=1.0, latency_us=1.0,
        ),
        price=Price(usd_per_gpu_hour=1.0, source="not known: write yours", date=today),
    )  # fmt: skip


def _fabric(
    host: Host, curves: Curves, bare: Fabric, constants: Constants, *, on_cpu: bool
) -> tuple[Fabric, Constants]:
    """Inverts cost/links.py: a share of the bandwidth, and hops that grow with the logarithm of the ranks."""
    if not curves.collectives:
        return bare, constants
    per_node = host.ranks // host.nodes
    within: Over = "node" if per_node > 1 else "nodes"
    near, share = fit.link(curves.collectives, within), NVLINK_SHARE[generation(host.name)]
    hop = near.us / (1 + (per_node - 1).bit_length())
    fabric = dataclasses.replace(
        bare,
        scale_up_gb_per_s=_rounded_one(near.gb_per_s / share),
        scale_up_latency_us=_rounded_one(hop),
        nic_gb_per_s=_rounded_one(near.gb_per_s / constants.nics),
        latency_us=_rounded_one(hop),
    )
    if curves.between_nodes:
        far, alone = (fit.link(curves.collectives, over) for over in ("nodes", "one link"))
        adapters = min(per_node, max(1, round(per_node * far.gb_per_s / alone.gb_per_s)))
        fabric = dataclasses.replace(
            fabric,
            nics_per_node=adapters,
            nic_gb_per_s=_rounded_one(per_node * far.gb_per_s / constants.nics / adapters),
            latency_us=_rounded_one(max(0.1, (far.us - hop) / (2 * max(1, (host.nodes - 1).bit_length())))),
        )
    if on_cpu:
        sends = fit.rate(curves.collectives, within, "send and receive")
        tokens = fit.rate(curves.collectives, within, "all_to_all")
        constants = dataclasses.replace(constants, p2p=near.gb_per_s / sends, dispatch=tokens * share / near.gb_per_s)
    return fabric, dataclasses.replace(constants, collective_s=0.0)  # in the hops: a measured time has both


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _rounded_one(value) for name, value in values.items()}


def _rounded_one(value: float) -> float:
    return float(f"{value:.4g}")


def text(cluster: Cluster, host: Host, curves: Curves, constants: Constants, before: Constants) -> str:
    """The file. Constants: those that differ from ``before``."""
    note = ONE_RANK if host.ranks == 1 else SEVERAL if curves.between_nodes else ONE_NODE
    tables: dict[str, Any] = {
        name: dataclasses.asdict(getattr(cluster, name)) for name in ("gpu", "node", "fabric", "price")
    }
    own = {
        each.name: _rounded_one(getattr(constants, each.name))
        for each in dataclasses.fields(constants)
        if getattr(constants, each.name) != getattr(before, each.name)
    }
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    tables["measured"] = {
        "date": date, "ranks": host.ranks, "nodes": host.nodes, **host.versions,
        "products": [_cells(each) for each in curves.products],
        **({"collectives": [_cells(each) for each in curves.collectives]} if curves.collectives else {}),
        **({"constants": own} if own else {}),
    }  # fmt: skip
    return HEAD + note + tomli_w.dumps(tables)


def _cells(measured: "Product | Collective") -> dict[str, Any]:
    values = dataclasses.asdict(measured).items()
    return {name: _rounded_one(value) if isinstance(value, float) else value for name, value in values}


def table(curves: Curves) -> list[str]:
    """The curves for people."""
    lines = ["matrix products, TFLOPS:"]
    rows = [("format", "m", "n", "k", "TFLOPS")]
    rows += [(each.dtype, f"{each.m}", f"{each.n}", f"{each.k}", f"{each.tflops:.4g}") for each in curves.products]
    lines += [*columns(rows, left=(0,)), f"copy: {curves.copy_gb_per_s:.4g} GB/s read and written"]
    if curves.collectives:
        lines.append("collectives, bus bandwidth of the slowest rank:")
        ran: list[tuple[str, ...]] = [("over", "operation", "ranks", "bytes", "us", "GB/s")]
        for each in curves.collectives:
            cells = (f"{each.ranks}", f"{each.bytes:,}", f"{each.us:,.0f}", f"{each.gb_per_s:.3g}")
            ran.append((each.over, each.operation, *cells))
        lines += columns(ran, left=(0, 1))
    return lines
