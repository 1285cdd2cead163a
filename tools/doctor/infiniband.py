"""InfiniBand and RoCE ports, as the kernel shows them (Documentation/ABI/stable/sysfs-class-infiniband).

Not run on such hardware yet.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from program.untrusted import if_readable, read_text
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, deciding, judged

GROUP = "infiniband"
ROOT = Path("/sys/class/infiniband")
COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Errors of cable and port, counted since they were cleared (IBA specification, PortCounters)."""


def check_node(situation: DoctorContext, root: Path = ROOT) -> NodeCheck:
    """Facts: "ports" -> {"mlx5_0:1": {state, phys_state, rate_gbit_per_s, layer, errors}}."""
    if not root.is_dir() or not any(root.iterdir()):
        return NodeCheck(findings=[*_hca(situation.environ, {}), _none(situation)])
    ports = dict(_ports(root))
    active = {name: port for name, port in ports.items() if port["state"] == "ACTIVE"}
    rates = sorted({f"{port['rate_gbit_per_s']:.0f}" for port in active.values()}, key=float)
    reported = f"{len(active)} of {len(ports)} ports active at {' and '.join(rates) or '0'} Gbit/s"
    status: Status = "ok" if active else "warning"
    findings = [
        _finding("ports", status, reported, "" if active else "an active port", "see ibstat" if not active else "")
    ]
    findings += [*_counters(active), *_hca(situation.environ, ports), *_against_cluster(active, situation)]
    return NodeCheck(findings=findings, facts={"ports": ports})


def _ports(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in sorted(root.glob("*/ports/*")):
        device, number = folder.parts[-3], folder.name
        rate = re.match(r"[\d.]+", _read(folder / "rate"))
        yield (
            f"{device}:{number}",
            {
                "state": _read(folder / "state").partition(": ")[2],
                "phys_state": _read(folder / "phys_state").partition(": ")[2],
                "rate_gbit_per_s": float(rate[0]) if rate else 0.0,
                "layer": _read(folder / "link_layer"),
                "errors": {name: _count(folder / "counters" / name) for name in COUNTERS},
            },
        )


def _read(path: Path) -> str:
    return (if_readable(read_text, path) or "").strip()


def _count(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdigit() else 0


def _counters(active: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name, port in active.items():
        errors = ", ".join(f"{counter} {count}" for counter, count in port["errors"].items() if count)
        if errors:
            fix = "clear the counters (perfquery -R) and look again; then clean or replace the cable"
            yield _finding("error counters", "warning", f"{name}: {errors}", "0", fix)


def _hca(environ: Mapping[str, str], ports: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """NCCL_IB_HCA names prefixes of devices, "=" exact ones, "^" those to leave out (NCCL's manual)."""
    text = environ.get("NCCL_IB_HCA", "")
    if not text or text.startswith("^"):
        return
    exact = text.startswith("=")
    names = [name.partition(":")[0] for name in text.lstrip("=").split(",") if name]
    devices = {name.partition(":")[0] for name in ports}
    for name in names:
        if not any(device == name if exact else device.startswith(name) for device in devices):
            here = f"one of {', '.join(sorted(devices)) or 'no device at all'}"
            fix = "correct NCCL_IB_HCA (the cluster's [env])"
            yield judged(GROUP, "NCCL_IB_HCA", "wrong", f"names {name}, which is not here", here, fix, setting=True)


def _against_cluster(active: Mapping[str, Mapping[str, Any]], situation: DoctorContext) -> Iterator[Finding]:
    cluster = situation.cluster
    if cluster is None or cluster.fabric.kind != "infiniband":
        return
    if len(active) < cluster.fabric.nics_per_node:
        wanted = f"{cluster.fabric.nics_per_node} ({cluster.name})"
        yield _finding("active ports", "wrong", f"{len(active)}", wanted, "repair the ports that are down; see ibstat")
    for name, port in active.items():
        if port["layer"] != "Ethernet" and port["rate_gbit_per_s"] < 0.9 * 8 * cluster.fabric.nic_gb_per_s:
            wanted = f"{8 * cluster.fabric.nic_gb_per_s:.0f} Gbit/s ({cluster.name})"
            yield _finding("rate", "warning", f"{name}: {port['rate_gbit_per_s']:.0f} Gbit/s", wanted, "see ibstat")


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: a port that is down or slower here, and not so on most nodes."""
    known = {one.node: one.facts[GROUP]["ports"] for one in seen if "ports" in one.facts.get(GROUP, {})}
    found: list[tuple[str, Finding]] = []
    for name in sorted({name for ports in known.values() for name in ports}):
        if len(known) < 2:
            break
        reported = {node: _told(ports.get(name)) for node, ports in known.items()}
        right = deciding(list(reported.values()))
        if right.startswith("ACTIVE"):
            found += [
                (node, _finding(f"{name}", "wrong", text, f"{right} as on most nodes", "repair the link; see ibstat"))
                for node, text in reported.items()
                if text != right
            ]
    return found


def _told(port: Mapping[str, Any] | None) -> str:
    if port is None:
        return "not there"
    if port["state"] != "ACTIVE":
        return f"{port['state']} ({port['phys_state']})"
    return f"ACTIVE at {port['rate_gbit_per_s']:.0f} Gbit/s"


def _none(situation: DoctorContext) -> Finding:
    cluster = situation.cluster
    if cluster and cluster.fabric.kind == "infiniband":
        wanted = f"{cluster.fabric.nics_per_node} ports ({cluster.name})"
        return _finding("ports", "wrong", f"no {os.fspath(ROOT)}", wanted, "load the driver, or choose --cluster")
    return _finding("ports", "not checked", "no InfiniBand or RoCE device here")


def _finding(check: str, status: Status, found: str, expected: str = "", fix: str = "") -> Finding:
    return judged(GROUP, check, status, found, expected, fix)
