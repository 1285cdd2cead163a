"""Started again until done: real processes and signals. What runs is a stand-in that commits checkpoints in a moment.

tests/tools/test_supervise_runs.py does the same with real runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.supervise.__main__ import run_dir_of
from tools.supervise.notice import Notice
from training.watchdog.process import lives
from waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
from training.checkpoint import folders

run, what = Path(sys.argv[1]), sys.argv[2:]

def commit(iteration):
    folder = folders.checkpoints(run) / folders.name_of(iteration)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / folders.MANIFEST).write_text("{}")
    folders.point_to(folder)

def asked(number, frame):
    with (run / "heard").open("a") as heard:
        heard.write(f"{number}\\n")
    if (run / "stubborn").exists():
        return
    newest = folders.latest(folders.checkpoints(run))
    commit(1 + (folders.iteration_of(newest) if newest else 0))
    (run / "requeue").write_text("")
    sys.exit(75)

run.mkdir(exist_ok=True)
attempt = len((run / "started").read_text()) if (run / "started").exists() else 0
word = what[min(attempt, len(what) - 1)]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, asked)
(run / "requeue").unlink(missing_ok=True)
(run / "started").open("a").write("x")
if word.startswith("further"):
    commit(10 * (attempt + 1))
    sys.exit(int(word[7:]))
if word == "done":
    (run / "done").write_text("")
if word == "wait":
    (run / "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)
sys.exit(int(word) if word.isdigit() else 0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a supervisor of a stand-in, attempt by attempt as the words say; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    (tmp_path / "run").mkdir()

    def begin(*words: str, flags: tuple[str, ...] = (), command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        ours = ["--run_dir", str(tmp_path / "run"), "--backoff_s", "0.1", "--max_attempts", "3", *flags]
        theirs = [*command, sys.executable, str(script), str(tmp_path / "run"), *words]
        started.append(subprocess.Popen(
            [sys.executable, "-m", "tools.supervise", *ours, "--", *theirs], cwd=ROOT, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup has it ignored
        ))  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("words", "code", "attempts", "says"),
    [
        (["1", "137", "done"], 0, 3, "attempt 3: done"),
        (["3"], 3, 3, "3 failures in a row without a new checkpoint: not started again"),
        (["1", "1", "further1", "1", "1", "done"], 0, 6, "iteration 30; there is a new checkpoint: started again"),
        (["1", "2", "done"], 2, 2, "bad input"),
        (["75", "75", "75", "75", "done"], 0, 5, "which is no failure"),
        (["0"], 0, 1, "did what was asked"),
    ],
)
def test_it_is_started_again_by_the_rule(
    words: list[str], code: int, attempts: int, says: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    supervisor = start(*words)
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == code, said
    assert says in said
    assert len((tmp_path / "run/started").read_text()) == attempts
    assert len((tmp_path / "run/attempts.jsonl").read_text().splitlines()) == attempts


def test_the_pause_doubles_up_to_its_limit(start: Callable[..., subprocess.Popen[str]]) -> None:
    flags = ("--max_attempts", "6", "--backoff_s", "0.01", "--max_backoff_s", "0.05")
    _, said = start("1", "1", "1", "1", "further1", "1", "done", flags=flags).communicate(timeout=120)
    pauses = [line.rpartition(" in ")[2] for line in said.splitlines() if "started again" in line]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s", "0.05 s", "0.01 s", "0.01 s"]


SHELL = ("sh", "-c", '"$@"; exit 1', "sh")
"""Stands for a launcher that hides exit codes, and does not wait for its ranks when it is ended."""


@pytest.mark.parametrize(
    ("number", "launcher"),
    [(signal.SIGTERM, ()), (signal.SIGTERM, SHELL), (signal.SIGINT, ()), (signal.SIGHUP, ())],
    ids=["TERM", "TERM by a launcher", "INT", "HUP"],
)
def test_a_signal_ends_it_for_good(
    number: signal.Signals, launcher: tuple[str, ...], start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    supervisor = start("wait", command=launcher)
    until((tmp_path / "run/pid").exists)
    supervisor.send_signal(number)
    if number != signal.SIGINT:
        supervisor.send_signal(number)  # as SLURM does
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 75, said
    assert f"ended by {number.name}; the same command continues" in said
    assert (tmp_path / "run/started").read_text() == "x"
    assert (tmp_path / "run/heard").read_text() == f"{15 if number == signal.SIGHUP else number.value}\n"
    assert not lives(int((tmp_path / "run/pid").read_text()), None)


def test_usr2_reaches_who_hears_it_and_the_run_goes_on(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    supervisor = start("wait", "done", command=SHELL)  # a shell would die of it
    until((tmp_path / "run/pid").exists)
    supervisor.send_signal(signal.SIGUSR2)
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, said
    assert "stopped on request with a checkpoint of iteration 1: started again" in said
    assert (tmp_path / "run/heard").read_text() == f"{signal.SIGUSR2.value}\n"


def test_a_second_ctrl_c_does_not_wait(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "run/stubborn").touch()
    supervisor = start("wait")
    until((tmp_path / "run/pid").exists)
    supervisor.send_signal(signal.SIGINT)
    until((tmp_path / "run/heard").exists)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 137, said
    assert not lives(int((tmp_path / "run/pid").read_text()), None)


def test_what_comes_soon_after_says_nothing_new(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "run/stubborn").touch()
    supervisor = start("wait")
    until((tmp_path / "run/pid").exists)
    supervisor.send_signal(signal.SIGTERM)
    until((tmp_path / "run/heard").exists)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        supervisor.send_signal(number)
        time.sleep(0.3)
    assert (tmp_path / "run/heard").read_text() == "15\n"
    assert supervisor.poll() is None
    assert lives(int((tmp_path / "run/pid").read_text()), None)


def test_a_signal_ends_the_pause(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    supervisor = start("1", flags=("--backoff_s", "600", "--max_backoff_s", "600"))
    until((tmp_path / "run/attempts.jsonl").exists)
    time.sleep(0.2)
    supervisor.send_signal(signal.SIGTERM)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert "ended by SIGTERM between two attempts" in said


def test_a_killed_supervisor_leaves_nothing(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    supervisor = start("wait")
    until((tmp_path / "run/pid").exists)
    supervisor.kill()
    until(lambda: not lives(int((tmp_path / "run/pid").read_text()), None))


def test_orphans_are_ended_before_the_next_attempt(tmp_path: Path) -> None:
    """As the ranks of a torchrun that was killed: their parent is gone and they have sessions of their own."""
    code = f"""
