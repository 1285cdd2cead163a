"""Where a rank stands, from what faulthandler really writes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

import runs
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.mcore_patches import all_gather_in_place, reduce_scatter_in_place
from ranks import run_ranks
from training.evaluation.asked import Asked
from training.watchdog import process, stacks
from training.watchdog.heartbeat import STACKS_SIGNAL
from waiting import until

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from training.watchdog import stacks
path = Path(sys.argv[1])
stacks.register(path)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(threading.main_thread().ident, flush=True)
def loop():
    {what}
loop()
"""


def dumped(folder: Path, what: str) -> tuple[str, int]:
    """The stacks of a program that does ``what``, and its main thread."""
    path = folder / "stacks"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(what=what), str(path)], cwd=runs.ROOT, capture_output=True, text=True
    )
    return path.read_text(), int(done.stdout)


def test_the_main_thread_is_found_among_others(tmp_path: Path) -> None:
    text, main_thread = dumped(tmp_path, "os.kill(os.getpid(), signal.SIGUSR1)")
    assert text.count("hread 0x") == 2
    assert stacks.stand(text, main_thread) == stacks.StackPosition(waits=None, at="<string>:10 in loop")
    assert stacks.stand(text, main_thread + 1) is None
    assert stacks.crash(text) is None


def test_stacks_are_written_though_the_signal_was_ignored_meanwhile(tmp_path: Path) -> None:
    """As a launcher does, which may be a process that had been a rank."""
    again = "signal.signal(signal.SIGUSR1, signal.SIG_IGN); stacks.register(path); "
    text, main_thread = dumped(tmp_path, f"{again}os.kill(os.getpid(), signal.SIGUSR1)")
    assert stacks.stand(text, main_thread) == stacks.StackPosition(waits=None, at="<string>:10 in loop")


def test_a_crash_leaves_its_name_and_place(tmp_path: Path) -> None:
    text, main_thread = dumped(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert stacks.crash(text) == "Segmentation fault"
    stand = stacks.stand(text, main_thread)
    assert stand is not None
    assert "in loop" in stand.at


def frames(*lines: str) -> str:
    """Stacks of thread 10 alone, innermost first, as faulthandler writes them."""
    return "Thread 0x000000000000000a (most recent call first):\n" + "".join(f"  File {line}\n" for line in lines)


OURS = f'"{runs.ROOT}/training/step.py", line 9 in unite'
C10D = '"/x/site-packages/torch/distributed/distributed_c10d.py", line'
P2P = '"/x/site-packages/megatron/core/pipeline_parallel/p2p_communication.py", line'
LOGGER = '"/x/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper'


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        ([f"{C10D} 5 in all_reduce", LOGGER, OURS], "all_reduce"),
        ([f"{C10D} 5 in gather", LOGGER, f"{C10D} 7 in gather_object", LOGGER, OURS], "gather_object"),
        ([f"{C10D} 5 in _manager", '"/x/contextlib.py", line 1 in __exit__', '"/x/y.py", line 2 in sync', OURS],
         "_manager of sync"),
        ([f"{P2P} 5 in _communicate", f"{P2P} 7 in recv_forward", OURS], "recv_forward"),
        (['"/x/site-packages/torch/distributed/rendezvous.py", line 199 in _create_c10d_store', OURS], "rendezvous"),
        ([OURS, f"{C10D} 5 in all_reduce"], None),
        (['"/x/site-packages/numpy/core/multiarray.py", line 5 in read', OURS], None),
    ],
)  # fmt: skip
def test_collectives_are_told_from_all_else(lines: list[str], waits: str | None) -> None:
    stand = stacks.stand(frames(*lines), 10)
    assert stand is not None
    assert stand.waits == waits
    assert stand.at.startswith("training/step.py:9 in unite")


@pytest.mark.parametrize(
    ("file", "caller", "part", "waits"),
    [
        ("parallel/mcore_patches.py", "all_gather_in_place", "broadcast", "all_gather_in_place"),
        ("training/evaluation/asked.py", "__call__", "all_reduce", "all_reduce of the evaluation"),
        ("training/evaluation/asked.py", "__call__", "barrier", "barrier"),
        ("training/step.py", "unite", "broadcast", "broadcast"),
    ],
)
def test_a_collective_of_our_own_has_its_name_from_its_first_part_on(
    file: str, caller: str, part: str, waits: str
) -> None:
    """gloo waits for the peer while a part begins, or in a handle's wait: ranks in either are in the same."""
    stand = stacks.stand(frames(f"{C10D} 5 in {part}", LOGGER, f'"{runs.ROOT}/{file}", line 9 in {caller}', OURS), 10)
    assert stand is not None and stand.waits == waits


