"""What a check says, equal nodes folded into one row, and which nodes are to be excluded."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "wrong", "not checked"]
SEVERITY: tuple[Status, ...] = ("ok", "not checked", "warning", "wrong")


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """The outcome of one check on one node, or on the job."""

    group: str
    """The subject, as --only and --skip name it."""
    check: str
    status: Status
    found: str
    """A format string for ``numbers``: nodes that differ in their numbers alone share a row, which shows a range."""
    numbers: tuple[float, ...] = ()
    expected: str = ""
    fix: str = ""
    fault: Literal["node", "setting"] = "node"
    """Whom "wrong" speaks against: this node's machine; or what the user or the cluster's administrator has set, which
    speaks against a node only where other nodes are better off."""


@dataclass(kw_only=True, slots=True)
class NodeCheck:
    """What one subject saw on one node: what it found, and facts (JSON) to be compared with other nodes'."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class NodeFacts:
    """Everything that one node knows about itself; crosses the network as JSON."""

    rank: int
    node: str
    host: str
    machine: str
    """The same for two nodes that are one machine with one network (tests, or several daemons on a host)."""
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By group."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(reported: dict[str, Any]) -> "NodeFacts":
        """The inverse of ``to_json``."""
        findings = [Finding(**{**one, "numbers": tuple(one["numbers"])}) for one in reported["findings"]]
        return NodeFacts(**{**reported, "findings": findings})


@dataclass(kw_only=True, slots=True)
class FindingRow:
    """Nodes of which a check says the same. ``nodes`` is empty where it speaks of the job as a whole."""

    finding: Finding
    nodes: list[str]
    numbers: list[tuple[float, ...]]

    @property
    def found(self) -> str:
        """The finding's text with its numbers, as ranges over the nodes."""
        return self.finding.found.format(*(_Span(values) for values in zip(*self.numbers, strict=True)))


class _Span(tuple[float, ...]):
    """Numbers that are formatted as one: "3.1", or "3.1 to 4.0" where they differ."""

    def __new__(cls, values: Iterable[float]) -> "_Span":
        return super().__new__(cls, values)

    def __format__(self, spec: str) -> str:
        least, most = format(min(self), spec), format(max(self), spec)
        return least if least == most else f"{least} to {most}"


def plain(text: str) -> str:
    """``text`` for ``Finding.found``, where braces mean something."""
    return text.replace("{", "{{").replace("}", "}}")


def judged(
    group: str,
    check: str,
    status: Status,
    found: str,
    expected: str = "",
    fix: str = "",
    setting: bool = False,
    numbers: Sequence[float] = (),
) -> Finding:
    """A finding; without numbers, braces in ``found`` mean nothing. ``setting``: see ``Finding.fault``."""
    return Finding(
        group=group,
        check=check,
        status=status,
        found=found if numbers else plain(found),
        numbers=tuple(numbers),
        expected=expected,
        fix=fix,
        fault="setting" if setting else "node",
    )


def fold(findings: Sequence[tuple[str, Finding]], groups: Sequence[str]) -> list[FindingRow]:
    """Rows in the order of ``groups`` and of first appearance. A node of "" stands for the job."""
    rows: dict[Finding, FindingRow] = {}
    for node, finding in findings:
        key = dataclasses.replace(finding, numbers=())
        row = rows.setdefault(key, FindingRow(finding=finding, nodes=[], numbers=[]))
        row.numbers.append(finding.numbers)
        if node and node not in row.nodes:
            row.nodes.append(node)
    checks = {(row.finding.group, row.finding.check): place for place, row in reversed(list(enumerate(rows.values())))}

    def place(row: FindingRow) -> tuple[int, int]:
        finding = row.finding
        known = groups.index(finding.group) if finding.group in groups else len(groups)
        return known, checks[finding.group, finding.check]

    return sorted(rows.values(), key=place)


def bad_nodes(rows: Sequence[FindingRow], reported: int) -> dict[str, list[str]]:
    """Node to exclude -> why, of ``reported`` nodes with a report: see ``Finding.fault``."""
    blamed: dict[str, list[str]] = {}
    for row in rows:
        finding = row.finding
        if finding.status != "wrong":
            continue
        same = {
            node
            for other in rows
            if (other.finding.group, other.finding.check, other.finding.status)
            == (finding.group, finding.check, "wrong")
            for node in other.nodes
        }
        if finding.fault == "node" or len(same) < reported:
            for node in row.nodes:
                blamed.setdefault(node, []).append(f"{finding.group}: {finding.check}")
    return blamed


def worst(rows: Iterable[FindingRow]) -> Status:
    """The worst status of all; "ok" without rows."""
    return max((row.finding.status for row in rows), key=SEVERITY.index, default="ok")


# ---- which of several nodes' answers counts, and which numbers fall out of the row


def deciding[T: Hashable](values: Sequence[T]) -> T:
    """The value that more than half have; without one, the first's (the first node's, in the order of ranks)."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else values[0]


def shares_of_median(values: Mapping[str, float]) -> dict[str, float]:
    """Each value divided by the median of all; empty for fewer than two values or a median of 0."""
    if len(values) < 2:
        return {}
    median = statistics.median(values.values())
    return {name: value / median for name, value in values.items()} if median > 0 else {}
