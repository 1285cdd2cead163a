"""Work that may be killed and started again: an unfinished folder, workers, progress by bytes."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from program.durable import replace_file, sync_folder
from program.errors import UserError
from program.processes import ctrl_c_later, die_with_parent
from program.untrusted import InputError, read_bytes
from tools.shared.checked_checkpoint import FIX
from tools.shared.written import check_new
from training.checkpoint import folders
from training.checkpoint.format.manifest import DamagedError

UNFINISHED = ".tmp-convert"
JOB = "convert-job.partial"
"""What an unfinished folder is made from; another job starts over. (A manifest takes no notice of .partial files.)"""

DAMAGED = 3
"""Exit code of a worker that found its source damaged."""

Report = Callable[[int], Any]
"""Called with the bytes that have been done since the last call."""


Accept = Callable[[Path], list[str]]
"""Checks a complete folder before it gets its name; returns notes. Raises Rejected, or UserError where it cannot."""


class Rejected(UserError):
    """What was converted is not what it was converted from: nothing of it may stay."""


class ConversionJob(Protocol):
    """What workers share; it travels to their processes."""

    def run_worker(self, worker: int, workers: int, report: Report) -> None:
        """This worker's share of what is not done yet."""


@contextlib.contextmanager
def unfinished(target: Path, job: dict[str, Any]) -> Iterator[Path]:
    """The folder to write ``target`` in, which gets that name, for good, when all within has gone well. What an
    earlier, killed run of the same job has finished is still there.

    Raises UserError where target exists, or another process works on it. Where the source turns out to be damaged, or
    the result is rejected, nothing is left of the folder. After any other mistake what is done stays, if anything is.
    """
    check_new(target)
    folder = target.with_name(target.name + UNFINISHED)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another process is writing there. Wait for it, or end it.") from None
        wanted = json.dumps(job, indent=1).encode()
        if _noted(folder) != wanted:
            for entry in folder.iterdir():
                folders.remove(entry)
            replace_file(folder / JOB, wanted)
        yield folder
        (folder / JOB).unlink(missing_ok=True)
        sync_folder(folder)
        folder.rename(target)
        sync_folder(target.parent)
    except DamagedError as error:
        shutil.rmtree(folder)
        raise UserError(f"{error}. {FIX}") from None
    except Rejected as error:
        shutil.rmtree(folder)
        raise Rejected(str(error).replace(str(folder), str(target)) + f" {target} was removed.") from None
    except UserError:
        if {path.name for path in folder.iterdir()} <= {JOB}:
            shutil.rmtree(folder)
        raise
    finally:
        os.close(descriptor)


def _noted(folder: Path) -> bytes | None:
    """The job that an unfinished folder is of."""
    try:
        return read_bytes(folder / JOB)
    except (InputError, FileNotFoundError):
        return None


def bar_of_bytes(total: int, title: str, done: int = 0) -> tqdm:
    """Where stderr is no terminal, a line each half minute."""
    often_s = 0.5 if sys.stderr.isatty() else 30
    return tqdm(total=total, initial=done, desc=title, unit="B", unit_scale=True, mininterval=often_s)


def run(job: ConversionJob, workers: int, total_bytes: int, done_bytes: int, title: str) -> None:
    """All of a job, by this process or by ``workers`` others. Raises UserError where one of them did, or died, and
    DamagedError where one of them did."""
    with bar_of_bytes(total_bytes, title, done_bytes) as bar:
        if workers == 1:
            job.run_worker(0, 1, bar.update)
        else:
            _run_workers(job, workers, bar)


def _run_workers(job: ConversionJob, workers: int, bar: tqdm) -> None:
    """Spawned, not forked: this process has tqdm's thread."""
    context = multiprocessing.get_context("spawn")
    counter, said = context.Value("q", 0), context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(job, worker, workers, counter, said, os.getpid()))
        for worker in range(workers)
    ]
    start = bar.n
    try:
        with ctrl_c_later():
            for process in processes:
                process.start()
        _wait_for(processes, said, lambda: bar.update(start + counter.value - bar.n))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait_for(processes: list[SpawnProcess], said: "SimpleQueue[str]", show_progress: Callable[[], Any]) -> None:
    """Until all have ended. Raises what one of them raised, which ``said`` holds.

    A worker may end at any line of this. Who still runs is asked before who failed: the last one's failure is seen too.
    """
    while True:
        running = [process.sentinel for process in processes if process.exitcode is None]
        show_progress()
        if failed := [process.exitcode for process in processes if process.exitcode]:
            text = said.get() if not said.empty() else f"a worker ended with exit code {failed[0]}."
            if failed[0] == DAMAGED:
                raise DamagedError(text)
            raise UserError(f"{text} What is done is kept: run the same command again.")
        if not running:
            return
        wait(running, timeout=0.2)


def _work(job: ConversionJob, worker: int, workers: int, counter: "Synchronized[int]", said: Any, parent: int) -> None:
    """A worker's process."""
    die_with_parent(parent)

    def report(count: int) -> None:
        with counter.get_lock():
            counter.value += count

    try:
        job.run_worker(worker, workers, report)
    except DamagedError as error:
        said.put(str(error))
        os._exit(DAMAGED)
    except UserError as error:
        said.put(str(error))
        os._exit(2)
    except OSError as error:
        said.put(f"{error.filename or 'a file'}: {error.strerror or error}.")
        os._exit(2)
