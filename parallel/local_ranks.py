"""Start local ranks, end them together, and tell which one failed first.

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
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from parallel.durable import replace_file
from parallel.errors import SharedFault, SharedMistake, StoppedOnRequest, UserError, printable
from parallel.launch import LISTEN_FD, Identity, node_name
from parallel.processes import die_with_parent
from parallel.schema import Text
from parallel.untrusted import read_json
from parallel.users_code import end_now

# How torch.distributed says that a *peer* has gone; such a failure is an echo, never the cause.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
    "Socket Timeout",
    "Connection refused",
    "recvValue failed",
    "failed to recv",
    "store->get",
)
GRACE_S = 3.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
STOPPED = 75
"""Exit code of a run that was asked to stop, has saved, and is to be continued (EX_TEMPFAIL of sysexits.h)."""


class SharedCause(NamedTuple):
    """Where a ``SharedFault`` began, as far as that is known."""

    rank: int | None
    host: Text | None


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """Why a rank ended, or, without a rank, why all did: the exit code, and a message or traceback."""

    rank: int | None
    code: int
    at: float
    text: Text
    echo: bool
    shared: SharedCause | None = None
    """Of a ``SharedFault``, which all ranks found alike."""
    notes: Text = ""
    """An exception's notes (PEP 678), which ``text`` leaves out: what to do about it, said last."""
    place: tuple[str, int] | None = None
    """Phase and iteration in which an exception was raised, where it tells them by an attribute of this name."""


def guard(run: Callable[[Identity], int], identity: Identity) -> tuple[int, Failure | None]:
    """Call ``run`` and turn whatever it raises into an exit code and a ``Failure``."""
    try:
        return run(identity), None
    except UserError as error:
        ignore_termination()
        return 2, Failure(rank=identity.rank, code=2, at=time.time(), text=str(error), echo=not shows(error, identity))
    except SharedFault as fault:
        return 1, of_all(fault, identity)
    except KeyboardInterrupt:
        code, failure = _interrupted(signal.SIGINT)
        return code, dataclasses.replace(failure, echo=True)
    except StoppedOnRequest:
        return STOPPED, None
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        text = traceback.format_exc().removesuffix(f"{notes}\n")
        echo = isinstance(error, RuntimeError) and any(mark in str(error) for mark in ECHOES)
        place = getattr(error, "place", None)
        return 1, Failure(rank=identity.rank, code=1, at=time.time(), text=text, echo=echo, notes=notes, place=place)


def of_all(fault: SharedFault, identity: Identity) -> Failure:
    """What every rank makes of ``fault``; rank 0 shows it."""
    cause, echo = SharedCause(fault.rank, fault.host), identity.rank != 0
    return Failure(rank=None, code=1, at=time.time(), text=str(fault), echo=echo, shared=cause)


def shows(error: Exception, identity: Identity | None) -> bool:
    """Whether this process is the one to show a user's mistake. Under torchrun and srun each rank decides alone."""
    return identity is None or identity.rank == 0 or not isinstance(error, SharedMistake)


def ignore_termination() -> None:
    """While leaving with exit code 2: srun ends all ranks as soon as one has left, and its TERM would hide the code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
        with _forwarding() as signals:
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
        return _interrupted(signals.ending[0]) if signals.ending and not cleanly else _verdict(ended, notes)
    finally:
        listener.close()
        shutil.rmtree(notes, ignore_errors=True)


def _fork(
    run: Callable[[Identity], int],
    identity: Identity,
    notes: Path,
    parent: int,
    signals: "_Forwarding",
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
    run: Callable[[Identity], int], signals: "_Forwarding", of_parent: int, left: mmap.mmap, identity: Identity
) -> int:
    try:
        signals.leave(of_parent)  # here ``guard`` sees what a handler raises
        return run(identity)
    except StoppedOnRequest:
        left[0] = 1
        raise


class _Forwarding:
    """Forwards INT and HUP (as TERM), TERM and USR2 to the ranks, which save and end. A second Ctrl-C kills them.

    Signals that come while ranks are started wait until all are: what a handler raises within os.fork, from the
    callbacks of libraries, is printed and lost. A signal mask would not do, since any other thread may take the signal.
    """

    def __init__(self) -> None:
        self.ending: list[int] = []
        """Signals to end the run, in the order in which they were handed on."""
        self.waiting: list[int] = []
        self.pids: Collection[int] | None = None
        handled = [
            number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN
        ]  # nohup ignores HUP
        self.before = {number: signal.signal(number, self._take) for number in handled}

    def _take(self, number: int, _frame: object) -> None:
        self.waiting.append(number)
        self._send()

    def forward_to(self, pids: Collection[int]) -> None:
        """From now on, and what waits."""
        self.pids = pids
        self._send()

    def _send(self) -> None:
        while self.pids is not None and self.waiting:
            number = self.waiting.pop(0)
            again = number == signal.SIGINT and signal.SIGINT in self.ending
            if number != signal.SIGUSR2:
                self.ending.append(number)
            sent = signal.SIGKILL if again else number if number == signal.SIGUSR2 else signal.SIGTERM
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)

    def restore(self) -> None:
        """The handlers from before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def leave(self, of_parent: int) -> None:
        """In a forked rank: the handlers from before, which then hear what came since the fork.

        of_parent: how many signals waited before the fork; the parent hands them on itself.
        """
        self.before.pop(signal.SIGINT, None)  # a rank ignores it
        self.restore()
        for number in self.waiting[of_parent:]:
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)


@contextlib.contextmanager
def _forwarding() -> Iterator[_Forwarding]:
    signals = _Forwarding()
    try:
        yield signals
    finally:
        signals.restore()


def _interrupted(number: int) -> tuple[int, Failure]:
    """The verdict on a run that a signal ended."""
    text = f"ended by {signal.Signals(number).name}; started again, the run continues from its newest checkpoint"
    return 128 + number, Failure(rank=None, code=128 + number, at=time.time(), text=text, echo=False)


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
        return self.came_to_end and self.code in (0, STOPPED)


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
    return end.code if end.came_to_end or end.code not in (0, 2, STOPPED) else 1


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
    with socket.create_server(("127.0.0.1", 0), backlog=nproc) as listener, _forwarding() as signals:
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
    failed = sorted((end.at, rank) for rank, end in ended.items() if end.code not in (0, STOPPED))
    if not failed:
        return max(end.code for end in ended.values())
    first = failed[0][1]
    if ended[first].code != 2 and not reported():  # a user's mistake has been shown, and says all there is to say
        print(f"rank {first} of {nproc} failed first: {_how(ended[first])}", file=sys.stderr, flush=True)
    return ended[first].code if ended[first].code > 0 else 128 - ended[first].code


def report(failure: Failure, logs: Path, world_size: int) -> None:
    """Show the failure that counts, once: a user's mistake as its message, a fault as its traceback and its notes.

    A fault is also written to the rank's own file in ``logs``.
    """
    text, notes = printable(failure.text), printable(failure.notes)
    if failure.code == 2 or failure.rank is None:
        print(f"pretrain_gpt.py: {text}", file=sys.stderr, flush=True)
        return
    own = logs / f"rank-{failure.rank:05d}.failed.log"
    with contextlib.suppress(OSError):
        own.write_text(f"{text}{notes}\n" if notes else text)
    where = f"rank {failure.rank} of {world_size} on {node_name(os.environ)}"
    last = f"\n{notes}" if notes else ""
    print(f"{text.rstrip()}\n{where} failed first; logs: {logs}{last}", file=sys.stderr, flush=True)
