"""Start local ranks, end them together, and find the one that failed first.

CPU ranks are forked from a parent that has imported torch and megatron but never computed: eight ranks start in the
time of one import. GPU ranks are new processes, since a forked child cannot use CUDA safely.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel.failures import GOOD_ENDS, STOPPED, Failure, guard, interrupted
from parallel.forwarding import Forwarding, forwarding
from parallel.launch import LISTEN_FD, Identity
from parallel.output import own_output
from program.durable import replace_file
from program.errors import StoppedOnRequest
from program.processes import die_with_parent
from program.untrusted import read_json
from program.users_code import end_now

GRACE_S = 3.0


def fork_ranks(nproc: int, run: Callable[[Identity], int]) -> tuple[int, Failure | None]:
    """Fork ``nproc`` ranks, each calling ``run``; returns the exit code and the failure that came first.

    The caller must have imported and never computed: a forked thread pool hangs. The first rank that fails ends the
    others within seconds; a killed parent takes its ranks with it. Signals that come while it forks are handed on to
    the ranks.
    """
    notes = Path(tempfile.mkdtemp(prefix="triplane-ranks-"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=nproc)
    left = mmap.mmap(-1, 1 + nproc)  # shared with the ranks: 1 once one has left on request, before training, and for
    # each rank once it has come to its end: one whose process ended before that was ended, whatever its exit code
    try:
        with forwarding() as signals:
            ranks = {}
            for rank in range(nproc):
                identity = Identity(
                    rank=rank,
                    world_size=nproc,
                    local_rank=rank,
                    local_world_size=nproc,
                    launcher="local",
                    port=listener.getsockname()[1],
                    listen_fd=listener.fileno() if rank == 0 else None,
                )
                ranks[_fork(run, identity, notes, os.getpid(), signals, left)] = rank
            listener.close()
            signals.forward_to(ranks)
            ended = _wait(ranks, stopped=lambda: left[0] == 1, came_to_end=lambda rank: left[1 + rank] == 1)
        if left[0]:
            _, failure = _verdict(ended, notes)
            if failure is None or failure.echo:
                return STOPPED, None
        cleanly = all(end.well for end in ended.values())
        return interrupted(signals.ending[0]) if signals.ending and not cleanly else _verdict(ended, notes)
    finally:
        listener.close()
        shutil.rmtree(notes, ignore_errors=True)


def fork_logged(nproc: int, work: Callable[[Identity], object], logs: Path) -> Failure | None:
    """As ``fork_ranks``; what the ranks print goes to a file in ``logs``."""

    def run(identity: Identity) -> int:
        with own_output(logs, identity, every_rank=False):
            work(identity)
        return 0

    return fork_ranks(nproc, run)[1]


def _fork(
    run: Callable[[Identity], int],
    identity: Identity,
    notes: Path,
    parent: int,
    signals: Forwarding,
    left: mmap.mmap,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    of_parent = len(signals.waiting)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        code, failure = guard(partial(_run_forked, run, signals, of_parent, left), identity)
        if failure is not None:
            data = json.dumps(dataclasses.asdict(failure)).encode()
            replace_file(notes / str(identity.rank), data, durable=False)  # it may be killed in the midst of it
        sys.stdout.flush()
        sys.stderr.flush()
        left[1 + identity.rank] = 1
    finally:
        end_now(code)


def _run_forked(
    run: Callable[[Identity], int], signals: Forwarding, of_parent: int, left: mmap.mmap, identity: Identity
) -> int:
    try:
        signals.leave(of_parent)  # here ``guard`` sees what a handler raises
        return run(identity)
    except StoppedOnRequest:
        left[0] = 1
        raise


@dataclass(kw_only=True, slots=True, frozen=True)
class Ended:
    """How a rank's process ended. ``by_us``: after another one's failure, when we had begun to end the rest."""

    code: int
    at: float
    by_us: bool
    came_to_end: bool
    """Of what it was to run."""

    @property
    def well(self) -> bool:
        return self.came_to_end and self.code in GOOD_ENDS


def _wait(
    ranks: Mapping[int, int],
    stopped: Callable[[], bool] = lambda: False,
    came_to_end: Callable[[int], bool] = lambda _: True,
) -> dict[int, Ended]:
    """How every rank ended. After the first failure the others get GRACE_S, SIGTERM, GRACE_S, SIGKILL.

    stopped: whether a rank has left on request before training began, which counts as one: another may have gone into
    a collective meanwhile, where it hears no signal and would wait for that rank until its timeout.
    """
    ended: dict[int, Ended] = {}
    left, sends, next_send = dict(ranks), [signal.SIGTERM, signal.SIGKILL], float("inf")
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                rank = left.pop(pid)
                ended[rank] = Ended(
                    code=code, at=time.time(), by_us=len(sends) < 2, came_to_end=came_to_end(rank)
                )  # fmt: skip
        over = stopped() or not all(end.well for end in ended.values())
        if next_send == float("inf") and over:
            next_send = time.monotonic() + GRACE_S
        if time.monotonic() > next_send and sends:
            number, next_send = sends.pop(0), time.monotonic() + GRACE_S
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.005)
    return ended


def _verdict(ended: Mapping[int, Ended], notes: Path) -> tuple[int, Failure | None]:
    """The failure that caused the others: the earliest one that is not the echo of a lost peer.

    Where all are echoes (a peer hung, say), the first that left a word of its own tells more than one that we killed.
    """
    failures: dict[str, Failure] = {note.name: read_json(note, Failure) for note in notes.iterdir() if not note.suffix}
    ill = {rank: end for rank, end in ended.items() if not end.well}
    silent = {str(rank): end for rank, end in ill.items() if str(rank) not in failures}
    for rank, end in silent.items():
        failures[rank] = Failure(
            rank=int(rank), code=_fault_code(end), at=end.at, text=f"{_how(end)}\n", echo=end.by_us
        )
    if not failures:
        return max((end.code for end in ended.values()), default=0), None
    first = min(failures.values(), key=lambda failure: (failure.echo, str(failure.rank) in silent, failure.at))
    if not first.echo:
        first = min((failure for failure in failures.values() if not failure.echo), key=lambda failure: failure.at)
    return first.code, first


def _fault_code(end: Ended) -> int:
    """What the run exits with. An end before the end is neither done nor stopped on request nor bad input."""
    if end.code < 0:
        return 128 - end.code
    return end.code if end.came_to_end or end.code not in (2, *GOOD_ENDS) else 1


def _how(end: Ended) -> str:
    return f"killed by {signal.Signals(-end.code).name}" if end.code < 0 else f"exit code {end.code}"


def spawn_ranks(
    nproc: int, command: Sequence[str], environ: Mapping[str, str], reported: Callable[[], bool] = lambda: False
) -> int:
    """Start ``nproc`` fresh processes of ``command`` with torchrun's environment; the first failure ends the others.

    Each rank shows its own failure (see ``report``); returns the exit code of the first that failed. reported: whether
    somebody else has said already which rank that was, and why.
    """
    processes = []  # kept: subprocess itself reaps a child whose Popen is gone
    with socket.create_server(("127.0.0.1", 0), backlog=nproc) as listener, forwarding() as signals:
        for rank in range(nproc):
            own = dict(
                environ,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(nproc),
                LOCAL_WORLD_SIZE=str(nproc),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(listener.getsockname()[1]),
            )
            own[LISTEN_FD] = str(listener.fileno())  # rank 0 serves there: no other program can take the port meanwhile
            processes.append(
                subprocess.Popen(
                    command,
                    env=own,
                    pass_fds=() if rank else (listener.fileno(),),
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            )
        listener.close()
        ranks = {process.pid: rank for rank, process in enumerate(processes)}
        signals.forward_to(ranks)
        ended = _wait(ranks)
    for process in processes:
        process.returncode = ended[ranks[process.pid]].code
    failed = sorted((end.at, rank) for rank, end in ended.items() if end.code not in GOOD_ENDS)
    if not failed:
        return max(end.code for end in ended.values())
    first = failed[0][1]
    if ended[first].code != 2 and not reported():  # a user's mistake has been shown, and says all there is to say
        print(f"rank {first} of {nproc} failed first: {_how(ended[first])}", file=sys.stderr, flush=True)
    return ended[first].code if ended[first].code > 0 else 128 - ended[first].code
