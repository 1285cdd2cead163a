"""Asked to stop, a run saves and ends; it goes on as if nothing had been. Real processes and signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import programs
import runs
from campaign import param
from data.prepared import Prepared
from parallel.failures import STOPPED
from programs import Program
from training.checkpoint import folders
from training.metrics.jsonl import read_jsonl
from training.watchdog.stop_signal import REPEAT_S

FLAGS = ("--train.train_iters", "2000", "--log.log_interval", "1", "--train.eval_interval", "None",
         "--train.micro_batch_size", "2")  # fmt: skip


def until(condition: Callable[[], object], run: Program | subprocess.Popen[str]) -> None:
    """Wait while the run goes on."""
    while not condition():
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Program]]:
    """Starts ``pretrain_gpt.py`` in ``run``; what still runs in the end is killed."""
    started: list[Program] = []

    def begin(*flags: str) -> Program:
        arguments = [str(runs.DEBUG), "--run_dir", str(tmp_path / "run"), *FLAGS, "--data.cache_dir", str(cache_dir),
                     "--log.tensorboard", "False", "--log.report", "False", *flags]  # fmt: skip
        started.append(Program(arguments, tmp_path / f"program-{len(started)}"))
        return started[-1]

    yield begin
    for run in started:
        run.end()


@pytest.mark.parametrize(
    ("nproc", "sent"),
    [
        param(("2", [signal.SIGTERM])),
        param(("2", [signal.SIGUSR2, signal.SIGUSR2])),
        param(("1", [signal.SIGINT])),
        ("2", [signal.SIGUSR1, signal.SIGHUP]),
    ],  # USR1 asks a rank for its stacks, and a launcher for nothing
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_unchanged(
    nproc: str, sent: list[signal.Signals], start: Callable[..., Program], prepared: Prepared,
    tmp_path: Path,
) -> None:  # fmt: skip
    run_dir, metrics = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    run = start("--nproc", nproc)
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, run)
    for number in sent:
        run.send_signal(number)
    printed, said = run.communicate()
    assert run.returncode == STOPPED, said
    assert "Traceback" not in said
    newest = folders.latest(run_dir / "checkpoints")
    assert newest is not None
    saved = folders.iteration_of(newest) or 0
    assert f"asked to stop: a checkpoint of iteration {saved}, then the end" in printed
    assert f"stopped on request at iteration {saved}, saved; the same command continues {run_dir}" in printed
    assert (run_dir / "requeue").read_text() == f"{saved}\n"
    assert not (run_dir / "done").exists()
    assert not (run_dir / "owner.json").exists()
    if sent[0] == signal.SIGTERM:
        until_iteration = ("--train.exit_interval", str(saved + 2))
        straight = runs.train(prepared, runs.configuration(tmp_path / "straight", *FLAGS, *until_iteration), 2)
        runs.train(prepared, runs.configuration(run_dir, *FLAGS, *until_iteration), 2)
        assert runs.losses(read_jsonl(metrics)) == runs.losses(straight)
        assert not (run_dir / "requeue").exists()


def test_under_nohup_a_terminal_that_closes_stops_nothing(
    start: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "ENDED", [number for number in programs.ENDED if number != signal.SIGHUP])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the program is forked, and inherits it
    run = start("--train.train_iters", "2")
    signal.signal(signal.SIGHUP, before)
    until((tmp_path / "run/logs").exists, run)
    run.send_signal(signal.SIGHUP)
    printed, said = run.communicate()
    assert run.returncode == 0, said
    assert "done at iteration 2" in printed


def test_before_training_there_is_nothing_to_save(tmp_path: Path, cache_dir: Path) -> None:
    command = [sys.executable, "pretrain_gpt.py", str(runs.DEBUG), "--run_dir", str(tmp_path / "run"), "--nproc", "2",
               *FLAGS, "--data.cache_dir", str(cache_dir)]  # fmt: skip
    run = subprocess.Popen(command, cwd=runs.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until((tmp_path / "run/logs").exists, run)  # its data is ready, torch is being imported
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate()
    assert run.returncode == STOPPED, said
    assert said == "pretrain_gpt.py: stopped by SIGTERM before training began: there is nothing to save\n"
    assert not (tmp_path / "run/owner.json").exists()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_second_ctrl_c_does_not_wait(start: Callable[..., Program], tmp_path: Path) -> None:
    run = start("--nproc", "2")
    until((tmp_path / "run/metrics.jsonl").exists, run)
    ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # ranks that can neither save nor end
    run.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    _, said = run.communicate()
    assert run.returncode == 130
    assert "ended by SIGINT" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


HEAR = """
import sys
from training.watchdog.stop_signal import StopSignal
now = [0.0]
request = StopSignal(lambda: now[0])
request.training = True
for word in sys.argv[1:]:
    number, at = map(float, word.split("@"))
    now[0] = at
    request.hear(int(number))
print("goes on")
"""


@pytest.mark.parametrize(
    ("heard", "code"),
    [("12@0 12@1", 0), ("12@0 15@1 15@2", 0), (f"15@0 15@{REPEAT_S + 1}", 143), ("15@0 2@0", 130)],
)
def test_what_comes_soon_after_says_nothing_new(heard: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", HEAR, *heard.split()], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert (done.stdout == "goes on\n") == (code == 0)
