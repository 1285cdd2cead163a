"""NVLinks: which are active, and how fast. Not run on a GPU yet."""

from collections.abc import Sequence

from tools.doctor import nvidia_smi
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, deciding, judged

GROUP = "nvlink"


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: "gpus" -> GB/s over all links of each GPU, as text keys (JSON)."""
    if situation.device == "cpu":
        return NodeCheck(findings=[_finding("not checked", "no GPU here")])
    try:
        speeds = nvidia_smi.links()
    except OSError as error:
        return NodeCheck(findings=[_finding("not checked", str(error))])
    return evaluate(speeds, situation)


def evaluate(speeds: dict[int, list[float]], situation: DoctorContext) -> NodeCheck:
    """Wrong: a GPU with fewer GB/s than most of its node's. A bridge may leave links unused on all cards alike."""
    totals = {gpu: sum(links) for gpu, links in speeds.items()}
    if not any(totals.values()):
        return NodeCheck(findings=[_finding("ok", "no NVLink is active (cards with PCIe alone)")], facts={"gpus": {}})
    right = deciding(list(totals.values()))
    findings = [
        _finding("wrong", f"GPU {gpu}: {total:.0f} GB/s", f"{right:.0f} GB/s as its neighbours", "reset or repair")
        for gpu, total in totals.items()
        if total < 0.99 * right
    ]
    expected = situation.cluster.fabric.scale_up_gb_per_s if situation.cluster else None
    if not findings and expected and right < 0.9 * expected:
        findings = [
            _finding("wrong", f"{right:.0f} GB/s per GPU", f"{expected:.0f} GB/s", "repair links, or --cluster")
        ]
    active = sum(1 for speed in speeds[min(speeds)] if speed)
    ok = _finding("ok", f"{active} links, {right:.0f} GB/s per GPU and direction, on {len(totals)} GPUs")
    return NodeCheck(findings=findings or [ok], facts={"gpus": {str(gpu): total for gpu, total in totals.items()}})


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: a node whose slowest GPU has fewer GB/s than most nodes'."""
    slowest = {one.node: min(one.facts[GROUP]["gpus"].values()) for one in seen if one.facts.get(GROUP, {}).get("gpus")}
    if len(slowest) < 2:
        return []
    right = deciding(list(slowest.values()))
    return [
        (node, _finding("wrong", f"{speed:.0f} GB/s per GPU", f"{right:.0f} GB/s as on most nodes", "repair the links"))
        for node, speed in slowest.items()
        if speed < 0.99 * right
    ]


def _finding(status: Status, found: str, expected: str = "", fix: str = "") -> Finding:
    return judged(GROUP, "links", status, found, expected, fix)
