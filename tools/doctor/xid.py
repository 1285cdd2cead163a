"""Errors that the NVIDIA driver has written to the kernel's log. Not run on a GPU yet.

"NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus.": the numbers' meaning is NVIDIA's catalogue
(docs.nvidia.com/deploy/xid-errors).
"""

import re
from collections import Counter
from pathlib import Path

from program.untrusted import read_text
from tools.doctor.context import DoctorContext
from tools.doctor.deadline import output_of
from tools.doctor.finding import Finding, NodeCheck, Status, judged

GROUP = "xid"
HARDWARE = {
    48: "double-bit ECC error",
    62: "the GPU's microcontroller halted",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
APPLICATION = {13, 31, 43, 45, 69}
"""What a program did: wrong addresses, or it was ended. They say nothing against the card."""
RECENT_S = 24 * 3600.0
LINE = re.compile(r"\[\s*(?P<at>[\d.]+)\].*NVRM: Xid \((?P<pci>[^)]*)\): (?P<code>\d+)")


def check_node(situation: DoctorContext) -> NodeCheck:
    """Wrong: a hardware error within the last day; a warning for an older or another one."""
    if not Path("/proc/driver/nvidia").exists() or situation.device == "cpu":
        return NodeCheck(findings=[_finding("not checked", "no NVIDIA driver is loaded")])
    try:
        log = kernel_log()
    except OSError as error:
        return NodeCheck(findings=[_finding("not checked", f"the kernel's log cannot be read: {error}")])
    uptime = float(read_text(Path("/proc/uptime")).split()[0])
    return NodeCheck(findings=evaluate(log, uptime))


def kernel_log() -> str:
    """Since boot, with seconds since boot in brackets. Raises OSError where only root may read it."""
    try:
        return output_of(("dmesg", "--color=never"), 15.0)
    except OSError as first:
        try:
            return output_of(("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic"), 15.0)
        except OSError as second:
            raise OSError(f"{first}; {second}") from None


def evaluate(log: str, uptime_s: float) -> list[Finding]:
    """One finding per card and error number."""
    errors: Counter[tuple[str, int, bool]] = Counter()
    for match in LINE.finditer(log):
        recent = float(match["at"]) > uptime_s - RECENT_S
        errors[match["pci"], int(match["code"]), recent] += 1
    findings = [_judge(pci, code, recent, count) for (pci, code, recent), count in sorted(errors.items())]
    return [one for one in findings if one] or [_finding("ok", "no Xid of the hardware since boot")]


def _judge(pci: str, code: int, recent: bool, count: int) -> Finding | None:
    if code in APPLICATION:
        return None
    meaning = f" ({HARDWARE[code]})" if code in HARDWARE else ""
    when = "within a day" if recent else "more than a day ago"
    found = f"Xid {code}{meaning} on {pci}, {count} x, the last {when}"
    if code in HARDWARE and recent:
        return _finding("wrong", found, "reset the GPU or restart the node; replace the card if it recurs")
    return _finding("warning", found, "see NVIDIA's Xid catalogue")


def _finding(status: Status, found: str, fix: str = "") -> Finding:
    return judged(GROUP, "kernel log", status, found, "no Xid" if fix else "", fix)
