"""The report as people read it, and as JSON."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from program.printing import some
from tools.doctor.context import DoctorContext
from tools.doctor.examine import Result
from tools.doctor.finding import SEVERITY, FindingRow, Status
from tools.doctor.node import GROUPS
from tools.shared.written import marked, write_file

COLOURS: dict[Status, str] = {"ok": "32", "not checked": "2", "warning": "33", "wrong": "1;31"}
WORDS: dict[Status, str] = {"ok": "ok", "not checked": "not checked", "warning": "warning", "wrong": "WRONG"}
WIDTH = 120
GROUP_ROOM = max(map(len, GROUPS))
NAMED = 6
"""Nodes that a line lists before it counts them."""


def show(result: Result, situation: DoctorContext, seconds: float, stream: TextIO) -> None:
    """Print the report, in colours on a terminal."""
    on_terminal = stream.isatty()
    width = max(80, shutil.get_terminal_size().columns) if on_terminal else WIDTH
    for line in lines(result, situation, seconds, width, on_terminal):
        print(line, file=stream)
    stream.flush()


def lines(
    result: Result, situation: DoctorContext, seconds: float, width: int = WIDTH, colours: bool = False
) -> list[str]:
    """A heading, a line per check behind its group's name, and the verdict."""
    text = [*_heading(result, situation, seconds)]
    room = max((len(row.finding.check) for row in result.rows), default=0)
    group = ""
    for row in result.rows:
        first = row.finding.group != group
        group = row.finding.group
        text += _line(row, group if first else "", result.reported, room, width, colours)
    return [*text, "", *_verdict(result)]


def _heading(result: Result, situation: DoctorContext, seconds: float) -> list[str]:
    nodes = result.nodes
    who = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({some(nodes, NAMED)})"
    what = f"{situation.gpus} GPUs each" if situation.device == "cuda" and len(nodes) > 1 else situation.device
    cluster = f", against {situation.cluster.name}" if situation.cluster else ""
    return [f"Triplane's doctor: {who}, {what}{cluster}; {seconds:.1f} s", ""]


def _line(row: FindingRow, group: str, nodes: Sequence[str], room: int, width: int, colours: bool) -> list[str]:
    finding = row.finding
    word = f"{WORDS[finding.status]:<13}"
    if colours:
        word = f"\x1b[{COLOURS[finding.status]}m{word}\x1b[0m"
    everywhere = not row.nodes or set(row.nodes) == set(nodes)
    who = "" if everywhere else f"{some(row.nodes, NAMED)}: "
    text = who + row.found + (f"; expected {finding.expected}" if finding.expected else "")
    indent = " " * (GROUP_ROOM + 2 + 13 + 2 + room + 2)
    body = textwrap.wrap(text, max(40, width - len(indent)), break_on_hyphens=False) or [""]
    head = f"{group:<{GROUP_ROOM}}  {word}  {finding.check:<{room}}  "
    out = [head + body[0], *(indent + more for more in body[1:])]
    if finding.fix and finding.status in ("warning", "wrong"):
        hint = textwrap.wrap(f"-> {finding.fix}", max(40, width - len(indent)), subsequent_indent="   ")
        out += [indent + more for more in hint]
    return out


def _verdict(result: Result) -> list[str]:
    counts = {status: sum(row.finding.status == status for row in result.rows) for status in reversed(SEVERITY)}
    reported = [", ".join(f"{count} {WORDS[status].lower()}" for status, count in counts.items() if count)]
    reported += [f"bad node {node} ({'; '.join(dict.fromkeys(why))})" for node, why in result.bad.items()]
    if result.code and not result.bad:
        reported.append("something is wrong that excluding a node does not cure")
    return reported


PLACE = "--json", marked('"bad_nodes": [', '"exit_code": '), ("doctor*.json",)
"""Where the findings may go, for ``tools.shared.written``."""


def write_json(path: Path, result: Result, situation: DoctorContext, seconds: float) -> None:
    """For other programs: every row with its nodes, the bad nodes, and the exit code."""
    rows = [
        {
            "group": row.finding.group,
            "check": row.finding.check,
            "status": row.finding.status,
            "found": row.found,
            "expected": row.finding.expected,
            "fix": row.finding.fix,
            "nodes": row.nodes,
        }
        for row in result.rows
    ]
    reported = {
        "nodes": result.nodes,
        "bad_nodes": list(result.bad),
        "exit_code": result.code,
        "device": situation.device,
        "cluster": situation.cluster.name if situation.cluster else None,
        "seconds": seconds,
        "checks": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(reported, indent=1) + "\n").encode(), *PLACE)
