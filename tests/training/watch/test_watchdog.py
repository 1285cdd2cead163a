"""What watchdogs say and do, with real processes that are looped, stopped, killed or suspended. No torch: quick."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runs
from training.watch.pulse import Page, memory_folder, remove

PROGRAM = Path(__file__).with_name("tiny_ranks.py")
Start = Callable[..., list[subprocess.Popen[str]]]


def until(condition: Callable[[], object]) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(session: int) -> list[int]:
    """What runs in the session that a rank began: itself and its watchdog."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def watchdogs(of: int) -> list[int]:
    """The watchdog of that process."""
    return [int(pid) for pid in Path(f"/proc/{of}/task/{of}/children").read_text().split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks on ``hosts``; in the end nothing of them may be left, in the process table or in memory."""
    started: list[subprocess.Popen[str]] = []

    def begin(what: str, *hosts: str, timeout_s: float = 3.0) -> list[subprocess.Popen[str]]:
        for rank, host in enumerate(hosts):
            command = [sys.executable, str(PROGRAM), str(rank), str(len(hosts)), str(tmp_path), str(timeout_s), what]
            environ = os.environ | {"SLURMD_NODENAME": host, "MASTER_PORT": str(os.getpid()), "PYTHONPATH": "."}
            started.append(subprocess.Popen(
                command, cwd=runs.ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            ))  # fmt: skip
        return started

    yield begin
    for process in started:
        for pid in living(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    for page in pages(tmp_path):  # whose watchdogs were killed: the next rank of this user would remove them
        remove(page)


def pages(run_dir: Path) -> list[Path]:
    """Of this run's ranks, in the node's memory."""
    found = []
    for path in memory_folder().glob(f"triplane-{os.getuid()}-*.pulse"):
        with contextlib.suppress(OSError):
            if str(run_dir).encode() in path.read_bytes():
                found.append(path)
    return found


def end(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes, and all lines that the ranks and their watchdogs have printed to stderr."""
    said = [process.communicate(timeout=60)[1] for process in ranks]
    for process in ranks:
        until(lambda session=process.pid: not living(session))
    return [process.returncode for process in ranks], "".join(said).splitlines()


def verdict(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "watch/verdict.json").read_text())  # type: ignore[no-any-return]


def test_an_endless_loop_is_named_on_whichever_host(start: Start, tmp_path: Path) -> None:
    codes, said = end(start("spin", "n1", "n2"))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert pages(tmp_path) == []
    assert len(said) == 1, said
    assert said[0].startswith("pretrain_gpt.py: rank 1 of 2 on n2 hangs in iteration 5, phase step, for ")
    assert "it stands at tests/training/watch/tiny_ranks.py:" in said[0]
    assert "in spin; 1 other waits in all_reduce. Stacks of all ranks: " in said[0]
    found = verdict(tmp_path)
    assert [found[key] for key in ("kind", "rank", "host", "iteration", "phase")] == ["hang", 1, "n2", 5, "step"]
    assert said[0] == f"pretrain_gpt.py: {found['line']}"
    assert "in all_reduce\n" in (tmp_path / "watch/stacks-n1.txt").read_text()
    assert "in spin\n" in (tmp_path / "watch/stacks-n2.txt").read_text()


