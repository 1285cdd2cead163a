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
import together
from parallel.launch import Identity
from training.config.small_sections import FaultConfig
from training.watchdog import rank_monitor, starts, verdict_file
from training.watchdog.heartbeat import SUFFIX, Page, memory_folder, remove
from training.watchdog.stop_signal import StopSignal
from training.watchdog.watchdog import ASKED_S, Watchdog
from waiting import until

PROGRAM = Path(__file__).with_name("tiny_ranks.py")
PORT = str(os.getpid())
"""By which ranks of a start find each other, as far as the watchdogs know."""
Start = Callable[..., list[subprocess.Popen[str]]]


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


@contextlib.contextmanager
def starting(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks on ``hosts``; in the end nothing of them may be left, in the process table or in memory."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        what: str, *hosts: str, timeout_s: float = 3.0, port: str = PORT, first_rank: int = 0
    ) -> list[subprocess.Popen[str]]:
        before, size = len(started), str(first_rank + len(hosts))
        for rank, host in enumerate(hosts, first_rank):
            command = [sys.executable, str(PROGRAM), str(rank), size, str(tmp_path), str(timeout_s), what]
            environ = os.environ | {"SLURMD_NODENAME": host, "MASTER_PORT": port, "PYTHONPATH": "."}
            started.append(subprocess.Popen(
                command, cwd=runs.ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            ))  # fmt: skip
        return started[before:]

    try:
        yield begin
    finally:
        for process in started:
            for pid in living(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()
        for page in pages(tmp_path):  # whose watchdogs were killed: the next rank of this user would remove them
            remove(page)


def pages(run_dir: Path) -> list[Path]:
    """Of this run's ranks, in the node's memory."""
    found = []
    for path in memory_folder().glob(f"triplane-{os.getuid()}-*.heartbeat"):
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
    newest = verdict_file.newest(run_dir)
    assert newest is not None
    return json.loads(newest.read_text())  # type: ignore[no-any-return]


def folder(run_dir: Path) -> Path:
    """Of the ranks that ``start`` starts, as long as they have no verdict."""
    environ = {"MASTER_PORT": PORT}
    return starts.folder_of(run_dir, Identity(launcher="torchrun"), os.environ | environ, None)


def scenario_an_endless_loop_is_named_on_whichever_host(start: Start, tmp_path: Path) -> None:
    codes, said = end(start("spin", "n1", "n2", timeout_s=6.0))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert pages(tmp_path) == []
    assert len(said) == 1, said
    assert said[0].startswith("pretrain_gpt.py: rank 1 of 2 on n2 hangs in iteration 5, phase step, for ")
    assert "it stands at tests/training/watchdog/tiny_ranks.py:" in said[0]
    assert "in spin; 1 other waits in all_reduce. Stacks of all ranks: " in said[0]
    found = verdict(tmp_path)
    assert [found[key] for key in ("kind", "rank", "host", "iteration", "phase")] == ["hang", 1, "n2", 5, "step"]
    assert said[0] == f"pretrain_gpt.py: {found['line']}"
    stacks = [next((tmp_path / "watch").glob(f"*/stacks-{host}.txt")).read_text() for host in ("n1", "n2")]
    assert "in all_reduce\n" in stacks[0]
    assert "in spin\n" in stacks[1]


def scenario_a_stopped_rank_is_named_before_those_that_wait_for_it(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n1", "n1")
    assert ranks[1].stdout is not None
    assert ranks[1].stdout.readline() == "waits\n"
    ranks[1].send_signal(signal.SIGSTOP)
    codes, said = end(ranks)
    assert codes == [-signal.SIGKILL] * 3
    assert len(said) == 1, said
    assert "rank 1 of 3 on n1 hangs in iteration 5, phase evaluation, for " in said[0]
    assert "its process is stopped (SIGSTOP); 2 others wait in all_reduce. " in said[0]
    stacks = next((tmp_path / "watch").glob("*/stacks-n1.txt")).read_text()
    assert [stacks.count(f"==== rank {rank} of 3 on n1") for rank in range(3)] == [1, 2, 1]
    assert 'tiny_ranks.py", line ' in stacks.rpartition("==== rank 1 of 3")[2]  # taken when it was to be killed
    assert "no stacks came" not in stacks


def scenario_a_node_that_does_not_answer_is_named(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n2")
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    printed = folder(tmp_path) / "node-n2.json"
    until(lambda: printed.exists() and '"evaluation"' in printed.read_text())
    os.killpg(ranks[1].pid, signal.SIGSTOP)  # rank and watchdog: the node is as good as gone
    _, said = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == -signal.SIGKILL
    assert "node n2 (rank 1 of 2) does not answer, asked " in said
    assert "it is down or cut off; last report: iteration 5, phase evaluation" in said


@pytest.mark.campaign
def scenario_a_killed_rank_is_named_at_once(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n2", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    ranks[1].kill()
    until(lambda: verdict_file.newest(tmp_path))
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


def scenario_a_watchdog_that_is_asked_to_end_behind_its_rank_still_tells(start: Start, tmp_path: Path) -> None:
    """As tools/supervise/loop.sh asks all that a launcher left over, which was killed with its ranks."""
    ranks = start("wait", "n1", "n2", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    until(lambda: [Page(path).watchdog()[2] > 0 for path in pages(tmp_path)] == [True, True])
    (late,) = watchdogs(ranks[1].pid)
    os.kill(late, signal.SIGSTOP)
    ranks[1].kill()
    ranks[1].wait()
    os.kill(late, signal.SIGTERM)
    os.kill(late, signal.SIGCONT)
    until(lambda: verdict_file.newest(tmp_path))
    assert "rank 1 of 2 on n2 ended without a word (SIGKILL" in verdict(tmp_path)["line"]


def scenario_the_first_failure_is_shown_and_its_echo_is_not(start: Start, tmp_path: Path) -> None:
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


@pytest.mark.campaign
def scenario_an_echo_is_shown_where_there_is_no_other_failure(start: Start, tmp_path: Path) -> None:
    ranks = start("mistake", "n1", "n2")
    codes, said = end(ranks)
    assert sorted(codes) == [1, 2]
    assert "pretrain_gpt.py: the recipe is wrong" in said


def scenario_what_heard_sigterm_may_be_killed_without_a_word(start: Start, tmp_path: Path) -> None:
    asked_and_killed(signal.SIGTERM, start, tmp_path)


@pytest.mark.campaign
def scenario_what_heard_sigusr2_may_be_killed_without_a_word(start: Start, tmp_path: Path) -> None:
    asked_and_killed(signal.SIGUSR2, start, tmp_path)


@pytest.mark.campaign
def scenario_what_heard_sigint_may_be_killed_without_a_word(start: Start, tmp_path: Path) -> None:
    asked_and_killed(signal.SIGINT, start, tmp_path)


def asked_and_killed(number: int, start: Start, tmp_path: Path) -> None:
    """Of two ranks that wait."""
    ranks = start("wait", "n1", "n1", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    for process in ranks:
        process.send_signal(number)
    until(lambda: [Page(path).read().asked for path in pages(tmp_path)] == [True, True])
    for process in ranks:
        process.kill()
    assert end(ranks) == ([-signal.SIGKILL] * 2, [])
    assert verdict_file.newest(tmp_path) is None


def scenario_a_slow_run_ends_without_a_word(start: Start, tmp_path: Path) -> None:
    assert end(start("slow", "n1", "n2", timeout_s=10.0)) == ([0, 0], [])
    assert pages(tmp_path) == []
    assert not (tmp_path / "watch").exists()


def scenario_what_an_earlier_start_left_is_no_verdict_on_this_one(start: Start, tmp_path: Path) -> None:
    earlier = folder(tmp_path)
    earlier.mkdir(parents=True)
    old = {"kind": "hang", "rank": 0, "world_size": 2, "host": "n1", "iteration": 9, "phase": "step", "line": "old"}
    for name in ("verdict.json", "judge.json", "stacks-n1.txt"):
        (earlier / name).write_text(json.dumps(old))
    codes, said = end(start("spin", "n1", "n1"))
    assert codes == [-signal.SIGKILL] * 2
    assert len(said) == 1, said
    assert "rank 1 of 2 on n1 hangs in iteration 5" in said[0]
    assert verdict(tmp_path)["iteration"] == 5
    assert json.loads((earlier / "verdict.json").read_text()) == old
    assert (earlier / "stacks-n1.txt").exists()


def scenario_the_verdict_of_a_second_job_on_the_same_folder_ends_only_that_one(start: Start, tmp_path: Path) -> None:
    ranks = start("wait", "n1", "n2", timeout_s=600.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    refused = start("refused", "n9", timeout_s=12.0, port="9", first_rank=1)
    codes, said = end(refused)  # its rank 0 was refused the folder, and has gone
    assert codes == [1]
    assert "Connection closed by peer" in "\n".join(said)
    assert verdict(tmp_path)["kind"] == "echo"
    assert verdict_file.read(folder(tmp_path)) is None
    ranks[1].kill()
    until(lambda: verdict(tmp_path)["kind"] == "killed")
    assert verdict(tmp_path)["host"] == "n2"


def scenario_a_node_that_is_lost_is_named_and_not_who_misses_it(start: Start, tmp_path: Path) -> None:
    ranks = start("lost", "n1", "n2", timeout_s=12.0)
    assert ranks[1].stdout is not None
    ranks[1].stdout.readline()
    until((folder(tmp_path) / "node-n2.json").exists)
    os.killpg(ranks[1].pid, signal.SIGSTOP)  # so that its watchdog says nothing
    os.killpg(ranks[1].pid, signal.SIGKILL)
    (tmp_path / "failed").touch()  # now rank 0 finds its peer gone
    _, said = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert said.startswith("pretrain_gpt.py: node n2 (rank 1 of 2) does not answer, asked "), said
    found = verdict(tmp_path)
    assert [found[key] for key in ("kind", "host", "rank")] == ["lost", "n2", 1]


def scenario_the_watchdog_goes_with_its_rank_and_takes_the_pages_along(start: Start, tmp_path: Path) -> None:
    ranks = start("slow", "n1", "n1", timeout_s=600.0)
    until(lambda: [Page(path).watchdog()[2] > 0 for path in pages(tmp_path)] == [True, True])
    beside = watchdogs(ranks[1].pid)
    assert b"training.watchdog.watchdog" in Path(f"/proc/{beside[0]}/cmdline").read_bytes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(beside[0], number)
    time.sleep(0.5)
    assert watchdogs(ranks[1].pid) == beside
    assert end(ranks) == ([0, 0], [])
    assert pages(tmp_path) == []


def test_the_page_of_a_rank_that_was_killed_before_its_watchdog_looked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank of the node begins while that watchdog is still being loaded; its word is yet to come."""
    monkeypatch.setattr(rank_monitor, "memory_folder", lambda: tmp_path)
    with subprocess.Popen(["sleep", "60"]) as loading, subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setattr(rank_monitor.watchdog, "start", lambda _: loading)
        monkeypatch.setattr(rank_monitor.os, "getpid", lambda: rank.pid)
        with rank_monitor.monitored(FaultConfig(), tmp_path, Identity(), StopSignal(), {}, cuda=False):
            (page,) = tmp_path.glob(f"*{SUFFIX}")
        monkeypatch.undo()
        monkeypatch.setattr(rank_monitor, "memory_folder", lambda: tmp_path)
        rank.kill()
        rank.wait()
        rank_monitor._sweep()
        assert page.exists()
        loading.kill()
    rank_monitor._sweep()
    assert not page.exists()


def test_a_rank_that_lived_on_after_its_group_was_asked_to_stop_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was blocked, and so could not note the request; SIGKILL came when its time was over."""
    monkeypatch.setattr(rank_monitor, "memory_folder", lambda: tmp_path)
    with subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setattr(rank_monitor.os, "getpid", lambda: rank.pid)
        heartbeat = rank_monitor._begin(FaultConfig(), tmp_path / "start", Identity(), {}, cuda=False)
        monkeypatch.undo()
        assert heartbeat.path is not None and heartbeat.watchdog is not None
        heartbeat.watchdog.kill()
        heartbeat.watchdog.wait()
        beside = Watchdog(Page(heartbeat.path))
        rank.kill()
    beside.asked_s = time.monotonic() - ASKED_S - 1
    beside.tell_of_sudden_death()
    assert verdict_file.read(tmp_path / "start") is None
    beside.asked_s = time.monotonic()
    beside.tell_of_sudden_death()
    assert verdict_file.read(tmp_path / "start") is not None


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> together.Played:
    """Five at once: they wait for timeouts, and their ranks are small."""

    def run(name: str, scenario: Callable[[Start, Path], None]) -> None:
        folder = tmp_path_factory.mktemp(name)
        with starting(folder) as start:
            scenario(start, folder)

    return together.play(request, 5, run)


@pytest.mark.parametrize("name", together.names(globals()))
def test_watchdogs(name: str, played: together.Played) -> None:
    played[name].result()
