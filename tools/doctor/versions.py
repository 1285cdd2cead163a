"""Versions of what runs, against the pins and between nodes. Reads metadata; nothing is imported."""

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

from program.printing import some
from program.untrusted import read_toml
from tools import versions as pins
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, Status, deciding, judged
from training.run_dir import fingerprint

GROUP = "versions"
LIBRARIES = (*fingerprint.LIBRARIES, "NCCL")
MUST_AGREE = ("Triplane's code", "Python", *LIBRARIES)
MAY_DIFFER = ("kernel", "C library")
"""Seen to train together, but not what a cluster is meant to look like."""


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: name -> version. Wrong: a broken pin of pyproject.toml."""
    facts = {
        "Triplane's code": fingerprint.code_digest(),
        "Python": platform.python_version(),
        **{name: fingerprint.version(name) for name in fingerprint.LIBRARIES},
        "NCCL": nccl_version(),
        "kernel": platform.release(),
        "C library": " ".join(platform.libc_ver()),
    }
    reported = ", ".join(f"{name} {facts[name]}" for name in ("Python", *LIBRARIES) if facts[name] != "none")
    findings = [judged(GROUP, "installed", "ok", reported)]
    if situation.device == "cuda" and facts["transformer-engine"] == "none":
        findings.append(_no_te())
    return NodeCheck(findings=[*findings, *_pins()], facts=facts)


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong on the nodes that have another version than the majority."""
    known = [one for one in seen if GROUP in one.facts]
    if len(known) < 2:
        return []
    found: list[tuple[str, Finding]] = []
    for name in (*MUST_AGREE, *MAY_DIFFER):
        values = [one.facts[GROUP].get(name, "none") for one in known]
        right = deciding(values)
        found += [
            (one.node, _differs(name, value, right, [other.node for other in known if _has(other, name, right)]))
            for one, value in zip(known, values, strict=True)
            if value != right
        ]
    code = deciding([one.facts[GROUP]["Triplane's code"] for one in known])
    if not any(finding.status == "wrong" for _, finding in found):
        same = judged(GROUP, "between nodes", "ok", f"all alike; Triplane's code {code}")
        found += [(one.node, same) for one in known]
    return found


def _has(one: NodeFacts, name: str, value: str) -> bool:
    return bool(one.facts[GROUP].get(name, "none") == value)


def _differs(name: str, value: str, right: str, others: Sequence[str]) -> Finding:
    fix = "use one environment for all nodes (a shared folder or one container image)"
    if name == "Triplane's code":
        fix = "let every node see the same checkout"
    status: Status = "warning" if name in MAY_DIFFER else "wrong"
    found, expected = (text if text != "none" else "not installed" for text in (value, right))
    return judged(GROUP, f"{name} between nodes", status, found, f"{expected} as on {some(others, 3)}", fix)


def _pins() -> list[Finding]:
    project = read_toml(pins.ROOT / "pyproject.toml")["project"]
    broken, untested = pins.problems(project["dependencies"])
    if sys.version_info[:2] != (3, 12):
        broken.append(f"Python {platform.python_version()}: expected 3.12")
    if not broken and not untested:
        return [judged(GROUP, "pins", "ok", "all in the range that has been run")]
    fix = "make setup, or pip install with constraints.txt"
    found: list[tuple[Status, str]] = [*(("wrong", one) for one in broken), *(("warning", one) for one in untested)]
    return [judged(GROUP, "pins", status, text, fix=fix, setting=True) for status, text in found]


def _no_te() -> Finding:
    expected, fix = "Transformer Engine on GPUs: fused layers and fp8", 'pip install --no-build-isolation -e ".[te]"'
    return judged(GROUP, "transformer-engine", "warning", "not installed", expected, fix, setting=True)


def nccl_version() -> str:
    """Of the package that torch loads; "none" where torch brings its own or there is none."""
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith("nvidia-nccl-"):
            return distribution.version
    return "none"
