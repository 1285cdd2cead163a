"""A cluster, for one number format, as the numbers that time is computed from."""

from dataclasses import dataclass
from typing import Literal

from models.costs.flops import peak_flops
from tools.clusters import Cluster

Generation = Literal["volta", "ampere", "hopper", "blackwell"]

MULTIPROCESSORS = {
    # NVIDIA's architecture white papers: streaming multiprocessors enabled on the product.
    "GB300": 148, "B300": 148, "GB200": 148, "B200": 148, "GH200": 132, "H200": 132, "H100": 132, "A100": 108,
    "L4": 58, "T4": 40,
}  # fmt: skip
WATTS_PER_TFLOPS = {
    # Board power over dense 16-bit peak, both by NVIDIA's datasheets.
    "GB300": 1400 / 2500, "B300": 1100 / 2250, "GB200": 1200 / 2500, "B200": 1000 / 2250, "GH200": 700 / 989.5,
    "H200": 700 / 989.5, "H100": 700 / 989.5, "A100": 400 / 312, "L4": 72 / 121, "T4": 70 / 65,
}  # fmt: skip
FAST_EXPONENTIALS = ("GB300", "B300")
"""NVIDIA's technical blog, "Inside NVIDIA Blackwell Ultra": twice the throughput of attention's exponentials."""
GENERATIONS: dict[str, Generation] = {
    "GB300": "blackwell", "B300": "blackwell", "GB200": "blackwell", "B200": "blackwell", "GH200": "hopper",
    "H200": "hopper", "H100": "hopper", "A100": "ampere", "L4": "ampere", "T4": "volta",
}  # fmt: skip

NVLINK_SHARE: dict[Generation, float] = {
    "volta": 20 / 25,
    "ampere": 20 / 25,
    "hopper": 20.6 / 25,
    "blackwell": 40.1 / 50,
}
"""Of a link's GB/s in one direction, what NCCL 2.30 reckons its rings reach (src/graph/topo.h, SM70_NVLINK_BW to
SM100_NVLINK_BW; PCIe's 12 of 16 are near it). All-reduces of 1 GB within 2, 4 and 8 A100 reached 0.66, 0.74 and 0.76
(vTrain's tables, trace/a100)."""
LAUNCHED: dict[Generation, float] = {"volta": 2017.5, "ampere": 2020.4, "hopper": 2022.8, "blackwell": 2025.0}
"""When the first card of a generation came out: V100 in mid-2017, A100 in May 2020, H100 in October 2022, GB200 about
New Year 2025."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Hardware:
    """One number format on one kind of node. Bandwidths in one direction."""

    generation: Generation
    peak_flops: float
    """Dense, of the format that matrices are multiplied in."""
    attention_flops: float
    """Dense, of the 16-bit format that attention computes in whatever the precision."""
    fast_exponentials: bool
    """Twice as many exponentials per FLOP as the rest of its generation."""
    sustained: float
    """Clock that power leaves, against the other cards of the generation."""
    multiprocessors: int
    memory_bytes: float
    memory_bytes_per_s: float
    scale_up_bytes_per_s: float
    nvlink_share: float
    """Of these bytes, what collectives reach."""
    scale_up_latency_s: float
    domain: int
    """GPUs that reach each other over scale-up links."""
    nic_bytes_per_s: float
    """A GPU's share of its node's adapters."""
    nic_latency_s: float
    gpus_per_node: int
    host_bytes: float
    """A GPU's share of its node's memory."""
    host_link_bytes_per_s: float
    """Of one GPU, to the host's memory."""
    host_memory_bytes_per_s: float
    """A GPU's share of the host's memory bandwidth."""
    launch_s: float
    """Of the host, to launch a kernel; none where it computes itself."""
    collective_launch_s: float


def peak_tflops(cluster: Cluster, precision: str) -> float | None:
    """Dense TFLOPS of matrix products; None where the card has no such units.

    mxfp8 and the like run on fp8 units; nvfp4 is the published multiple of fp8; tf32 serves fp32.
    """
    peaks = cluster.gpu.peak_tflops
    if precision == "nvfp4":
        fp4, fp8 = (peak_flops(cluster.gpu.name, name) for name in ("fp4", "fp8"))
        return peaks["fp8"] * fp4 / fp8 if fp4 and fp8 and "fp8" in peaks else None
    key = "fp8" if "fp8" in precision else precision
    if key == "fp32":
        return peaks.get("tf32", peaks.get("fp32"))
    return peaks.get(key)


