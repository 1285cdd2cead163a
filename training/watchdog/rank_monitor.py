"""A rank under watch, and which of several failures is shown. Without torch: a hanging import is noticed, too."""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from parallel.failures import STOPPED, Failure, of_all
from parallel.launch import Identity, node_name
from program.errors import SharedFault, StoppedOnRequest, UserError
from program.processes import start_of
from training.config.small_sections import FaultConfig
from training.watchdog import pace, stacks, verdict_file, watchdog
from training.watchdog.heartbeat import SUFFIX, Heartbeat, Page, RankInfo, memory_folder, remove
from training.watchdog.process import lives
from training.watchdog.stop_signal import StopSignal
from training.watchdog.verdict import NodeReport, Verdict, is_missed, lost

ECHO_WAIT_S = 5.0
"""A rank that lost its peer waits so long for that peer's own word before it takes its own for the first."""
_LOOKERS = 128
"""Ranks that may look for a verdict four times a second; more look less often."""


@dataclass(kw_only=True, slots=True)
class RankMonitor:
    """One process of a run: a rank with its heartbeat, or the launcher of local ranks."""

    folder: Path
    """RUN_DIR/watch/start-..., see ``starts``."""
    identity: Identity
    host: str
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    launches: bool = False
    answer_s: float = pace.ANSWER_S
    """See ``pace.answer_s``."""

    def settle(self, failure: Failure | None) -> Failure | None:
        """What this process is to show of ``failure``: of all ranks the first that failed shows its own.

        The launcher has found out who was first; from the watchdogs it learns how a rank was killed, or that all were
        because nothing moved. Bad input (exit code 2) and interruptions are shown as ever.
        """
        if failure is None or (failure.echo and failure.rank is None and not self.launches):
            return None
        if failure.code == 2 or (failure.rank is None and failure.shared is None):
            return failure if self.launches or not failure.echo else None
        if failure.echo and not self.launches and (away := self._await()) and verdict_file.leave(self.folder, away):
            return replace(failure, rank=None, text=away.line, echo=False)
        if verdict_file.leave(self.folder, self._verdict(failure)):
            return replace(failure, echo=False)
        return self._after(verdict_file.read(self.folder), failure)

    def tell(self, shared: SharedFault) -> None:
        """Rank 0 leaves the verdict on what all ranks found alike."""
        if self.identity.rank == 0:
            verdict_file.leave(self.folder, self._verdict(of_all(shared, self.identity)))

    def _after(self, found: Verdict | None, failure: Failure) -> Failure | None:
        """What is to be shown where the start has a verdict."""
        if found is not None and found.kind == "echo" and not failure.echo:
            verdict_file.replace_verdict(self.folder, self._verdict(failure))
            return failure
        if failure.shared is not None:
            return failure
        if not self.launches:
            return None
        if found is None or found.kind in ("exception", "echo"):
            return failure
        how = failure.text.strip()
        known = "" if found.kind == "hang" or how in found.line else f" ({how})"
        return replace(failure, rank=None, text=f"{found.line}{known}", echo=False)

    def _verdict(self, failure: Failure) -> Verdict:
        at, shared = self.heartbeat.read(), failure.shared
        phase, iteration = failure.place or (at.phase, at.iteration)
        rank, host = (failure.rank, self.host) if shared is None else (shared[0], shared[1] or "")
        return Verdict(
            kind="fault" if shared is not None else "echo" if failure.echo else "exception",
            rank=rank or 0,
            world_size=self.identity.world_size,
            host=host,
            iteration=iteration,
            phase=phase,
            line=_line(failure),
        )

    def _await(self) -> Verdict | None:
        """Wait for a report of the lost node. The verdict on its node, where that is lost as a whole.

        One of the ranks that lost a peer asks all nodes to answer, and gives those that do not the time to.
        """
        judging, began_s = os.urandom(8).hex(), time.monotonic()
        with contextlib.suppress(OSError):
            verdict_file.ask(self.folder, judging)
        asks = verdict_file.asked(self.folder) == judging
        pause_s = pace.JUDGING_S if asks else min(4.0, 0.25 * max(1.0, self.identity.world_size / _LOOKERS))
        last_s = max(ECHO_WAIT_S, self.answer_s) + (0.0 if asks else 2 * pace.JUDGING_S)
        while verdict_file.read(self.folder) is None and (waited_s := time.monotonic() - began_s) < last_s:
            time.sleep(pause_s)
            if asks and waited_s > ECHO_WAIT_S and not any(is_missed(node, judging) for node in self._told()):
                return None
        return lost(self._told(), judging, self.identity.world_size, last_s) if asks else None

    def _told(self) -> list[NodeReport]:
        return verdict_file.node_reports(self.folder)


