"""Who is named, of ranks that all stand still."""

from dataclasses import replace
from typing import Any

import pytest

from parallel.failures import Failure, guard
from parallel.launch import Identity
from parallel.local_ranks import fork_ranks
from program.errors import SharedFault
from training.config.small_sections import FaultConfig
from training.watchdog import verdict_file
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.node_monitor import Report, ranks_text
from training.watchdog.rank_monitor import RankMonitor, monitored
from training.watchdog.stacks import StackPosition
from training.watchdog.stop_signal import StopSignal
from training.watchdog.verdict import NodeReport, Verdict, decide_verdict, lost

WAITS = StackPosition(waits="all_reduce", at="training/step.py:9 in unite")
LOOPS = StackPosition(waits=None, at="data/loader.py:7 in read")


def rank(number: int, **changes: Any) -> Report:
    """A rank that waits in iteration 12."""
    given = {"iteration": 12, "phase": "step", "beats": 40, "state": "S", "still_s": 31.4, "overdue": True,
             "stand": WAITS}  # fmt: skip
    return Report(rank=number, **(given | changes))


def node(host: str, *ranks: Report, answers: str = "now") -> NodeReport:
    return NodeReport(host=host, ranks=list(ranks), answers=answers)


def verdict(*nodes: NodeReport, world_size: int = 4) -> Verdict:
    return decide_verdict(nodes, "now", world_size, "run/watch", 20.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "X"}, "its process is gone"),
        ({"state": "T"}, "its process is stopped (SIGSTOP), at training/step.py:9 in unite"),
        ({"stand": LOOPS}, "it stands at data/loader.py:7 in read"),
        (
            {"stand": None, "state": "D"},
            "its process (state D, in the kernel: a disk or a driver does not answer) writes",
        ),
        ({"iteration": 11}, "it waits in all_reduce, at training/step.py:9 in unite"),
        ({"beats": 39}, "it waits in all_reduce"),
        ({"phase": "load"}, "it waits in all_reduce"),
    ],
)
def test_the_one_that_differs_is_named(changes: dict[str, Any], words: str) -> None:
    found = verdict(node("n1", rank(0), rank(1)), node("n2", rank(2, **changes), rank(3)))
    assert (found.kind, found.rank, found.host) == ("hang", 2, "n2")
    assert (
        f"rank 2 of 4 on n2 hangs in iteration {found.iteration}, phase {found.phase}, for 31 s: {words}" in found.line
    )
    assert found.line.endswith("; 3 others wait in all_reduce. Stacks of all ranks: run/watch")


def test_what_cannot_go_on_comes_before_what_only_stands_elsewhere() -> None:
    ranks = [rank(0, stand=LOOPS), rank(1, iteration=9), rank(2, state="T"), rank(3, state="X")]
    assert verdict(node("n1", *ranks)).rank == 3
    assert verdict(node("n1", *ranks[:3]), world_size=3).rank == 2
    assert verdict(node("n1", *ranks[:2]), world_size=2).rank == 0


def test_a_silent_node_comes_first() -> None:
    found = verdict(node("n1", rank(0), rank(1, state="T")), node("n2", rank(2), rank(3, iteration=11), answers="old"))
    assert (found.rank, found.host, found.iteration) == (3, "n2", 11)
    assert found.line.startswith("node n2 (ranks 2-3 of 4) does not answer, asked 20 s ago: it is down or cut off;")


def test_ranks_that_never_reported_are_named() -> None:
    found = verdict(node("n1", rank(0, phase="start"), rank(1, phase="start")))
    assert found.line.startswith("ranks 2-3 of 4 never started")


def test_at_the_end_no_rank_is_missing_and_who_does_not_end_is_named() -> None:
    over = {"phase": "ended", "state": "X", "overdue": False}
    found = verdict(node("n1", rank(0, **over), rank(1, phase="ended", stand=LOOPS)))
    assert (found.rank, found.phase) == (1, "ended")


def test_ranks_in_words() -> None:
    assert [ranks_text([3]), ranks_text([0, 1, 2, 7, 9, 10])] == ["rank 3", "ranks 0-2, 7, 9-10"]