@pytest.mark.parametrize(
    ("code", "waits"),
    [("return bool(flag)", True), ("total = int(count)", True), ("x.item()", True), ("print(x)", False),
     ("checkpoint(x)", False)],
)  # fmt: skip
def test_on_a_gpu_a_number_that_is_asked_for_is_waited_for(code: str, waits: bool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{code}\n")
    text = frames(f'"{tmp_path}/own.py", line 1 in f')
    stand = stacks.stand(text, 10, cuda=True)
    assert stand is not None
    assert stand.waits == (f"the GPU ({code})" if waits else None)
    assert stacks.stand(text, 10) == stacks.StackPosition(waits=None, at=stand.at)


def reduce_scatter() -> None:
    """As data-parallel gradients are."""
    whole = torch.ones(2)
    reduce_scatter_in_place(torch.empty(1), whole, op=dist.ReduceOp.SUM, group=dist.group.WORLD)


def all_gather() -> None:
    """As weights are. Not dist.get_rank(): this frame of torch's, too, is one that waits."""
    whole, group = torch.ones(2), cast(dist.ProcessGroup, dist.group.WORLD)
    all_gather_in_place(whole, whole[group.rank()].view(1), group=group)


def ask_whether_to_stop() -> None:
    """As an evaluation does."""
    question = Asked(lambda: False, cast(Ranks, SimpleNamespace(device="cpu")))
    question()
    question.last()


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "reduce_scatter_in_place": reduce_scatter,
    "all_gather_in_place": all_gather,
    "all_reduce of the evaluation": ask_whether_to_stop,
}


def wait_for_a_peer_that_does_not_come(identity: Identity, folder: Path, name: str) -> None:
    """Rank 0 really waits in gloo while rank 1 asks it for its stacks."""
    path = folder / "stacks"
    store = dist.TCPStore("127.0.0.1", identity.port or 0, 2, is_master=identity.rank == 0,
                          master_listen_fd=identity.listen_fd, wait_for_workers=False)  # fmt: skip
    dist.init_process_group("gloo", rank=identity.rank, world_size=2, store=store)
    if identity.rank == 0:
        stacks.register(path)
        store.set("pid", f"{os.getpid()} {threading.main_thread().ident}")
        CALLS[name]()
    else:
        pid, thread = map(int, store.get("pid").split())
        while (found := _asked(pid, path, thread)) is None or found.waits is None:
            time.sleep(0.1)  # it is only on its way there; what is never taken for waiting ends by pytest's limit
        assert found.waits == name
        CALLS[name]()
    dist.barrier()
    dist.destroy_process_group()


def _asked(pid: int, path: Path, thread: int) -> stacks.StackPosition | None:
    os.kill(pid, stacks.STACKS_SIGNAL)
    time.sleep(0.2)
    return stacks.stand(path.read_text(), thread)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_is_blocked_in_gloo_answers(tmp_path: Path, name: str) -> None:
    """Who waits is not taken for who is waited for."""
    run_ranks(2, wait_for_a_peer_that_does_not_come, tmp_path, name)


def test_a_stopped_process_writes_its_stacks_from_the_main_thread(tmp_path: Path) -> None:
    """Another thread would walk the main thread's frames while that one runs on."""
    path = tmp_path / "stacks"
    command = [sys.executable, "-c", PROGRAM.format(what="time.sleep(60)"), str(path)]
    with subprocess.Popen(command, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        main_thread = int(program.stdout.readline())
        try:
            for number in range(1, 11):
                program.send_signal(signal.SIGSTOP)
                until(lambda: (found := process.status(program.pid, None)) is not None and found.state == "T")
                process.send_to_main_thread(program.pid, None, STACKS_SIGNAL)
                program.send_signal(signal.SIGCONT)
                until(lambda number=number: path.read_text().count("Current thread") == number)  # type: ignore[misc]
        finally:
            program.kill()
    assert set(re.findall("Current thread 0x([0-9a-f]+)", path.read_text())) == {f"{main_thread:016x}"}
