"""Whole runs that hang, and evaluations that are broken off: real processes, real gloo."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import runs
from data.prepared import Prepared
from parallel import failures, launch, local_ranks, output
from programs import Program
from training import train
from training.metrics.jsonl import read_jsonl
from training.parts.run import PreparedRun
from training.watchdog import verdict_file
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal

FLAGS = ("--train.train_iters", "5000", "--train.eval_interval", "None",
         "--log.tensorboard", "False", "--log.report", "False",
         "--model.shape", "gpt2_tiny", "--log.log_interval", "1")  # fmt: skip
START_S = 120.0


@pytest.fixture
def start(tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Program]]:
    """Starts ``pretrain_gpt.py``; what still runs in the end is killed."""
    started: list[Program] = []

    def begin(*flags: str, **environ: str) -> Program:
        arguments = [str(runs.DEBUG), "--run_dir", str(tmp_path / "run"), *FLAGS, "--data.cache_dir", str(cache_dir),
                     *flags]  # fmt: skip
        started.append(Program(arguments, tmp_path / f"program-{len(started)}", environ))
        return started[-1]

    yield begin
    for run in started:
        run.end()


def until_it_trains(run: Program, run_dir: Path) -> None:
    """Two iterations are done."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + START_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.campaign
def test_a_stopped_rank_is_named_and_all_end(start: Callable[..., Program], prepared: Prepared, tmp_path: Path) -> None:
    run = start("--nproc", "2", "--fault.step_timeout_s", "6")
    until_it_trains(run, tmp_path / "run")
    ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    os.kill(ranks[1], signal.SIGSTOP)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert len(said.splitlines()) == 1, said
    verdict = verdict_file.newest(tmp_path / "run")
    assert verdict is not None
    found = json.loads(verdict.read_text())
    assert said == f"pretrain_gpt.py: {found['line']}\n"
    assert f"rank 1 of 2 on {os.uname().nodename} hangs in iteration {found['iteration']}, phase step, for " in said
    assert "its process is stopped (SIGSTOP)" in said
    assert "; 1 other waits in " in said
    assert found["iteration"] >= 2  # rank 0 has written iteration 2; rank 1 may be a moment behind
    stacks = next(verdict.parent.glob("stacks-*.txt")).read_text()
    assert [f"==== rank {rank} of 2" in stacks for rank in range(2)] == [True, True]
    assert stacks.count("training/loop.py") == 2  # wherever in an iteration they were


@pytest.mark.campaign
def test_a_killed_rank_is_named_once_under_a_launcher_per_rank(
    start: Callable[..., Program], prepared: Prepared, tmp_path: Path
) -> None:
    with local_ranks.socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    ranks = [start(RANK=str(rank), SLURMD_NODENAME=f"n{rank}", **together) for rank in range(2)]
    until_it_trains(ranks[0], tmp_path / "run")
    ranks[1].kill()
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert said[0] == ""
    assert len(said[1].splitlines()) == 1, said
    assert said[1].startswith("pretrain_gpt.py: rank 1 of 2 on n1 ")
    assert "in iteration " in said[1]
    assert ", phase step" in said[1]


def test_a_local_ranks_exception_is_told_with_its_iteration(
    start: Callable[..., Program], prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of local ranks tells it, which takes no step itself."""
    real, taken = train.train_step, []

    def third_fails(*arguments: Any, **options: Any) -> Any:
        taken.append(1)
        if len(taken) == 3 and dist.get_rank() == 1:
            raise ValueError("a wrong number")
        return real(*arguments, **options)

    monkeypatch.setattr(train, "train_step", third_fails)  # the program is forked, and has it, too
    run = start("--nproc", "2")
    _, said = run.communicate()
    assert run.returncode == 1
    assert "ValueError: a wrong number\nrank 1 of 2 on " in said
    verdict = verdict_file.newest(tmp_path / "run")
    assert verdict is not None
    found = json.loads(verdict.read_text())
    values = [found[key] for key in ("kind", "rank", "iteration", "phase", "line")]
    assert values == ["exception", 1, 3, "step", "ValueError: a wrong number"]


class AskedWhileEvaluating(Heartbeat):
    """Asks rank 1 to stop as soon as it evaluates."""

    def __init__(self, request: StopSignal) -> None:
        super().__init__()
        self.request = request

    def enter(self, phase: str, iteration: int | None = None) -> None:
        super().enter(phase, iteration)
        if phase == "evaluation":
            self.request.hear(signal.SIGUSR2)


@pytest.mark.campaign
def test_an_evaluation_is_broken_off_where_one_rank_was_asked_to_stop(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--train.eval_interval", "2", "--train.eval_iters", "100000", "--train.train_iters", "5")
    config = runs.configuration(tmp_path, *flags)
    output.make_run_dir(tmp_path)
    console = tmp_path / "console"

    def rank(identity: launch.Identity) -> int:
        request = StopSignal()
        heartbeat = AskedWhileEvaluating(request) if identity.rank == 1 else None
        with output.own_output(tmp_path / "logs", identity, every_rank=False), console.open("ab") as file:
            console_fd = file.fileno() if identity.rank == 0 else None
            ready = PreparedRun(config=config, prepared=prepared, device="cpu", run_dir=tmp_path, stop=request)
            return train.train(ready, identity, heartbeat, console_fd)

    code, failure = local_ranks.fork_ranks(2, rank)
    assert failure is None, failure.text
    assert code == failures.STOPPED
    printed = console.read_text()
    assert "asked to stop: the evaluation after iteration 2 is broken off" in printed
    assert "stopped on request at iteration 3, saved" in printed
    assert not [line for line in read_jsonl(tmp_path / "metrics.jsonl") if "validation_loss" in line]
    more = runs.configuration(tmp_path, *flags[:2], "--train.eval_iters", "2", *flags[4:])
    lines = runs.train(prepared, more, 2)
    assert [line["iteration"] for line in lines if "validation_loss" in line] == [4, 5]
