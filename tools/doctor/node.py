"""What one node does: check itself, then answer the first node's questions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools import nccl_env
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
    port,
    run_dir,
    sharing,
    space,
    versions,
    workers,
    xid,
)
from tools.doctor.context import DoctorContext, machine
from tools.doctor.deadline import Deadline, within
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, judged

type Answer = dict[str, Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class Subject:
    """A group whose checks need no other node."""

    group: str
    check_node: Callable[[DoctorContext], NodeCheck]
    limit_s: float


def settings(situation: DoctorContext) -> NodeCheck:
    """Variables that NCCL and torch do not read (any more): they were set for a purpose that they no longer serve."""
    texts = list(nccl_env.warnings(situation.environ, "the environment"))
    findings = [judged("variables", "NCCL and torch", "warning", text, setting=True) for text in texts]
    return NodeCheck(findings=findings or [judged("variables", "NCCL and torch", "ok", "all that are set are read")])


SUBJECTS = (
    Subject(group=versions.GROUP, check_node=versions.check_node, limit_s=30.0),
    Subject(group="variables", check_node=settings, limit_s=10.0),
    Subject(group=gpus.GROUP, check_node=gpus.check_node, limit_s=75.0),
    Subject(group=xid.GROUP, check_node=xid.check_node, limit_s=35.0),
    Subject(group=nvlink.GROUP, check_node=nvlink.check_node, limit_s=35.0),
    Subject(group=infiniband.GROUP, check_node=infiniband.check_node, limit_s=20.0),
    Subject(group=names.GROUP, check_node=names.check_node, limit_s=20.0),
    Subject(group=interfaces.GROUP, check_node=interfaces.check_node, limit_s=20.0),
    Subject(group=port.GROUP, check_node=port.check_node, limit_s=20.0),
    Subject(group=run_dir.GROUP, check_node=run_dir.check_node, limit_s=30.0),
    Subject(group=space.GROUP, check_node=space.check_node, limit_s=20.0),
    Subject(group=memory.GROUP, check_node=memory.check_node, limit_s=10.0),
)
GROUPS = ("meeting", *(subject.group for subject in SUBJECTS), clocks.GROUP, gemm.GROUP, collectives.GROUP)
"""In the order of the report."""
GEMM_S = 120.0
MEASURE_S = 180.0
"""Limits; torch alone takes a minute to load from a file system that is slow and cold."""


class ExaminedNode:
    """This node: its workers, and how it answers."""

    def __init__(self, situation: DoctorContext, groups: Sequence[str], deadline: Deadline) -> None:
        self.situation, self.groups, self.deadline = situation, groups, deadline
        self.workers: list[workers.Worker] = []
        self.answers: dict[str, Callable[[Answer], Answer]] = {
            "around": self.around,
            "again": lambda question: {"again": sharing.again(question, self.situation)},
            "time": lambda _: {"time": self.situation.clock()},
            "measure": self.measure,
        }

    def check_node(self) -> NodeFacts:
        """Everything that needs no other node. Processes for GEMM and collectives load torch meanwhile."""
        situation = self.situation
        if {gemm.GROUP, collectives.GROUP} & set(self.groups):
            alone = 2 if collectives.GROUP in self.groups and situation.nodes == 1 else 1
            count = situation.gpus if situation.device == "cuda" else alone
            self.workers = workers.start(max(1, count), situation.device, situation.environ, gemm.GROUP in self.groups)
        seen = NodeFacts(rank=situation.rank, node=situation.node, host=situation.host, machine=machine())
        for subject in SUBJECTS:
            if subject.group in self.groups:
                self._add(seen, subject.group, self._look(subject))
        if self.workers:
            measured = workers.gemms(self.workers, self.deadline.left_s(GEMM_S))
            if gemm.GROUP in self.groups:
                self._add(seen, gemm.GROUP, gemm.evaluate(measured, situation))
            seen.facts["workers"] = {"count": len(self.workers), "failed": [one for one in measured if "error" in one]}
        return seen

    def _look(self, subject: Subject) -> NodeCheck:
        limit = self.deadline.left_s(subject.limit_s)
        if not limit:
            why = f"the time limit of {self.deadline.limit_s:.0f} s was reached"
            return NodeCheck(findings=[judged(subject.group, "time", "not checked", why)])
        try:
            return within(limit, lambda: subject.check_node(self.situation))
        except TimeoutError as error:
            fix = "something hangs on this node: the file system, the driver, or the name server"
            return NodeCheck(findings=[judged(subject.group, "time", "wrong", str(error), "an answer", fix)])
        except Exception as error:  # whatever is odd on a node is reported, and the other subjects are checked
            why = f"{type(error).__name__}: {error}"
            return NodeCheck(findings=[judged(subject.group, "examination", "not checked", why)])

    def _add(self, seen: NodeFacts, group: str, looked: NodeCheck) -> None:
        seen.findings += looked.findings
        seen.facts[group] = looked.facts

    def answer(self, question: Answer) -> Answer:
        """The first node's own answer to what it asks the others."""
        return self.answers[question["do"]](question)

    def around(self, question: Answer) -> Answer:
        """Names, routes and files of the other nodes."""
        found: list[Finding] = []
        answer: Answer = {}
        if names.GROUP in self.groups:
            found = names.around(question, self.situation)
        if interfaces.GROUP in self.groups:
            answer["route"] = interfaces.around(question, self.situation)
        if run_dir.GROUP in self.groups:
            answer["shared"] = sharing.around(question, self.situation)
        reported = NodeFacts(rank=0, node="", host="", machine="", findings=found).to_json()
        return {**answer, "findings": reported["findings"]}

    def measure(self, question: Answer) -> Answer:
        """Bandwidths of this node's ranks."""
        first = self.situation.rank * len(self.workers)
        began = time.monotonic()
        ranks = workers.measure(self.workers, question, first, self.deadline.left_s(MEASURE_S))
        return {"ranks": ranks, "seconds": time.monotonic() - began}

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end()
        self.workers = []