def test_one_verdict_a_start(tmp_path: Any) -> None:
    first = Verdict(kind="hang", rank=0, world_size=2, host="n1", iteration=1, phase="step", line="")
    second = replace(first, rank=1)
    assert verdict_file.leave(tmp_path, first)
    assert not verdict_file.leave(tmp_path, second)
    found = verdict_file.read(tmp_path)
    assert found is not None
    assert found.rank == 0
    assert [path.name for path in tmp_path.iterdir()] == [verdict_file.VERDICT]


def test_a_verdict_is_said_where_it_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    own = Verdict(kind="hang", rank=0, world_size=2, host="n1", iteration=1, phase="step", line="")
    assert verdict_file.leave(tmp_path / "file", own)


def test_what_nodes_tell_comes_back_whole(tmp_path: Any) -> None:
    printed = [node("n1", rank(0), rank(1, stand=None)), node("n2", rank(2, stand=LOOPS))]
    for report in printed:
        verdict_file.tell(tmp_path, report)
    assert verdict_file.node_reports(tmp_path) == printed


def failing(error: Exception, number: int) -> tuple[Identity, Failure | None]:
    """A rank of eight in which ``error`` is raised."""
    identity = Identity(rank=number, world_size=8, launcher="srun")

    def run(_: Identity) -> int:
        raise error

    return identity, guard(run, identity)[1]


@pytest.mark.parametrize("host", ["n3", None])
def test_what_all_ranks_find_alike_is_shown_and_left_once(host: str | None, tmp_path: Any) -> None:
    fault = SharedFault("weights of rank 5 differ", rank=5, host=host)
    for number in (1, 0):
        identity, failure = failing(fault, number)
        heartbeat = Heartbeat()
        heartbeat.enter("step", 7)
        shown = RankMonitor(folder=tmp_path, identity=identity, host="n0", heartbeat=heartbeat).settle(failure)
        assert (shown is None) == (number == 1)
    found = verdict_file.read(tmp_path)
    assert found is not None
    assert (found.kind, found.rank, found.host) == ("fault", 5, host or "")
    assert (found.iteration, found.phase, found.line) == (7, "step", "weights of rank 5 differ")


def test_a_verdict_says_the_first_note_of_an_error(tmp_path: Any) -> None:
    error = ZeroDivisionError("mine")
    error.add_note("raised by after_step of your callback wrong:Raises (train.callbacks)")
    error.add_note("more of it")
    identity, failure = failing(error, 2)
    assert RankMonitor(folder=tmp_path, identity=identity, host="n0").settle(failure) is not None
    found = verdict_file.read(tmp_path)
    assert found is not None
    said = "ZeroDivisionError: mine (raised by after_step of your callback wrong:Raises (train.callbacks))"
    assert found.line == said


def test_what_a_forked_rank_found_is_left_with_its_iteration(tmp_path: Any) -> None:
    def run(identity: Identity) -> int:
        with monitored(FaultConfig(), tmp_path / "start-1", identity, StopSignal(), {}, cuda=False) as watching:
            watching.heartbeat.enter("step", 7)
            raise SharedFault("loss nan", rank=1)

    code, failure = fork_ranks(2, run)
    launcher = RankMonitor(folder=tmp_path / "start-1", identity=Identity(), host="n0", launches=True)
    shown = launcher.settle(failure)
    assert shown is not None
    assert (code, shown.text) == (1, "loss nan")
    found = verdict_file.read(tmp_path / "start-1")
    assert found is not None
    assert (found.kind, found.rank, found.host, found.iteration, found.phase) == ("fault", 1, "", 7, "step")


def test_a_node_that_does_not_answer_is_lost_unless_its_ranks_have_ended() -> None:
    nodes = [node("n1", rank(0), rank(1)), node("n2", rank(2), rank(3), answers="old")]
    found = lost(nodes, "now", 4, 20.0)
    assert found is not None
    assert (found.kind, found.host, found.rank) == ("lost", "n2", 2)
    assert lost(nodes[:1], "now", 4, 20.0) is None
    assert lost([nodes[0], node("n2", rank(2, phase="ended"), answers="old")], "now", 4, 20.0) is None
