"""The clusters of published rows, as cluster files describe them or as their papers do."""

import dataclasses
import re
from collections.abc import Mapping

from tools import clusters
from tools.clusters import Cluster

FILES = {
    "A100": "a100_ib", "H100": "h100_ib", "H200": "h200_ib", "B200": "b200_ib", "B300": "gb300", "GB200": "gb200",
    "GB300": "gb300", "L4": "l4_ethernet", "T4": "t4_ethernet",
}  # fmt: skip
"""Cluster files by the card's model; B300's node is made of GB300's."""
UNKNOWN = "h100_ib"
"""What unknown cards are priced as, which ``unknown_card`` tells."""
BEYOND = 1.15
"""A label's memory is another card's where it differs by more than this factor: 80 GB are 79 GiB, 192 GB may be 179."""


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """By the card's label; a label's suffix names a fabric of its own, its size of memory a variant of the card."""
    label, card = row.get("gpu", "").strip(), card_of(row)
    if label.endswith("-JZ"):
        return _fabric(clusters.load("a100_ib"), "jean_zay", nics_per_node=4, nic_gb_per_s=12.5)
    if label.endswith("-vt"):
        return _fabric(clusters.load("a100_ib"), "vtrain", nics_per_node=4, nic_gb_per_s=25.0)
    found = _b300() if card == "B300" else _sized(clusters.load(FILES.get(card, UNKNOWN)), _gigabytes(label), card)
    if match := re.search(r"(\d+(?:\.\d+)?)\s*TB/s", row.get("notes", "")):
        gpu = dataclasses.replace(found.gpu, memory_gb_per_s=float(match[1]) * 1000)
        if size := re.search(r"(\d+)GB HBM", row.get("notes", "")):
            gpu = dataclasses.replace(gpu, memory_gib=float(size[1]))
        return dataclasses.replace(found, name=f"{found.name}_{match[1]}", gpu=gpu)
    return found


def card_of(row: Mapping[str, str]) -> str:
    """The card's model: ``"NVIDIA A100-SXM4-80GB"``, ``"8xa100"`` -> ``"A100"``; empty where none is known."""
    for word in re.split(r"[^A-Z0-9]+", row.get("gpu", "").upper()):
        model = re.sub(r"^\d+X(?=[A-Z])|(?:SXM\d*|PCIE|NVL\d*|X\d+)$", "", word)
        if model in FILES:
            return model
    return ""


def unknown_card(row: Mapping[str, str]) -> str:
    """The label of a row whose card is not known; empty where it is."""
    return "" if card_of(row) else row.get("gpu", "").strip() or "no card given"


def _gigabytes(label: str) -> float | None:
    found = re.search(r"(?<![\d.])(\d+)\s*GI?B?(?![A-Z0-9])", label.upper())
    return float(found[1]) if found else None


def _sized(cluster: Cluster, gigabytes: float | None, card: str) -> Cluster:
    """With as much memory as the label says, where the card comes in several sizes."""
    if gigabytes is None or not card or 1 / BEYOND < gigabytes / cluster.gpu.memory_gib < BEYOND:
        return cluster
    if card == "A100" and gigabytes == 40:
        return clusters.load("a100_40_ib")
    gpu = dataclasses.replace(cluster.gpu, memory_gib=gigabytes)
    return dataclasses.replace(cluster, name=f"{cluster.name}_{gigabytes:g}gb", gpu=gpu)


def _b300() -> Cluster:
    found = clusters.load("gb300")
    node = dataclasses.replace(found.node, gpus_per_node=8)
    fabric = dataclasses.replace(found.fabric, scale_up_domain=8, nics_per_node=8)
    peaks = {name: value * 0.9 for name, value in found.gpu.peak_tflops.items()}
    gpu = dataclasses.replace(found.gpu, name="NVIDIA B300", peak_tflops=peaks)
    return dataclasses.replace(found, name="b300", node=node, fabric=fabric, gpu=gpu)


def _fabric(cluster: Cluster, name: str, nics_per_node: int, nic_gb_per_s: float) -> Cluster:
    changed = dataclasses.replace(cluster.fabric, nics_per_node=nics_per_node, nic_gb_per_s=nic_gb_per_s)
    return dataclasses.replace(cluster, name=name, fabric=changed)