def _line(failure: Failure) -> str:
    """A failure in one line: the last of its text, with the first of its notes."""
    last, note = failure.text.strip().rpartition("\n")[2], failure.notes.partition("\n")[0]
    return f"{last} ({note})" if note else last


@contextlib.contextmanager
def monitored(
    fault: FaultConfig, folder: Path, identity: Identity, request: StopSignal, environ: Mapping[str, str], cuda: bool
) -> Iterator[RankMonitor]:
    """Watch this process as a rank: yields its heartbeat. Leaving says that the rank explains its end itself.

    folder: see ``starts.folder_of``. Without room in memory for 4 KiB, training goes on unwatched, and says so.
    """
    try:
        heartbeat = _begin(fault, folder, identity, environ, cuda)
    except OSError as error:
        print(f"warning: rank {identity.rank} has no watchdog: {error}", file=sys.stderr, flush=True)
        heartbeat = Heartbeat()
    request.tell = heartbeat.ask
    answer_s = pace.answer_s(fault.step_timeout_s, identity.world_size / identity.local_world_size)
    watch = RankMonitor(
        folder=folder, identity=identity, host=node_name(environ), heartbeat=heartbeat, answer_s=answer_s
    )
    code = 1
    try:
        yield watch
        code = heartbeat.code
    except SharedFault as shared:  # of a forked rank, whose launcher does not know the iteration
        watch.tell(shared)
        raise
    except UserError:
        code = 2
        raise
    except StoppedOnRequest:
        code = STOPPED
        raise
    except BaseException as error:  # for the launcher of a forked rank, too
        at = heartbeat.read()
        error.place = at.phase, at.iteration  # type: ignore[attr-defined]
        raise
    finally:
        heartbeat.end(code)


def _begin(fault: FaultConfig, folder: Path, identity: Identity, environ: Mapping[str, str], cuda: bool) -> Heartbeat:
    _sweep()
    host = node_name(environ)
    start = hashlib.sha256(os.fsencode(f"{folder.resolve()}\n{host}")).hexdigest()[:12]
    path = memory_folder() / f"triplane-{os.getuid()}-{start}-{identity.rank}{SUFFIX}"
    remove(path)
    stacks.register(path.with_suffix(".stacks"))
    if cuda:
        _record_collectives(path, folder)
    about = RankInfo(
        rank=identity.rank,
        world_size=identity.world_size,
        host=host,
        pid=os.getpid(),
        process_start=start_of(os.getpid()),
        main_thread=threading.main_thread().ident or 0,
        folder=str(folder.absolute()),
        told_by_launcher=identity.launcher == "local",
        step_timeout_s=min(fault.step_timeout_s, pace.FOREVER_S),
        start_timeout_s=min(fault.start_timeout_s, pace.FOREVER_S),
    )
    heartbeat = Heartbeat(path, about)
    process = watchdog.start(path)
    heartbeat.watched_by(process, start_of(process.pid))
    return heartbeat


def _record_collectives(path: Path, folder: Path) -> None:
    """Let torch's NCCL flight recorder write to the run's folder: on its own timeout, and when a watchdog asks."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-"))
    # torch appends its rank and ".pipe"
    os.environ.setdefault(
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(path.with_suffix(""))[: -len(path.stem.split("-")[-1])]
    )


def _sweep() -> None:
    """Remove pages whose rank and watchdog are gone: of runs that were killed as a whole."""
    for path in memory_folder().glob(f"triplane-{os.getuid()}-*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            page = Page(path)
            pid, started, _, _ = page.watchdog()
            if not lives(page.about.pid, page.about.process_start) and not lives(pid, started or None):
                remove(path)
