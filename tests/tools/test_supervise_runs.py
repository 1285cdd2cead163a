"""Real runs under tools/supervise/loop.sh: ranks are killed, the run goes on by itself, nothing in it has changed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import runs
from data.prepared import Prepared
from training.metrics.jsonl import read_jsonl

PLAIN = ("--log.tensorboard", "False", "--log.report", "False")
FLAGS = ("--train.train_iters", "12", "--checkpoint.save_interval", "3", "--train.eval_interval", "None",
         "--log.log_interval", "1", "--train.generate_tokens", "0", "--train.micro_batch_size", "8",
         "--parallel.tensor_model_parallel_size", "2", "--parallel.sequence_parallel", "True")  # fmt: skip
Start = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.timeout(480)  # four processes import torch twice; other tests may want the cores, too


@pytest.fixture
def start(tmp_path: Path, cache_dir: Path) -> Iterator[Start]:
    """Starts a loop around ``pretrain_gpt.py`` in ``run``; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*launcher: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*launcher, "pretrain_gpt.py", str(runs.DEBUG), "--run_dir", str(tmp_path / "run"), *FLAGS, *flags,
                   "--data.cache_dir", str(cache_dir), *PLAIN]  # fmt: skip
        started.append(subprocess.Popen(
            [runs.ROOT / "tools/supervise/loop.sh", *command], cwd=runs.ROOT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "BACKOFF_S": "0"},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        ))  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def kill_a_rank_behind_a_checkpoint(supervisor: subprocess.Popen[str], run_dir: Path) -> list[psutil.Process]:
    """SIGKILL for the last rank of this host; the processes that there were."""
    while not (run_dir / "checkpoints/latest").exists():
        assert supervisor.poll() is None, supervisor.communicate()[1]
        time.sleep(0.01)
    there = psutil.Process(supervisor.pid).children(recursive=True)
    launcher = psutil.Process(supervisor.pid).children()[0]
    launcher.children()[-1].send_signal(signal.SIGKILL)
    return there


def check_unchanged(run_dir: Path, prepared: Prepared, tmp_path: Path) -> None:
    """The losses are, to the bit, those of an undisturbed run of forked ranks; the records tell what happened."""
    straight = runs.train(prepared, runs.configuration(tmp_path / "straight", *FLAGS), 2)
    by_iteration = {line["iteration"]: line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line}
    assert [by_iteration[iteration] for iteration in sorted(by_iteration)] == runs.losses(straight)
    assert len(by_iteration) == 12
    records = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [record["again"] for record in records] == sorted((record["again"] for record in records), reverse=True)
    assert records[0]["exit_code"] != 0
    assert records[-1]["done"]


@pytest.mark.campaign
def test_one_host(start: Start, prepared: Prepared, tmp_path: Path) -> None:
    """As docs/without_slurm.md has it: pretrain_gpt.py starts the ranks itself."""
    supervisor = start(sys.executable, flags=("--nproc", "2"))
    there = kill_a_rank_behind_a_checkpoint(supervisor, tmp_path / "run")
    _, said = supervisor.communicate(timeout=400)
    assert supervisor.returncode == 0, said
    assert "supervise: done with a checkpoint of iteration 12" in said
    assert not any(process.is_running() for process in there)
    check_unchanged(tmp_path / "run", prepared, tmp_path)


@pytest.mark.campaign
def test_two_hosts_by_plain_torchrun(start: Start, prepared: Prepared, tmp_path: Path) -> None:
    """docs/without_slurm.md: a loop and a torchrun on each host, here two on one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    hosts = [
        start(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
              "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
        for rank in range(2)
    ]  # fmt: skip
    there = kill_a_rank_behind_a_checkpoint(hosts[1], tmp_path / "run")
    for host in hosts:
        _, said = host.communicate(timeout=400)
        assert host.returncode == 0, said
        assert "supervise: done with a checkpoint of iteration 12" in said
    assert not any(process.is_running() for process in there)
    check_unchanged(tmp_path / "run", prepared, tmp_path)


@pytest.mark.campaign
def test_bad_input_that_torchrun_hides_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    """Two ranks cannot be shared by TP 4: only the ranks know how many they are, and torchrun makes 1 of their 2."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    supervisor = start(sys.executable, *torchrun, flags=("--parallel.tensor_model_parallel_size", "4"))
    _, said = supervisor.communicate(timeout=400)
    assert supervisor.returncode == 2, said
    assert "supervise: bad input, which stays bad: not started again" in said
