"""The examination: alone, as the first of several nodes, or as another of them."""

import contextlib
import fcntl
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from program.durable import replace_file
from tools.doctor import (
    clocks,
    collectives,
    gemm,
    gpus,
    infiniband,
    interfaces,
    memory,
    names,
    nvlink,
    sharing,
    versions,
)
from tools.doctor import node as nodes
from tools.doctor import run_dir as folders
from tools.doctor.context import DoctorContext
from tools.doctor.deadline import Deadline
from tools.doctor.finding import Finding, FindingRow, NodeFacts, bad_nodes, fold, judged
from tools.doctor.names import resolve
from tools.doctor.node import MEASURE_S, ExaminedNode
from tools.doctor.tcp_rendezvous import Hub, MeetingError, come, gather, left, ports_of, serve
from tools.doctor.workers import WorkerError, listen

ROUND_S = 60.0
"""Limit of a question that needs no long work."""
PATIENCE_S = 90.0
"""How much longer the others look for the first node than it waits for them: it may have more to check, and is not to
be ended by a failure of theirs while it examines the rest."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Result:
    """What came out, on the first node."""

    nodes: list[str]
    """All, by rank."""
    reported: list[str]
    """Those that reported."""
    rows: list[FindingRow]
    bad: dict[str, list[str]]
    """Node to exclude -> why."""

    @property
    def code(self) -> int:
        """The exit code: 1 where something is wrong."""
        return int(any(row.finding.status == "wrong" for row in self.rows))


def alone(situation: DoctorContext, groups: Sequence[str], deadline: Deadline) -> Result:
    """This machine, without any other."""
    node = ExaminedNode(situation, groups, deadline)
    try:
        seen = node.check_node()
        found: list[tuple[str, Finding]] = []
        if collectives.GROUP in groups:
            found = _collectives([seen], node, None)
    finally:
        node.close()
        sharing.clear(situation.run_dir)
    return _result([seen], [*found, *_compare([seen], groups)], [seen.node], situation)


def first(situation: DoctorContext, groups: Sequence[str], deadline: Deadline, meeting_s: float) -> Result:
    """The first of several nodes: gathers the others, asks, judges. Raises nothing that a node can cause."""
    node = ExaminedNode(situation, groups, deadline)
    hub = None
    try:
        mine = node.check_node()
        try:
            hub = Hub.open(ports_of(situation), situation.session)
        except MeetingError as error:
            found = [(mine.node, judged("meeting", "listening", "wrong", str(error), "a port", "export MASTER_PORT"))]
            return _result([mine], [*found, *_compare([mine], groups)], [mine.node], situation)
        seen, found = gather(hub, mine, situation, deadline.left_s(meeting_s))
        offsets = _rounds(hub, node, seen, groups)
        if collectives.GROUP in groups:
            found += _collectives(seen, node, hub)
        names_of = {one.rank: one.node for one in seen}
        found += [(names_of[rank], left(why)) for rank, why in hub.lost.items()]
        if clocks.GROUP in groups:
            found += clocks.evaluate(offsets, seen)
        everyone = [names_of.get(rank, situation.name_of(rank)) for rank in range(situation.nodes)]
        result = _result(seen, [*found, *_compare(seen, groups)], everyone, situation)
        hub.close({"do": "bye"})
        return result
    finally:
        node.close()
        sharing.clear(situation.run_dir)
        if hub is not None:
            hub.close({"do": "bye"})


def other(situation: DoctorContext, groups: Sequence[str], deadline: Deadline, meeting_s: float) -> None:
    """Any other node, until the first one is done. Raises MeetingError where that one is not to be had.

    The outcome is the first node's: here a failure would only end it, under srun --kill-on-bad-exit.
    """
    node = ExaminedNode(situation, groups, deadline)
    try:
        seen = node.check_node()
        wire = come(situation, seen, deadline.left_s(meeting_s + PATIENCE_S))
        serve(wire, node.answers, deadline.left_s())
    finally:
        node.close()


def _rounds(
    hub: Hub, node: ExaminedNode, seen: Sequence[NodeFacts], groups: Sequence[str]
) -> dict[int, tuple[float, float]]:
    """Ask all to look around; the answers become facts. Returns the clocks' offsets by rank."""
    nonce = secrets.token_hex(8)
    with _locked(node.situation, nonce):
        question = {"do": "around", "nonce": nonce, "nodes": [_card(one) for one in seen]}
        for rank, answer in _ask(hub, node, question).items():
            one = next(one for one in seen if one.rank == rank)
            one.findings += NodeFacts.from_json({**one.to_json(), "findings": answer["findings"]}).findings
            for group, fact in ((interfaces.GROUP, "route"), (folders.GROUP, "shared")):
                if answer.get(fact) and group in one.facts:
                    one.facts[group][fact] = answer[fact]
    if folders.GROUP in groups and node.situation.run_dir is not None:
        token = secrets.token_hex(8)
        with contextlib.suppress(OSError):
            replace_file(folders.token_path(node.situation.run_dir, 0), token.encode())
        for rank, answer in _ask(hub, node, {"do": "again", "token": token}).items():
            for one in (one for one in seen if one.rank == rank):
                one.facts.get(folders.GROUP, {}).get("shared", {}).update(answer["again"])
    if clocks.GROUP not in groups:
        return {}
    ranks = list(hub.guests)
    offsets = {
        rank: clocks.offset(lambda rank=rank: hub.ask({"do": "time"}, ROUND_S, [rank]).get(rank), node.situation.clock)  # type: ignore[misc]
        for rank in ranks
    }
    return {rank: one for rank, one in offsets.items() if one is not None}