def machine(cluster: Cluster, precision: str) -> Hardware:
    """Raises KeyError where the card cannot compute in this precision; see ``precisions``."""
    peak = peak_tflops(cluster, precision)
    if peak is None:
        raise KeyError(f"{cluster.gpu.name} has no {precision} units")
    attention = peak if precision in ("bf16", "fp16", "fp32") else peak_tflops(cluster, "bf16") or peak
    fabric, node, word = cluster.fabric, cluster.node, _model(cluster.gpu.name)
    return Hardware(
        generation=generation(cluster.gpu.name),
        peak_flops=peak * 1e12,
        attention_flops=attention * 1e12,
        fast_exponentials=word in FAST_EXPONENTIALS,
        sustained=sustained(word),
        multiprocessors=1 if on_cpu(cluster) else MULTIPROCESSORS.get(word, 132),
        memory_bytes=cluster.gpu.memory_gib * 2**30,
        memory_bytes_per_s=cluster.gpu.memory_gb_per_s * 1e9,
        scale_up_bytes_per_s=fabric.scale_up_gb_per_s * 1e9,
        nvlink_share=NVLINK_SHARE[generation(cluster.gpu.name)],
        scale_up_latency_s=fabric.scale_up_latency_us * 1e-6,
        domain=fabric.scale_up_domain,
        nic_bytes_per_s=fabric.nics_per_node * fabric.nic_gb_per_s * 1e9 / node.gpus_per_node,
        nic_latency_s=fabric.latency_us * 1e-6,
        gpus_per_node=node.gpus_per_node,
        host_bytes=host_share(cluster),
        host_link_bytes_per_s=node.host_link_gb_per_s * 1e9,
        host_memory_bytes_per_s=node.host_memory_gb_per_s * 1e9 / node.gpus_per_node,
        launch_s=0.0 if on_cpu(cluster) else node.launch_us * 1e-6,
        collective_launch_s=0.0 if on_cpu(cluster) else node.collective_launch_us * 1e-6,
    )


def host_share(cluster: Cluster) -> float:
    """Bytes of a node's memory, for each of its GPUs."""
    return cluster.node.memory_gib * 2**30 / cluster.node.gpus_per_node


def sustained(model: str) -> float:
    """Dense products run at the clock that the power limit allows.

    Power grows with the cube of a clock that brings its voltage along, and in proportion where the voltage stays:
    about the square between the two, which published runs of GB200, GB300 and B300 have decided.
    """
    if model not in WATTS_PER_TFLOPS:
        return 1.0
    reference = {"blackwell": "GB200", "hopper": "H100", "ampere": "A100", "volta": "T4"}[GENERATIONS[model]]
    return float((WATTS_PER_TFLOPS[model] / WATTS_PER_TFLOPS[reference]) ** 0.5)


def card_age(gpu_name: str, year: float) -> float:
    """Of a card's generation to software of that year (``Software.card_age``)."""
    return max(0.0, year - LAUNCHED[generation(gpu_name)])


def on_cpu(cluster: Cluster) -> bool:
    """Whether its ranks compute on CPUs: a file that ``calibrate`` wrote on a machine without GPUs."""
    return cluster.gpu.name.split(" ")[0] == "CPU"


def computable(cluster: Cluster) -> list[str]:
    """Formats that today's program computes in and the card has units for; fp8 and nvfp4 are beside bf16."""
    found = [name for name in ("bf16", "fp16", "fp32") if peak_tflops(cluster, name)]
    return found + [name for name in ("fp8", "nvfp4") if "bf16" in found and peak_tflops(cluster, name)]


def precisions(cluster: Cluster) -> list[str]:
    """Those of them that are offered to who asks for none: bf16 before fp16, fp32 without either, the fastest last."""
    found = [name for name in ("bf16", "fp16") if peak_tflops(cluster, name)][:1] or ["fp32"]
    return found + (["fp8"] if found == ["bf16"] and peak_tflops(cluster, "fp8") else [])


def generation(gpu_name: str) -> Generation:
    """Of a card by its name; unknown ones count as Hopper."""
    return GENERATIONS.get(_model(gpu_name), "hopper")


def _model(gpu_name: str) -> str:
    """``"NVIDIA A100-SXM4-80GB"`` -> ``"A100"``; empty where the card is not in the tables."""
    words = gpu_name.upper().replace("-", " ").split()
    return next((word for word in words if word in MULTIPROCESSORS), "")
