"""The clusters of published rows, as cluster files describe them or as their papers do. No torch here."""

import dataclasses
import re
from collections.abc import Mapping

from tools import clusters
from tools.clusters import Cluster

FILES = {
    "A100-40GB": "a100_40_ib", "A100": "a100_ib", "H100": "h100_ib", "H200": "h200_ib", "B200": "b200_ib",
    "GB200": "gb200", "GB300": "gb300", "L4": "l4_ethernet", "T4": "t4_ethernet",
}  # fmt: skip


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """By the card's label; a label's suffix names a fabric of its own. Unknown cards: an H100."""
    label = row.get("gpu", "").strip()
    if label.endswith("-JZ"):
        return _fabric(clusters.load("a100_ib"), "jean_zay", nics_per_node=4, nic_gb_per_s=12.5)
    if label.endswith("-vt"):
        return _fabric(clusters.load("a100_ib"), "vtrain", nics_per_node=4, nic_gb_per_s=25.0)
    if label.startswith("B300"):
        found = clusters.load("gb300")
        node = dataclasses.replace(found.node, gpus_per_node=8)
        fabric = dataclasses.replace(found.fabric, scale_up_domain=8, nics_per_node=8)
        peaks = {name: value * 0.9 for name, value in found.gpu.peak_tflops.items()}
        gpu = dataclasses.replace(found.gpu, name="NVIDIA B300", peak_tflops=peaks)
        return dataclasses.replace(found, name="b300", node=node, fabric=fabric, gpu=gpu)
    found = clusters.load(next((file for word, file in FILES.items() if label.startswith(word)), "h100_ib"))
    if match := re.search(r"(\d+(?:\.\d+)?)\s*TB/s", row.get("notes", "")):
        gpu = dataclasses.replace(found.gpu, memory_gb_per_s=float(match[1]) * 1000)
        if size := re.search(r"(\d+)GB HBM", row.get("notes", "")):
            gpu = dataclasses.replace(gpu, memory_gib=float(size[1]))
        return dataclasses.replace(found, name=f"{found.name}_{match[1]}", gpu=gpu)
    return found


def _fabric(cluster: Cluster, name: str, nics_per_node: int, nic_gb_per_s: float) -> Cluster:
    changed = dataclasses.replace(cluster.fabric, nics_per_node=nics_per_node, nic_gb_per_s=nic_gb_per_s)
    return dataclasses.replace(cluster, name=name, fabric=changed)