def _card(one: NodeFacts) -> dict[str, Any]:
    """What every node gets to know of every other."""
    return {
        "rank": one.rank,
        "host": one.host,
        "machine": one.machine,
        "addresses": one.facts.get(names.GROUP, {}).get("addresses", []),
        "token": one.facts.get(folders.GROUP, {}).get("token", ""),
    }


@contextlib.contextmanager
def _locked(situation: DoctorContext, nonce: str) -> Iterator[None]:
    """The first node holds a lock while the others try it."""
    if situation.run_dir is None:
        yield
        return
    try:
        file = sharing.lock_path(situation.run_dir, nonce).open("w")
    except OSError:
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _ask(hub: Hub, node: ExaminedNode, question: dict[str, Any], limit_s: float = ROUND_S) -> dict[int, dict[str, Any]]:
    """Every node's answer by rank, this one's included; all work at the same time."""
    limit = node.deadline.left_s(limit_s)
    asked = hub.tell(question)
    mine = node.answer(question)
    return {0: mine, **hub.collect(asked, limit, question["do"])}


def _collectives(seen: Sequence[NodeFacts], node: ExaminedNode, hub: Hub | None) -> list[tuple[str, Finding]]:
    """Measure them over all nodes that are still here; why not, where that cannot be."""
    situation = node.situation
    why = _obstacle(seen, situation, hub)
    local = len(node.workers)
    if not why:
        try:
            address = "127.0.0.1" if hub is None or situation.master is None else resolve(situation.master[0])[0]
            port = listen(node.workers[0], address, node.deadline.left_s(ROUND_S))
        except (OSError, WorkerError) as error:
            why = str(error)
    if why:
        return [("", judged(collectives.GROUP, "bandwidth", "not checked", why))]
    question = {
        "do": "measure",
        "address": address,
        "port": port,
        "world_size": local * situation.nodes,
        "local_world_size": local,
    }
    answers = {0: node.answer(question)} if hub is None else _ask(hub, node, question, MEASURE_S)
    found: list[tuple[str, Finding]] = []
    for one in seen:
        looked = collectives.check_node(answers.get(one.rank, {}).get("ranks", []))
        one.facts[collectives.GROUP] = looked.facts
        found += [(one.node, finding) for finding in looked.findings]
    return [*found, *collectives.evaluate(seen, situation, local)]


def _obstacle(seen: Sequence[NodeFacts], situation: DoctorContext, hub: Hub | None) -> str:
    here = 1 + len(hub.guests) if hub else 1
    if here < situation.nodes:
        return f"{situation.nodes - here} of {situation.nodes} nodes cannot be reached"
    cut_off = [
        one.node for one in seen if any((of.group, of.status) == (interfaces.GROUP, "wrong") for of in one.findings)
    ]
    if cut_off:  # its ranks would end at once, and the others' wait for them as long as they may
        return f"the ranks of {', '.join(cut_off)} would not find the others: see interfaces"
    counts = {one.node: one.facts.get("workers", {}).get("count", 0) for one in seen}
    if len(set(counts.values())) > 1:
        return f"unequal numbers of GPUs: {', '.join(f'{node} {count}' for node, count in counts.items())}"
    failed = [one.node for one in seen if one.facts.get("workers", {}).get("failed")]
    return f"processes failed on {', '.join(failed)}: see gemm" if failed else ""


def _compare(seen: Sequence[NodeFacts], groups: Sequence[str]) -> list[tuple[str, Finding]]:
    """What nodes say of themselves, and what their facts say side by side."""
    found = [(one.node, finding) for one in seen for finding in one.findings]
    comparisons = {
        versions.GROUP: versions.compare,
        gpus.GROUP: gpus.compare,
        nvlink.GROUP: nvlink.compare,
        infiniband.GROUP: infiniband.compare,
        names.GROUP: names.compare,
        interfaces.GROUP: interfaces.judge_routes,
        folders.GROUP: sharing.evaluate,
        memory.GROUP: memory.compare,
        gemm.GROUP: gemm.compare,
    }
    for group, compare in comparisons.items():
        if group in groups:
            found += compare(seen)
    return found


def _result(
    seen: Sequence[NodeFacts], found: Sequence[tuple[str, Finding]], everyone: list[str], situation: DoctorContext
) -> Result:
    rows = fold(found, nodes.GROUPS)
    reported = [one.node for one in seen]
    bad = bad_nodes(rows, len(reported))
    # A node that has neither come nor a name of its launcher's cannot be excluded by name.
    known = [node for node in everyone if node in reported or node in situation.names]
    return Result(nodes=everyone, reported=reported, rows=rows, bad={node: bad[node] for node in known if node in bad})
