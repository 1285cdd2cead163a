"""What is said of a rank that SIGKILL has ended, and of CPU ranks that their host has too little memory for."""

import os
import signal
import time
from dataclasses import replace

import pytest

from parallel.failures import Failure
from parallel.launch import Identity
from parallel.local_ranks import fork_ranks
from training.cli.dry_run import describe
from training.cli.parse import parse_config
from training.watchdog.killed import HostMemory, explained, said
from training.watchdog.verdict import Verdict

HOST = HostMemory(available=20 * 2**30, total=24 * 2**30, kills=(0, 3))


def killed_rank(identity: Identity) -> int:
    if identity.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # or the launcher would give it its time to end
    return 0


def test_a_rank_that_sigkill_ends_is_explained() -> None:
    code, failure = fork_ranks(2, killed_rank)
    assert code == 128 + signal.SIGKILL and failure is not None
    text = explained(failure, None, HostMemory.now(), 2, 40 * 2**30).text
    assert text.startswith("killed by SIGKILL\nMostly such a signal is the kernel's OOM killer's")
    assert "2 ranks are predicted to hold 40.00 GiB" in text


def test_what_ended_otherwise_is_left_alone() -> None:
    crashed = Failure(rank=1, code=1, at=0.0, text="ValueError: no\n", echo=False)
    assert explained(crashed, None, HOST, 2, 1.0) == crashed
    ended = Failure(rank=1, code=128 + signal.SIGKILL, at=0.0, text="killed by SIGKILL\n", echo=False)
    hang = Verdict(kind="hang", rank=1, world_size=2, host="n1", iteration=3, phase="step", line="rank 1 hangs")
    assert explained(ended, hang, HOST, 2, 1.0) == ended  # its watchdog sent it


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ((0, 3), "memory runs out. Before the start 20.00 GiB of 24.00 GiB were available, and processes"),
        ((0, 4), "memory runs out, and the kernel has counted 1 in this host (/proc/vmstat) since the start."),
        ((2, 5), "memory runs out, and the kernel has counted 2 in this job (memory.events) since the start."),
    ],
)
def test_what_the_kernel_has_counted_is_told(kills: tuple[int, int], words: str) -> None:
    assert words in said(HOST, replace(HOST, kills=kills), 2, 0)


def test_the_dry_run_of_cpu_ranks_looks_at_this_machines_memory() -> None:
    flags = "--device cpu --nproc 2 --dry_run --model.shape {} --train.global_batch_size 4".split()
    large = " ".join(describe(parse_config([one.format("llama31_405b") for one in flags])).split())
    assert "the kernel's OOM killer may end them" in large.replace(" # ", " ")
    assert "OOM" not in describe(parse_config([one.format("llama3_tiny") for one in flags]))
    elsewhere = [*(one.format("llama31_405b") for one in flags), "--world_size", "4"]
    assert "OOM" not in describe(parse_config(elsewhere))