import os, signal, sys
from tools.supervise import child
child.WRITERS_S = child.RANKS_S = 0.2
command = ["sh", "-c", "setsid sleep 600 & echo $! > {tmp_path}/pid; kill -9 $$"]
one = child.Child(command, os.environ)
while one.code() is None:
    pass
print(one.code(), one.end_leftovers())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "137 1\n", done.stderr
    assert not lives(int((tmp_path / "pid").read_text()), None)


def test_a_notice_saves_and_nothing_starts_while_it_stands(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    supervisor = start("wait", "done", flags=("--notice_command", f"test -e {notice}", "--notice_interval_s", "0.1"))
    until((tmp_path / "run/pid").exists)
    notice.touch()
    until((tmp_path / "run/attempts.jsonl").exists)
    time.sleep(0.5)
    assert (tmp_path / "run/started").read_text() == "x"
    notice.unlink()
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, said
    assert "notice: this machine is about to be taken away" in said
    assert (tmp_path / "run/heard").read_text() == f"{signal.SIGUSR2.value}\n"
    first = json.loads((tmp_path / "run/attempts.jsonl").read_text().splitlines()[0])
    assert (first["requeue"], first["after"]) == (True, 1)


def test_a_notice_command_that_hangs_or_fails_is_no_notice() -> None:
    now = [0.0]
    for command in ("exec sleep 600", "no-such-command"):
        notice = Notice(command, 5.0, lambda: now[0])
        for _ in range(20):
            now[0] += 3.0
            time.sleep(0.01)
            assert notice.poll() is False
        notice.close()
    assert Notice("", 0.0).poll() is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max_attempts", "0", "--", "true"], "--max_attempts must be at least 1, found 0."),
        (["--run_dir", "x"], "no command. Give it after --"),
        (["--", "sleep", "1"], "no pretrain_gpt.py in the command 'sleep 1': give the run's folder with --run_dir."),
        (["--", "python", "pretrain_gpt.py", "no.toml"], "no.toml: no such recipe."),
        (["--", "python", "pretrain_gpt.py", "--train.trian_iters", "3"], "unknown flag --train.trian_iters."),
        (["--run_dir", "x", "--", "no-such-command"], "no-such-command cannot be started: No such file or directory."),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.supervise", *arguments], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_is_the_commands_own(tmp_path: Path) -> None:
    debug = str(ROOT / "slurm/recipes/debug.toml")
    assert run_dir_of(["torchrun", "--nnodes", "2", "x/pretrain_gpt.py", debug]) == Path("runs/debug")
    assert run_dir_of(["python", "pretrain_gpt.py", debug, "--run_dir", "a/b"]) == Path("a/b")
    assert run_dir_of(["python", "pretrain_gpt.py"]) == Path("runs/run")
