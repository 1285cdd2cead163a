"""Started again until done: real processes and signals. What runs is a stand-in that commits checkpoints in a moment.

tests/tools/test_supervise_runs.py does the same with real runs, in its campaign.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaign import param
from tools.supervise import attempts
from training.watchdog.process import lives
from waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
LOOP = str(ROOT / "tools/supervise/loop.sh")
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
from training.checkpoint import folders
from training.watchdog.exit_code_file import exit_code_file

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
    (run / "pid.new").write_text(str(os.getpid()))
    (run / "pid.new").rename(run / "pid")
    while True:
        time.sleep(0.01)
if word == "mistake":
    with exit_code_file(os.environ):
        sys.exit(2)
sys.exit(int(word) if word.isdigit() else 0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a loop around a stand-in, attempt by attempt as the words say; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    (tmp_path / "run").mkdir()

    def begin(*words: str, command: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        ours = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run")}
        started.append(subprocess.Popen(
            [LOOP, *command, sys.executable, str(script), str(tmp_path / "run"), *words], cwd=ROOT, text=True,
            env=os.environ | ours | {"BACKOFF_S": "0", "MAX_ATTEMPTS": "3"} | environ, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        ))  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


SHELL = ("sh", "-c", '"$@"; exit 1', "sh")
"""Stands for a launcher that hides exit codes, and does not wait for its ranks when it is ended."""


@pytest.mark.parametrize(
    ("words", "launcher", "code", "attempts", "says"),
    [
        (["3"], (), 3, 2, "2 failures in a row without a new checkpoint: not started again"),
        (["2", "done"], (), 2, 1, "bad input"),
        (["mistake", "done"], SHELL, 2, 1, "bad input"),
        (["0"], (), 0, 1, "did what was asked"),
    ],
)
def test_it_is_started_again_by_the_rule(
    words: list[str], launcher: tuple[str, ...], code: int, attempts: int, says: str,
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path,
) -> None:  # fmt: skip
    """tests/tools/test_supervise_decide.py has the whole rule."""
    supervisor = start(*words, command=launcher, MAX_ATTEMPTS="2")
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == code, said
    assert says in said
    assert len((tmp_path / "run/started").read_text()) == attempts
    assert len((tmp_path / "run/attempts.jsonl").read_text().splitlines()) == attempts


def test_the_pause_doubles_up_to_its_limit(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Through failures, a request, and a new checkpoint, with which pauses and failures begin again."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sleep").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/pauses\n")
    (tmp_path / "bin/sleep").chmod(0o755)
    limits = {"MAX_ATTEMPTS": "4", "BACKOFF_S": "1", "MAX_BACKOFF_S": "3"}
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    supervisor = start("1", "1", "137", "75", "further1", "done", **limits, PATH=path)
    _, said = supervisor.communicate(timeout=120)
    assert (supervisor.returncode, len((tmp_path / "run/started").read_text())) == (0, 6), said
    assert (tmp_path / "pauses").read_text().split() == ["1", "2", "3", "1"]
    assert "which is no failure" in said and "iteration 50; there is a new checkpoint: started again" in said
    assert said.splitlines()[-1].startswith("supervise: done")


@pytest.mark.parametrize(
    ("number", "launcher"),
    [param((signal.SIGTERM, ())), (signal.SIGTERM, SHELL), (signal.SIGINT, ()), (signal.SIGHUP, ())],
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
    assert (tmp_path / "run/heard").read_text() == f"{signal.SIGTERM.value}\n"
    assert not lives(int((tmp_path / "run/pid").read_text()), None)
    assert [one.attempt.exit_code for one in attempts.read(tmp_path / "run")[0]] == [75]


@pytest.mark.campaign
def test_an_old_marker_is_not_the_first_attempts(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """A finished run that is made longer, and whose first attempt dies before it takes the marker away."""
    (tmp_path / "run/done").write_text("")
    supervisor = start("1", "done")
    _, said = supervisor.communicate(timeout=120)
    assert (supervisor.returncode, (tmp_path / "run/started").read_text()) == (0, "xx"), said


@pytest.mark.campaign
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


@pytest.mark.campaign
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
    supervisor = start("1", BACKOFF_S="600")
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


@pytest.mark.campaign
def test_orphans_are_ended_before_the_next_attempt(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """As the ranks of a torchrun that was killed: their parent is gone and they have sessions of their own."""
    orphan = 'setsid "$1" "$2" "$3" wait & while [ ! -e "$3/pid" ]; do :; done; kill -9 $$'
    supervisor = start("done", command=("sh", "-c", f'if [ -e "$3/pid" ]; then exec "$@"; else {orphan}; fi', "sh"))
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, said
    pid = int((tmp_path / "run/pid").read_text())
    assert f"process {pid} was left over: SIGTERM" in said
    assert "stopped on request with a checkpoint of iteration 1" in said  # the orphan has saved
    assert not lives(pid, None)


@pytest.mark.parametrize(
    ("command", "environ", "says"),
    [
        (["true"], {"MAX_ATTEMPTS": "many"}, "MAX_ATTEMPTS: expected a whole number, found 'many'"),
        ([], {}, "no command. Usage:"),
        (["sleep", "1"], {}, "no pretrain_gpt.py in the command 'sleep 1': give the run's folder in RUN_DIR"),
        (["python", "pretrain_gpt.py", "no.toml"], {}, "no.toml: no such recipe."),
        (["python", "pretrain_gpt.py", "--train.trian_iters", "3"], {}, "unknown flag --train.trian_iters."),
        (["no-such-command"], {"RUN_DIR": "x"}, "no-such-command cannot be started: no such program"),
    ],
)
def test_mistakes_are_told_at_once(command: list[str], environ: dict[str, str], says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [LOOP, *command], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHON": sys.executable} | environ, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
