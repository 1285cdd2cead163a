"""A rank under watch, and which of several failures is shown. No torch here: a hanging import is watched, too."""

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from parallel.errors import UserError
from parallel.launch import Identity
from parallel.local_ranks import Failure
from training.owner.processes import start_of
from training.watch import record, stacks, watchdog
from training.watch.config import FaultConfig
from training.watch.process import lives
from training.watch.pulse import SUFFIX, About, Page, Pulse, memory_folder, remove
from training.watch.request import StopRequest
from training.watch.verdict import Verdict

ECHO_WAIT_S = 5.0
"""A rank that lost its peer waits so long for that peer's own word before it takes its own for the first."""
_SAME_START = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""What tells one start of a run from another on the same node."""


@dataclass(kw_only=True, slots=True)
class Watch:
    """One process of a run: a rank with its pulse, or the launcher of local ranks."""

    folder: Path
    """RUN_DIR/watch"""
    identity: Identity
    host: str
    pulse: Pulse = field(default_factory=Pulse)
    launches: bool = False
    stale: str = ""
    """See ``pulse.About.stale_verdict``."""

    def settle(self, failure: Failure | None) -> Failure | None:
        """What this process is to show of ``failure``: of all ranks the first that failed shows its own.

        The launcher has found out who was first; from the watchdogs it learns how a rank was killed, or that all were
        because nothing moved. Bad input (exit code 2) and interruptions are shown as ever.
        """
        if failure is None or failure.code == 2 or failure.rank is None:
            return failure if self.launches or failure is None or not failure.echo else None
        if failure.echo and not self.launches:
            self._await()
        if record.leave(self.folder, self._verdict(failure), self.stale):
            return replace(failure, echo=False)
        found = record.read(self.folder, self.stale)
        if found is not None and found.kind == "echo" and not failure.echo:
            record.replace_verdict(self.folder, self._verdict(failure))
            return failure
        if not self.launches:
            return None
        if found is None or found.kind in ("exception", "echo"):
            return failure
        how = failure.text.strip()
        known = "" if found.kind == "hang" or how in found.line else f" ({how})"
        return replace(failure, rank=None, text=f"{found.line}{known}", echo=False)

    def _verdict(self, failure: Failure) -> Verdict:
        at = self.pulse.read()
        return Verdict(
            kind="echo" if failure.echo else "exception",
            rank=failure.rank or 0,
            world_size=self.identity.world_size,
            host=self.host,
            iteration=at.iteration,
            phase=at.phase,
            line=failure.text.strip().rpartition("\n")[2],
        )

    def _await(self) -> None:
        """Wait for the word of whoever was lost."""
        deadline = time.monotonic() + ECHO_WAIT_S
        while record.read(self.folder, self.stale) is None and time.monotonic() < deadline:
            time.sleep(0.25)


@contextlib.contextmanager
def watched(
    fault: FaultConfig, run_dir: Path, identity: Identity, request: StopRequest, environ: Mapping[str, str], cuda: bool
) -> Iterator[Watch]:
    """Watch this process as a rank: yields its pulse, for it to beat. Leaving says that the rank needs no word on it.

    Without room in memory for 4 KiB, training goes on unwatched, and says so.
    """
    folder = run_dir / record.WATCH
    stale = record.mark(folder / record.VERDICT) if identity.rank else ""  # rank 0 has swept
    try:
        pulse = _begin(fault, run_dir, identity, environ, cuda, stale)
    except OSError as error:
        print(f"warning: rank {identity.rank} has no watchdog: {error}", file=sys.stderr, flush=True)
        pulse = Pulse()
    request.tell = pulse.ask
    code = 1
    try:
        yield Watch(folder=folder, identity=identity, host=host_of(environ), pulse=pulse, stale=stale)
        code = pulse.code
    except UserError:
        code = 2
        raise
    except SystemExit as stopped:
        code = int(stopped.code or 0)
        raise
    finally:
        pulse.end(code)


def host_of(environ: Mapping[str, str]) -> str:
    """This node, as SLURM names it in lists of nodes; else the host's name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _begin(
    fault: FaultConfig, run_dir: Path, identity: Identity, environ: Mapping[str, str], cuda: bool, stale: str
) -> Pulse:
    _sweep()
    host, folder = host_of(environ), (run_dir / record.WATCH).absolute()
    key = "\n".join(
        [str(run_dir.resolve()), host, str(identity.port), *(environ.get(name, "") for name in _SAME_START)]
    )
    if identity.launcher in ("local", "single"):  # the rendezvous port of local ranks is theirs alone
        key += f"\n{os.getppid() if identity.launcher == 'local' else os.getpid()}"
    start = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = memory_folder() / f"triplane-{os.getuid()}-{start}-{identity.rank}{SUFFIX}"
    remove(path)
    stacks.register(path.with_suffix(".stacks"))
    if cuda:
        _record_collectives(path, folder)
    about = About(
        rank=identity.rank,
        world_size=identity.world_size,
        host=host,
        pid=os.getpid(),
        process_start=start_of(os.getpid()),
        main_thread=threading.main_thread().ident or 0,
        folder=str(folder),
        told_by_launcher=identity.launcher == "local",
        step_timeout_s=fault.step_timeout_s,
        start_timeout_s=fault.start_timeout_s,
        stale_verdict=stale,
        stale_judge=record.mark(folder / record.JUDGE) if identity.rank else "",
    )
    pulse = Pulse(path, about)
    pulse.watchdog = watchdog.start(path)
    return pulse


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