def test_a_stopped_rank_is_named_before_those_that_wait_for_it(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n1", "n1")
    assert ranks[1].stdout is not None
    assert ranks[1].stdout.readline() == "waits\n"
    ranks[1].send_signal(signal.SIGSTOP)
    codes, said = end(ranks)
    assert codes == [-signal.SIGKILL] * 3
    assert len(said) == 1, said
    assert "rank 1 of 3 on n1 hangs in iteration 5, phase evaluation, for " in said[0]
    assert "its process is stopped (SIGSTOP), at tests/training/watch/tiny_ranks.py:" in said[0]
    assert "; 2 others wait in all_reduce. " in said[0]
    stacks = (tmp_path / "watch/stacks-n1.txt").read_text()
    assert [f"==== rank {rank} of 3 on n1" in stacks for rank in range(3)] == [True] * 3
    assert "no stacks came" not in stacks


def test_a_node_that_does_not_answer_is_named(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n2")
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    told = tmp_path / "watch/node-n2.json"
    until(lambda: told.exists() and '"evaluation"' in told.read_text())
    os.killpg(ranks[1].pid, signal.SIGSTOP)  # rank and watchdog: the node is as good as gone
    _, said = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == -signal.SIGKILL
    assert "node n2 (rank 1 of 2) does not answer, asked " in said
    assert "it is down or cut off; last heard of in iteration 5, phase evaluation" in said


def test_a_killed_rank_is_named_at_once(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n2", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    ranks[1].kill()
    until((tmp_path / "watch/verdict.json").exists)
    found = verdict(tmp_path)
    assert [found[key] for key in ("kind", "rank", "host", "iteration", "phase")] == [
        "killed",
        1,
        "n2",
        5,
        "evaluation",
    ]
    codes, said = end(ranks)  # rank 0 waits for ever: its watchdog ends it after a while
    assert codes == [-signal.SIGKILL] * 2
    assert len(said) == 1, said
    assert said[0].startswith("pretrain_gpt.py: rank 1 of 2 on n2 ")
    assert said[0].endswith(" in iteration 5, phase evaluation")


def test_the_first_failure_is_shown_and_its_echo_is_not(start: Start, tmp_path: Path) -> None:
    codes, said = end(start("raise", "n1", "n2"))
    assert codes == [1, 1]
    text = "\n".join(said)
    assert text.count("Traceback") == 1
    assert "ValueError: a wrong number\nrank 1 of 2 on " in text
    found = verdict(tmp_path)
    assert [found[key] for key in ("kind", "rank", "iteration", "line")] == [
        "exception",
        1,
        5,
        "ValueError: a wrong number",
    ]


def test_an_echo_is_shown_where_nobody_has_a_word_of_his_own(start: Start) -> None:
    ranks = start("mistake", "n1", "n2")
    codes, said = end(ranks)
    assert sorted(codes) == [1, 2]
    assert "pretrain_gpt.py: the recipe is wrong" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_what_was_asked_to_stop_may_be_killed_without_a_word(number: int, start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n1", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    for process in ranks:
        process.send_signal(number)
    time.sleep(0.5)
    for process in ranks:
        process.kill()
    assert end(ranks) == ([-signal.SIGKILL] * 2, [])
    assert not (tmp_path / "watch/verdict.json").exists()


def test_a_slow_run_ends_without_a_word(start: Start, tmp_path: Path) -> None:
    assert end(start("slow", "n1", "n2", timeout_s=4.0)) == ([0, 0], [])
    assert pages(tmp_path) == []
    assert not (tmp_path / "watch").exists()


def test_what_an_earlier_attempt_left_is_no_verdict_on_this_one(start: Start, tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    old = {"kind": "hang", "rank": 0, "world_size": 2, "host": "n1", "iteration": 9, "phase": "step", "line": "old"}
    for name in ("verdict.json", "judge.json"):
        (tmp_path / "watch" / name).write_text(json.dumps(old))
    codes, said = end(start("spin", "n1", "n1"))
    assert codes == [-signal.SIGKILL] * 2
    assert len(said) == 1, said
    assert "rank 1 of 2 on n1 hangs in iteration 5" in said[0]
    assert verdict(tmp_path)["iteration"] == 5


def test_a_suspended_run_is_not_taken_for_hung(start: Start, tmp_path: Path) -> None:
    ranks = start("slow", "n1", "n1", timeout_s=4.0)
    until((tmp_path / "meeting-3").exists)  # from the second iteration on, the step's timeout holds
    for process in ranks:
        os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(6.0)
    for process in ranks:
        os.killpg(process.pid, signal.SIGCONT)
    assert end(ranks) == ([0, 0], [])


def test_the_watchdog_goes_with_its_rank_and_takes_the_pages_along(start: Start, tmp_path: Path) -> None:
    ranks = start("slow", "n1", "n1", timeout_s=600.0)
    until(lambda: [Page(path).watchdog()[2] > 0 for path in pages(tmp_path)] == [True, True])
    beside = watchdogs(ranks[1].pid)
    assert b"training.watch.watchdog" in Path(f"/proc/{beside[0]}/cmdline").read_bytes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(beside[0], number)
    time.sleep(0.5)
    assert watchdogs(ranks[1].pid) == beside
    assert end(ranks) == ([0, 0], [])
    assert pages(tmp_path) == []
