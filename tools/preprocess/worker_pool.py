"""Tasks done by forked workers, which share nothing, and end with the process that started them."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tqdm import tqdm

from program.errors import UserError
from program.processes import ctrl_c_later, die_with_parent

POLL_S = 0.2
Report = Callable[[int, int], None]
"""Called with the source bytes read (documents.DocumentBatch) and the tokens made since the last call."""
Task = Callable[[int, Report], None]
Clear = Callable[[dict[int, int]], None]
"""Called with the process ids of workers that ended within a task, and these tasks: removes what is half written."""


class Stopped(Exception):
    """Asked to stop: what is done is kept."""


class WorkerDied(RuntimeError):
    """A worker was killed, or failed by a fault of the program: its text says which, and that its work continues."""


class StopSign:
    """Whether SIGTERM came. The handler only notes it: an exception out of a handler gets lost in some places."""

    def __init__(self) -> None:
        self.is_up = False

    def listen(self) -> None:
        """From now on."""
        signal.signal(signal.SIGTERM, self._raise)

    def check(self) -> None:
        """Raises Stopped."""
        if self.is_up:
            raise Stopped

    def _raise(self, number: int, frame: object) -> None:
        self.is_up = True


def work(
    tasks: list[int], run_task: Task, clear: Clear, workers: int, bar: tqdm, private: Iterable[int], stop: StopSign
) -> None:
    """Do every task, the next one by the first free worker. workers: 0 is one for each CPU that may be used.
    private: descriptors that no worker may keep open.

    However it ends, no worker is left, and nothing of theirs half written.

    Raises UserError where a task does, WorkerDied, Stopped.
    """
    context = multiprocessing.get_context("fork")
    left = list(reversed(tasks))
    busy: dict[Connection, tuple[BaseProcess, int]] = {}
    tokens = 0
    try:
        process: BaseProcess
        for _ in range(min(workers or len(os.sched_getaffinity(0)), len(tasks))):
            ours, theirs = context.Pipe()
            others = [ours.fileno(), *(one.fileno() for one in busy), *private]
            process = context.Process(target=_worker, args=(theirs, run_task, os.getpid(), others), daemon=True)
            with ctrl_c_later():  # a worker has it so from its first moment, until it does not listen any more
                process.start()
                theirs.close()
                _give(ours, left, process, busy)
        while busy:
            stop.check()
            for ready in wait(list(busy), POLL_S):
                assert isinstance(ready, Connection)
                ours = ready
                process, task = busy[ours]
                kind, *values = _hear(ours, process, task)
                if kind == "progress":
                    bar.update(values[0])
                    tokens += values[1]
                    if tokens and bar.format_dict["elapsed"] > 0:
                        bar.set_postfix_str(
                            f"{tokens / bar.format_dict['elapsed'] / 1e6:.2f} M tokens/s", refresh=False
                        )
                elif kind == "done":
                    if left:
                        _give(ours, left, process, busy)
                    else:
                        _send(ours, None)
                        del busy[ours]
                        process.join()
                else:
                    raise UserError(values[0])
    finally:
        with ctrl_c_later():
            for one, _ in busy.values():
                one.kill()
            for one, _ in busy.values():
                one.join()
            with contextlib.suppress(OSError):  # the cause is reported, not this
                clear({one.pid: task for one, task in busy.values() if one.pid is not None})


def _give(
    worker: Connection, left: list[int], process: BaseProcess, busy: dict[Connection, tuple[BaseProcess, int]]
) -> None:
    """The next task. It is noted first: an interruption between the two would leave a task that is never cleared."""
    task = left.pop()
    busy[worker] = process, task
    _send(worker, task)


def _send(worker: Connection, task: int | None) -> None:
    """A worker may have died meanwhile: `_hear` says so, and how, where it still had work."""
    with contextlib.suppress(ConnectionError):
        worker.send(task)


def _hear(worker: Connection, process: BaseProcess, task: int) -> Any:
    try:
        return worker.recv()
    except (EOFError, ConnectionError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = "; out of memory? Try fewer --workers" if code == -signal.SIGKILL else ""
        raise WorkerDied(f"the worker of unit {task} {how}{cause}. The same command continues.") from None


def _worker(parent: Connection, run_task: Task, parent_pid: int, others: Iterable[int]) -> None:
    """Give up what belongs to the parent, its locks above all, and do what it says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in others:
        os.close(descriptor)
    die_with_parent(parent_pid)
    try:
        while (task := _asked(parent)) is not None:
            run_task(task, lambda size, tokens: _tell(parent, "progress", size, tokens))
            _tell(parent, "done")
    except UserError as error:
        _tell(parent, "failed", str(error))
    except OSError as error:
        _tell(parent, "failed", f"{error.filename or 'a file'}: {error.strerror or error}. What is done is kept.")


def _asked(parent: Connection) -> int | None:
    """The next task; None: there is none. Where the parent is gone, there is no one to work for."""
    try:
        return parent.recv()
    except (EOFError, ConnectionError):  # reset: it had not read all messages
        os._exit(1)


def _tell(parent: Connection, *what: object) -> None:
    try:
        parent.send(what)
    except ConnectionError:
        os._exit(1)


def progress(total: int | None, title: str, unit: str = "B") -> tqdm:
    """A bar with rate, and with time left where the total is known; where stderr is no terminal, a line every 30 s."""

    class ProgressBar(tqdm):
        monitor_interval = 0  # no watching thread: workers are forked from this process

    class ProgressLines(ProgressBar):
        """A line each time, which a log shows as it comes: no line is written over."""

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None:
                self.fp.write(f"{self}\n")
                self.fp.flush()

        def close(self) -> None:
            self.disable = True  # what it would clear, it has not drawn

    ProgressBar.set_lock(
        threading.RLock()
    )  # the usual one is shared with forked processes, and stays shut if one is killed
    if sys.stderr.isatty():
        return ProgressBar(total=total, desc=title, unit=unit, unit_scale=True, mininterval=0.5)
    return ProgressLines(total=total, desc=title, unit=unit, unit_scale=True, mininterval=30)
