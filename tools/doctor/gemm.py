"""Slow and wrong cards: the same matrix product on every device. tools/doctor/worker.py computes."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, deciding, judged, shares_of_median

GROUP = "gemm"
SLOW, BROKEN, CPU_SLOW = 0.9, 0.75, 0.5
"""Shares of the median card; GPUs of one kind differ by a few per cent, CPUs by who else computes there."""
OF_PEAK, FAR_BELOW = 0.6, 0.4
"""Shares of the datasheet's dense bf16 peak that large products reach at least. Not run on a GPU yet."""


def evaluate(measured: Sequence[Mapping[str, Any]], situation: DoctorContext) -> NodeCheck:
    """Facts: "devices", a list of what the workers measured."""
    findings = [_one(place, device, situation) for place, device in enumerate(measured)]
    good = [one for one in measured if "error" not in one]
    peak = situation.cluster.gpu.peak_tflops.get("bf16") if situation.cluster and situation.device == "cuda" else None
    for place, one in enumerate(good):
        share = one["tflops"] / peak if peak else 1.0
        if share < OF_PEAK:
            status: Status = "wrong" if share < FAR_BELOW else "warning"
            found = f"{_label(place, situation.device)}: {one['tflops']:.0f} TFLOP/s"
            expected = f"{OF_PEAK:.0%} or more of {peak:.0f} TFLOP/s ({situation.cluster.name})"  # type: ignore[union-attr]
            findings.append(judged(GROUP, "speed", status, found, expected, "check clocks and cooling"))
    return NodeCheck(findings=[one for one in findings if one], facts={"devices": list(measured)})


def _one(place: int, device: Mapping[str, Any], situation: DoctorContext) -> Finding | None:
    label = _label(place, situation.device)
    if "error" in device:
        fix = "see the message; --skip gemm collectives to go on without"
        return judged(GROUP, "runs", "wrong", f"{label}: {device['error']}", "a matrix product", fix)
    if not device["exact"]:
        found = f"{label} ({device['device']}) gives wrong sums of integers"
        return judged(GROUP, "result", "wrong", found, "the exact product", "take this card out of service")
    found = f"exact; {{:.{1 if device['tflops'] >= 10 else 3}f}} TFLOP/s on {device['device'].replace('{', '(')}"
    return judged(GROUP, "result", "ok", found, numbers=[device["tflops"]])


def _label(place: int, device: str) -> str:
    return f"GPU {place}" if device == "cuda" else f"CPU process {place}"


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: other bits than most equal cards give; a card much slower than the median of equal ones."""
    kinds: dict[tuple[str, str], dict[tuple[str, int], Mapping[str, Any]]] = {}
    for one in seen:
        for place, device in enumerate(one.facts.get(GROUP, {}).get("devices", [])):
            if "error" not in device:
                kinds.setdefault((device["device"], device["torch"]), {})[one.node, place] = device
    found: list[tuple[str, Finding]] = []
    for devices in kinds.values():
        found += [*_bits(devices), *_speeds(devices)]
    return found


def _bits(devices: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    right = deciding([device["digest"] for device in devices.values()])
    fix = "take this card out of service: it computes other numbers"
    return [
        (node, judged(GROUP, "same bits", "wrong", f"{_name(place, one)}: other bits", "as equal cards give", fix))
        for (node, place), one in devices.items()
        if one["digest"] != right
    ]


def _speeds(devices: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    rates = {f"{node} {place}": device["tflops"] for (node, place), device in devices.items()}
    found = []
    for (node, place), share in zip(devices, shares_of_median(rates).values(), strict=False):
        one = devices[node, place]
        least = SLOW if one["nccl"] else CPU_SLOW
        if share >= least:
            continue
        status: Status = "wrong" if share < BROKEN and one["nccl"] else "warning"
        text = f"{_name(place, one)}: {one['tflops']:.3g} TFLOP/s, {share:.0%} of the median"
        fix = "check clocks, cooling and other processes of this node"
        found.append((node, judged(GROUP, "speed", status, text, f"{least:.0%} of the median or more", fix)))
    return found


def _name(place: int, device: Mapping[str, Any]) -> str:
    return _label(place, "cuda" if device["nccl"] else "cpu")
