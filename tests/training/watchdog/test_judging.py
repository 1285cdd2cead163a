"""Watchdogs of several nodes in this process, moved by hand; their ranks are real processes that only sleep."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import runs
from training.watchdog import pace, verdict_file
from training.watchdog.heartbeat import Page
from training.watchdog.node_monitor import NodeMonitor
from training.watchdog.watchdog import Watchdog

PROGRAM = Path(__file__).with_name("sleeper.py")
TIMEOUT_S = 100.0
Sleep = Callable[..., list[Page]]


@pytest.fixture
def sleep(tmp_path: Path) -> Iterator[Sleep]:
    """Starts ranks, one for each host named; in the end they are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*hosts: str, mute: int = 0) -> list[Page]:
        paths = []
        for rank, host in enumerate(hosts):
            about = {"rank": rank, "world_size": len(hosts), "host": host, "folder": str(tmp_path / "watch/start-1"),
                     "told_by_launcher": True, "step_timeout_s": TIMEOUT_S, "start_timeout_s": TIMEOUT_S}  # fmt: skip
            paths.append(tmp_path / f"{host}-{rank}.heartbeat")
            started.append(subprocess.Popen(
                [sys.executable, str(PROGRAM), str(paths[-1]), json.dumps(about), str(mute)], cwd=runs.ROOT, text=True,
                stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."},
            ))  # fmt: skip
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "sleeps\n"
        return [Page(path) for path in paths]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def overdue(*watchdogs: Watchdog) -> None:
    """From now on their ranks have stood still for too long."""
    for watchdog in watchdogs:
        watchdog.own.still_s = 10 * TIMEOUT_S


def test_of_two_nodes_that_ask_at_once_one_judges_and_none_is_called_silent(sleep: Sleep, tmp_path: Path) -> None:
    folder = tmp_path / "watch/start-1"
    first, second = (Watchdog(page) for page in sleep("n1", "n2"))
    overdue(first, second)
    first.lead()
    verdict_file.drop(folder)  # as if the second had not seen the first one's call
    second.lead()
    first.lead()
    first.called_s -= 10 * TIMEOUT_S  # the first one has waited for long
    first.lead()
    assert verdict_file.read(folder) is None
    second.lead()
    verdict = verdict_file.read(folder)
    assert verdict is not None
    assert " hangs in iteration 5, phase step" in verdict.line


def test_who_comes_second_answers_the_first(sleep: Sleep, tmp_path: Path) -> None:
    first, second = (Watchdog(page) for page in sleep("n1", "n2"))
    overdue(first, second)
    first.lead()
    second.lead()
    assert (second.judging, second.answered) == ("", first.judging)


def test_as_long_as_a_rank_moves_nodes_are_not_asked_again_and_again(sleep: Sleep, tmp_path: Path) -> None:
    folder = tmp_path / "watch/start-1"
    first, second = (Watchdog(page) for page in sleep("n1", "n2"))
    overdue(first)
    first.lead()
    assert verdict_file.asked(folder)
    assert (folder / "stacks-n1.txt").stat().st_size > 0
    assert first.own.stacks_file().stat().st_size == 0  # it lies in memory, and another run of the stacks follows
    second.lead()
    first.lead()  # hears of the second, which moves
    assert not verdict_file.asked(folder)
    first.lead()
    assert not verdict_file.asked(folder)
    first.called_s -= TIMEOUT_S / 3
    first.lead()
    assert verdict_file.asked(folder)


@pytest.mark.campaign
def test_ranks_that_write_no_stacks_are_waited_for_together(sleep: Sleep) -> None:
    pages = sleep(*["n1"] * 8, mute=1)
    node = NodeMonitor(pages[0], 0.0)
    node.poll(1.0)
    before = time.monotonic()
    assert node.take_stacks().count("no stacks came") == 8
    assert time.monotonic() - before < 15  # one after the other: 24 s


def test_a_node_that_was_suspended_is_not_taken_for_hung(sleep: Sleep) -> None:
    node = NodeMonitor(sleep("n1")[0], 0.0)
    node.poll(0.25)
    node.poll(1000.0)
    assert not node.stands_still
    for now_s in range(1001, 1102):
        node.poll(float(now_s))
    assert node.stands_still


def test_many_nodes_speak_less_often_and_have_longer_to_answer() -> None:
    paces = [(pace.beat_s(600.0, nodes), pace.answer_s(600.0, nodes)) for nodes in (1, 128, 256, 2000)]
    assert paces == [(5.0, 20.0), (5.0, 20.0), (10.0, 25.0), (30.0, 75.0)]
    assert (pace.beat_s(float("inf"), 1), pace.answer_s(float("inf"), 1)) == (5.0, 20.0)
    for timeout_s in (16.0, 60.0, 600.0):
        for nodes in (1, 256, 2000):
            assert 2 * pace.beat_s(timeout_s, nodes) <= pace.answer_s(timeout_s, nodes) <= timeout_s / 4
