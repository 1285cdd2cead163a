"""Bandwidth of each collective against card, fabric and the other nodes. tools/doctor/worker.py measures."""

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.failures import ECHOES
from tools.clusters import Cluster
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, judged, shares_of_median

GROUP = "collectives"
FIX = "see names and interfaces above; NCCL_DEBUG=INFO tells more"
GOOD, POOR = 0.7, 0.4
"""Shares of what card and fabric should give. Not run on GPUs yet."""
SLOW = {"nccl": (0.85, 0.6), "gloo": (0.5, 0.1)}
"""Shares of the median node below which a node is warned of, and called wrong; gloo also measures the CPU's load."""


def check_node(measured: Sequence[Mapping[str, Any]]) -> NodeCheck:
    """Facts: "ranks", what this node's workers measured. A worker's error is a finding of its node."""
    errors = [one["error"] for one in measured if "error" in one]
    causes = [error for error in errors if not any(echo in error for echo in ECHOES)]
    findings = []
    if causes:
        findings = [judged(GROUP, "runs", "wrong", causes[0], "collectives", FIX, setting=True)]
    elif errors:  # of another node's failure, or of a network that swallows everything: see ``evaluate``
        findings = [judged(GROUP, "runs", "not checked", errors[0])]
    return NodeCheck(findings=findings, facts={"ranks": list(measured)})


def node_gb_per_s(cluster: Cluster) -> float:
    """What a node's network cards carry together."""
    return cluster.fabric.nics_per_node * cluster.fabric.nic_gb_per_s


def expected_gb_per_s(operation: str, local: int, world: int, cluster: Cluster) -> float:
    """Bus bandwidth, GB/s, that an operation over ``world`` ranks of ``local`` a node should come to at most.

    Within a node: the card's link. Between nodes a ring enters and leaves each node once, by all of its network
    cards; in an all-to-all the (world - local) / (world - 1) of all traffic that leaves the node shares them, as does
    a rank's exchange with its counterpart on another node.
    """
    if world <= max(local, cluster.fabric.scale_up_domain):
        return cluster.fabric.scale_up_gb_per_s
    share = node_gb_per_s(cluster) / local
    if operation == "all_to_all":
        return min(cluster.fabric.scale_up_gb_per_s, share * (world - 1) / (world - local))
    if operation == "send and receive":  # only the last rank of a node sends to another node: by one card
        return min(cluster.fabric.scale_up_gb_per_s, cluster.fabric.nic_gb_per_s)
    return min(cluster.fabric.scale_up_gb_per_s, node_gb_per_s(cluster))


def evaluate(seen: Sequence[NodeFacts], situation: DoctorContext, local: int) -> list[tuple[str, Finding]]:
    """The collectives over all ranks (of no node in particular), within each node, and between pairs of nodes."""
    backend = "nccl" if situation.device == "cuda" else "gloo"
    ranks = {one.node: [rank for rank in _ranks(one) if "all" in rank] for one in seen}
    measured = [rank for several in ranks.values() for rank in several]
    if not measured:
        return [("", judged(GROUP, "runs", "wrong", "no collective over all ranks", "", FIX, setting=True))]
    world = local * situation.nodes
    found = [("", one) for one in _over_all(measured, local, world, backend, situation)]
    if situation.nodes > 1:
        found += _within(ranks, local, backend, situation)
        found += _between(ranks, seen, local, backend, situation)
    return found


def _ranks(one: NodeFacts) -> list[dict[str, Any]]:
    return list(one.facts.get(GROUP, {}).get("ranks", []))


def _over_all(
    measured: Sequence[Mapping[str, Any]], local: int, world: int, backend: str, situation: DoctorContext
) -> list[Finding]:
    findings = []
    for operation in measured[0]["all"]:
        speed = min(rank["all"][operation] for rank in measured)
        best = _expected(operation, local, world, backend, situation)
        findings.append(_judge(operation, speed, best, f"{world} ranks, {backend}", situation))
    return findings


def _expected(operation: str, local: int, world: int, backend: str, situation: DoctorContext) -> float | None:
    """None without a cluster's file, and with gloo, which copies through the CPU."""
    if situation.cluster is None or backend != "nccl" or world == 1:
        return None
    return expected_gb_per_s(operation, local, world, situation.cluster)


def _judge(check: str, speed: float, best: float | None, reported: str, situation: DoctorContext) -> Finding:
    found = f"{speed:.3g} GB/s ({reported})"
    if best is None or speed >= GOOD * best:
        share = f", {speed / best:.0%} of {best:.0f} GB/s" if best else ""
        return judged(GROUP, check, "ok", found + share)
    status: Status = "wrong" if speed < POOR * best else "warning"
    cluster = situation.cluster.name if situation.cluster else ""
    wanted = f"{GOOD:.0%} or more of {best:.0f} GB/s ({cluster})"
    fix = "NCCL_DEBUG=INFO: which network does it use?"
    return judged(GROUP, check, status, found, wanted, fix, setting=True)


def _within(
    ranks: Mapping[str, Sequence[Mapping[str, Any]]], local: int, backend: str, situation: DoctorContext
) -> list[tuple[str, Finding]]:
    speeds = {
        node: min(rank["local"]["all_reduce"] for rank in several)
        for node, several in ranks.items()
        if several and all("local" in rank for rank in several)
    }
    found = _against_median("within a node", speeds, backend, "its cards' links")
    for node, speed in speeds.items():
        best = _expected("all_reduce", local, local, backend, situation)
        one = _judge("within a node", speed, best, f"all_reduce, {local} ranks, {backend}", situation)
        if one.status != "ok" and not any(other == node for other, _ in found):
            found.append((node, one))
    if speeds and not found:
        text = "{:.3g} GB/s (all_reduce)"
        found = [(node, judged(GROUP, "within a node", "ok", text, numbers=[one])) for node, one in speeds.items()]
    return found


def _between(
    ranks: Mapping[str, Sequence[Mapping[str, Any]]],
    seen: Sequence[NodeFacts],
    local: int,
    backend: str,
    situation: DoctorContext,
) -> list[tuple[str, Finding]]:
    """A node next to a slow one has another neighbour: the better of its two pairs is its own."""
    links: dict[str, dict[str, float]] = {}
    for node, several in ranks.items():
        for rank in several:
            for partner, speed in rank.get("pairs", {}).items():
                links.setdefault(node, {})[partner] = links.get(node, {}).get(partner, 0.0) + speed
    best = {node: max(partners.values()) for node, partners in links.items()}
    found = _against_median("between nodes", best, backend, "its network cards and cables") if len(best) > 2 else []
    wanted = node_gb_per_s(situation.cluster) if situation.cluster and backend == "nccl" else None
    for node, speed in best.items():
        if any(other == node for other, _ in found):
            continue
        one = _judge("between nodes", speed, wanted, f"{local} ranks a node, {backend}", situation)
        if one.status == "ok":
            text = f"{{:.3g}} GB/s with a neighbour, each direction ({backend})"
            one = judged(GROUP, "between nodes", "ok", text, numbers=[speed])
        found.append((node, one))
    return found


def _against_median(check: str, speeds: Mapping[str, float], backend: str, what: str) -> list[tuple[str, Finding]]:
    slow, broken = SLOW[backend]
    found = []
    for node, share in shares_of_median(speeds).items():
        if share < slow:
            status: Status = "wrong" if share < broken else "warning"
            text = f"{speeds[node]:.3g} GB/s, {share:.0%} of the median"
            found.append((node, judged(GROUP, check, status, text, f"{slow:.0%} or more", f"check {what}")))
    return found
