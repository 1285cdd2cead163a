"""Which rank holds all others up, in one line.

A verdict needs no clock that hosts share: every node counts for itself how long its ranks have stood still.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from program.schema import Text
from training.watchdog.heartbeat import PHASES
from training.watchdog.node_monitor import Report, ranks_text

Kind = Literal["hang", "killed", "lost", "exception", "fault", "echo"]
"""fault: a ``SharedFault``. An echo is a rank that lost its peer: the cause only as long as there is no other.
lost: that peer's whole node."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """Why a start of a run ended: the content of RUN_DIR/watch/start-.../verdict.json."""

    kind: Kind
    rank: int
    world_size: int
    host: Text
    """Where ``rank`` runs; of a fault, the node that is to blame, or empty."""
    iteration: int
    phase: str
    line: Text
    """For people: one line, or an exception's text."""
    id: str = ""
    """Random: tells who of several left it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeReport:
    """One node's answer to the judging node."""

    host: str
    ranks: list[Report]
    answers: str = ""
    """The judging that it answers; empty: none yet."""


def decide_verdict(nodes: Sequence[NodeReport], judging: str, world_size: int, folder: str, waited_s: float) -> Verdict:
    """The verdict on a run in which nothing moves; ``nodes`` have had ``waited_s`` seconds to answer ``judging``.

    A silent node comes first, then a rank that is gone, one that is stopped, one that is not where the others wait,
    and at last the one that is least advanced.
    """
    answered = [(node, report) for node in nodes for report in node.ranks if node.answers == judging]
    ending = any(report.phase == "ended" for _, report in answered)  # all have passed the last barrier: none is missing
    known = {report.rank for _, report in answered}
    if len(known) < world_size and not ending:
        return _silent(nodes, judging, sorted(set(range(world_size)) - known), world_size, waited_s)
    left = [(node, report) for node, report in answered if report.phase != "ended" or report.state not in "XZ"]
    suspects, why = _suspects([report for _, report in left])
    hung = min(suspects, key=_advance)
    host = next(node.host for node, report in left if report is hung)
    others = [report for _, report in left if report is not hung]
    at = f"iteration {hung.iteration}, phase {hung.phase}"
    line = (
        f"rank {hung.rank} of {world_size} on {host} hangs in {at}, for {hung.still_s:.0f} s: "
        f"{why(hung)}{_others(others)}. Stacks of all ranks: {folder}"
    )
    return Verdict(
        kind="hang", rank=hung.rank, world_size=world_size, host=host, iteration=hung.iteration,
        phase=hung.phase, line=line,
    )  # fmt: skip


def _suspects(reports: Sequence[Report]) -> tuple[Sequence[Report], Callable[[Report], str]]:
    """Those who may have stopped the others, and how to say it."""
    gone = [report for report in reports if report.state in "XZ"]
    if gone:
        return gone, lambda _: "its process is gone"
    stopped = [report for report in reports if report.state == "T"]
    if stopped:
        return stopped, lambda report: f"its process is stopped (SIGSTOP){_where(report)}"
    elsewhere = [report for report in reports if report.stand is None or report.stand.waits is None]
    if elsewhere and len(elsewhere) < len(reports):
        return elsewhere, _elsewhere
    return reports, _elsewhere


def _elsewhere(report: Report) -> str:
    if report.stand is None:
        asleep = ", in the kernel: a disk or a driver does not answer" if report.state == "D" else ""
        return f"its process (state {report.state}{asleep}) writes no stack"
    if report.stand.waits is None:
        return f"it stands at {report.stand.at}"
    return f"it waits in {report.stand.waits}, at {report.stand.at}"


def _where(report: Report) -> str:
    return f", at {report.stand.at}" if report.stand else ""


def _advance(report: Report) -> tuple[int, int, int, int]:
    return report.iteration, PHASES.index(report.phase), report.beats, report.rank


def _others(reports: Collection[Report]) -> str:
    """What the rest do, most frequent first."""
    if not reports:
        return ""
    doing = Counter(
        ("wait", f" in {report.stand.waits}") if report.stand and report.stand.waits
        else ("stand", f" {_state(report)}{_where(report)}") for report in reports
    )  # fmt: skip
    parts = [
        f"{count} others {verb}{what}" if count > 1 else f"1 other {verb}s{what}"
        for (verb, what), count in doing.most_common(3)
    ]
    more = len(reports) - sum(count for _, count in doing.most_common(3))
    return f"; {', '.join(parts)}" + (f", {more} stand elsewhere" if more else "")


def _state(report: Report) -> str:
    return {"T": "stopped", "X": "dead", "Z": "dead", "D": "in the kernel"}.get(report.state, "still")


def lost(nodes: Sequence[NodeReport], judging: str, world_size: int, waited_s: float) -> Verdict | None:
    """The verdict on nodes that do not answer ``judging``, after ``waited_s`` seconds; None where all do.

    One whose ranks have all ended by themselves is not missed, nor one that never reported.
    """
    quiet = [node for node in nodes if is_missed(node, judging)]
    return replace(_unanswered(quiet, world_size, waited_s), kind="lost") if quiet else None


def is_missed(node: NodeReport, judging: str) -> bool:
    """Whether its answer is still to come."""
    return node.answers != judging and any(report.phase != "ended" for report in node.ranks)


def _silent(
    nodes: Sequence[NodeReport], judging: str, missing: Sequence[int], world_size: int, waited_s: float
) -> Verdict:
    """Ranks are missing: their node is down, or cut off, or it never came up."""
    quiet = [node for node in nodes if node.answers != judging and {report.rank for report in node.ranks} & {*missing}]
    if quiet:
        return _unanswered(quiet, world_size, waited_s)
    line = f"{ranks_text(missing)} of {world_size} never started, or no longer: no node has word of them"
    return Verdict(kind="hang", rank=missing[0], world_size=world_size, host="", iteration=0, phase="start", line=line)


def _unanswered(quiet: Sequence[NodeReport], world_size: int, waited_s: float) -> Verdict:
    node = min(quiet, key=lambda node: node.ranks[0].rank)
    least = min(node.ranks, key=_advance)
    at = f"iteration {least.iteration}, phase {least.phase}"
    more = f" ({len(quiet) - 1} more nodes neither)" if len(quiet) > 1 else ""
    line = (
        f"node {node.host} ({ranks_text([report.rank for report in node.ranks])} of {world_size}) does not answer{more}"
        f", asked {waited_s:.0f} s ago: it is down or cut off; last report: {at}"
    )
    return Verdict(
        kind="hang", rank=least.rank, world_size=world_size, host=node.host, iteration=least.iteration,
        phase=least.phase, line=line,
    )  # fmt: skip
