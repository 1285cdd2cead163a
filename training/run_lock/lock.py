"""Take a run's folder for one run, keep it, prove it, and give it back; and whether its owner still lives."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from parallel.launch import Identity
from program.errors import UserError
from program.processes import is_running
from program.untrusted import if_readable, read_text
from training.run_lock import lock_heartbeat
from training.run_lock.lock_heartbeat import LockHeartbeat, file_of
from training.run_lock.record import OWNER, Owner, current, describe, encode, myself, progress, successor

STILL_S = 60.0  # without a heartbeat for so long, an owner that cannot be looked at is dead: 30 beats
POLL_S = 0.25
QUIET_S = 2.5 * lock_heartbeat.BEAT_S  # a live owner has shown itself by then, and nothing need be said of waiting


def is_dead(
    folder: Path, owner: Owner, newcomer: Owner, still_s: float = STILL_S, say: Callable[[str], None] = print
) -> bool:
    """Whether ``newcomer`` may take ``folder`` over from ``owner``; False also when the owner changes meanwhile.

    At once where it can be known; else the owner's heartbeat is watched for up to ``still_s`` seconds.
    """
    seen = _seen_dead(owner, newcomer)
    return _stands_still(folder, owner, still_s, say) if seen is None else seen


def _seen_dead(owner: Owner, newcomer: Owner) -> bool | None:
    """None where only the heartbeat can tell: of an owner elsewhere, and where the folder was reached another way."""
    here = owner.machine == newcomer.machine
    same_job = owner.slurm_job == newcomer.slurm_job != ""
    if same_job and owner.slurm_restart_count != newcomer.slurm_restart_count:
        return owner.slurm_restart_count < newcomer.slurm_restart_count  # SLURM ends a job before it restarts it
    if not here:
        return None
    if not is_running(owner.pid, owner.process_start):
        return True
    return None if _may_be_copy(owner, newcomer) else False


def _may_be_copy(owner: Owner, newcomer: Owner) -> bool:
    """Whether this folder, with its ``owner.json``, may be a copy of the one that ``owner``, which lives, owns.

    A folder that was moved keeps inode and device. Others may be a copy, or the same folder reached through another
    mount, where inodes and device numbers can be others, too: only the owner's heartbeat tells, which moves in the one
    and stands still in the other. At the same path it is the same folder: sshfs and object stores make inodes up.
    """
    if owner.folder_path in ("", newcomer.folder_path):
        return False
    return (owner.folder_inode, owner.folder_device) != (newcomer.folder_inode, newcomer.folder_device)


def _stands_still(folder: Path, owner: Owner, still_s: float, say: Callable[[str], None]) -> bool:
    """Whether nothing moves for ``still_s`` seconds by our own clock; clocks of hosts differ, counters do not.

    Seconds in which we, or the file server, stood still ourselves do not count: the owner could not beat either.
    """
    file = lock_heartbeat.file_of(folder, owner.attempt)
    counted, still, said = lock_heartbeat.count(file), 0.0, False
    last = time.monotonic()
    while still < still_s:
        time.sleep(POLL_S)
        if lock_heartbeat.count(file) != counted or current(folder) != owner:
            return False
        now = time.monotonic()
        last, still = now, still + min(now - last, 2 * POLL_S)
        if still > QUIET_S and not said:
            said = True
            say(
                f"{folder} was last owned by {describe(owner)}; no heartbeat for {still:.0f} s: "
                f"this run takes it over in {still_s - still:.0f} s unless one comes"
            )
    return True


ATTEMPT = "TRIPLANE_ATTEMPT"
"""Environment variable by which an owner hands its attempt to the ranks that it starts."""

RELEASED = ".owner.released"
"""Names the attempt that gave the folder back, until another attempt takes it."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # what file systems without hard links answer to link(2)


class LockLost(UserError):
    """Another run has taken the folder over: this one must write nothing more into it."""


class RunLock:
    """The right of one start of a run, ``attempt``, to write into ``folder``. Any rank may hold one."""

    def __init__(self, folder: Path, attempt: str, heartbeat: LockHeartbeat | None = None) -> None:
        self.folder, self.attempt, self._heartbeat = folder, attempt, heartbeat

    def still_owns(self) -> bool:
        """Whether the folder is still this attempt's. Two small reads; raises OSError where they fail."""
        owner = current(self.folder)
        return owner is not None and owner.attempt == self.attempt

    def check(self) -> None:
        """Raises LockLost, with who owns the folder now, unless this attempt does, or was the last that did.

        The latter is for writers that outlive their run by a moment: what was copied before is still to be committed.
        """
        owner = current(self.folder)
        if self.attempt == (owner.attempt if owner else _released(self.folder)):
            return
        if not self.folder.exists():
            raise LockLost(
                f"run_dir {self.folder}: the run's folder is gone, removed or with its file system; what it held is "
                f"lost. Started again, this run would begin at its first iteration."
            )
        now = f"owned by {describe(owner)}" if owner else f"free ({OWNER} was removed)"
        raise LockLost(
            f"run_dir {self.folder}: this run (attempt {self.attempt}) was taken for dead; the folder is now {now}. "
            "Nothing more is written there. To go on with this run's settings, start it with another --run_dir."
        )

    def release(self) -> None:
        """Free the folder, if it is still ours; what cannot be removed is left for the next start to find dead."""
        with contextlib.suppress(OSError):
            if self.still_owns():
                (self.folder / RELEASED).write_text(self.attempt)
                (self.folder / OWNER).unlink()
        if self._heartbeat is not None:
            self._heartbeat.end()
        with contextlib.suppress(OSError):
            file_of(self.folder, self.attempt).unlink()


@contextlib.contextmanager
def fenced(lock: RunLock | None) -> Iterator[None]:
    """Around a commit: ``RunLock.check`` before and after it. None, a run without a lock, checks nothing.

    What happens between the checks cannot be undone, but it is not called committed when the folder was lost
    meanwhile. Keep what is inside short: a manifest and a rename, not the writing of tensors.
    """
    if lock is not None:
        lock.check()
    yield
    if lock is not None:
        lock.check()


@contextlib.contextmanager
def held_lock(
    folder: Path,
    identity: Identity | None,
    environ: Mapping[str, str],
    unwritable: Callable[[str], Exception] = UserError,
) -> Iterator[RunLock | None]:
    """Own ``folder`` while the run lasts. Yields the lock, or None on ranks that learn of it from rank 0.

    identity: None in the launcher of local ranks, which claims for them; ranks that it forks inherit the lock, ranks
    that it starts find ``ATTEMPT`` in their environment. Under torchrun and srun rank 0 claims; when it is
    refused, its exit ends the others. Raises UserError where another run owns the folder and lives, and ``unwritable``
    of a message where the folder cannot be written.
    """
    if identity is not None and ATTEMPT in environ:
        yield RunLock(folder, environ[ATTEMPT])
        return
    if identity is not None and identity.rank != 0:
        yield None
        return
    lock = acquire(folder, environ, say=partial(print, flush=True), unwritable=unwritable)
    try:
        yield lock
    finally:
        lock.release()


def acquire(
    folder: Path,
    environ: Mapping[str, str],
    still_s: float = STILL_S,
    say: Callable[[str], None] = print,
    unwritable: Callable[[str], Exception] = UserError,
) -> RunLock:
    """Take the existing ``folder`` for this process, and start its heartbeat.

    still_s: how long, in seconds, the heartbeat of an owner on another host must stand still for it to be dead.
    Raises UserError where a live run owns the folder, and ``unwritable`` of a message where it cannot be written.
    """
    lock: RunLock | None = None
    try:
        newcomer = myself(folder, environ)
        lock = RunLock(folder, newcomer.attempt)
        while (owner := current(folder)) != newcomer:
            if owner is None:
                _link(newcomer, folder, folder / OWNER)
            elif is_dead(folder, owner, newcomer, still_s, say):
                _succeed(folder, owner, newcomer)
            elif current(folder) == owner:
                raise UserError(_refusal(folder, owner))
        (folder / RELEASED).unlink(missing_ok=True)
        heartbeat = LockHeartbeat(file_of(folder, newcomer.attempt), newcomer.process_start)
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if isinstance(error.filename, str | bytes) else OWNER
        raise unwritable(
            f"run_dir {folder}: cannot be claimed for this run ({name}): {error.strerror}. "
            "Make room or give permission there, or choose another with --run_dir.",
        ) from None
    except SystemExit:  # asked to stop meanwhile: no record stays of a run that never began
        if lock is not None:
            lock.release()
        raise
    return RunLock(folder, newcomer.attempt, heartbeat)


def _released(folder: Path) -> str | None:
    """The attempt that gave the folder back, if no run has taken it since."""
    return if_readable(read_text, folder / RELEASED)


def _refusal(folder: Path, owner: Owner) -> str:
    job = owner.slurm_job.rpartition("/")[2]
    stop = f"scancel {job}" if job else f"kill {owner.pid} on {owner.host}"
    return (
        f"run_dir {folder}: another run owns it and is alive: {describe(owner)}, {progress(folder)}. "
        f"A folder is one run's at a time: choose another with --run_dir, or stop that run ({stop})."
    )


def _succeed(folder: Path, dead: Owner, newcomer: Owner) -> None:
    """Take over from ``dead``, unless another run does; the end of the chain then owns the folder.

    A newcomer that was slow may link behind an owner that was replaced long ago, which no chain leads to: what
    it linked means nothing, and stays until the next succession sweeps. It is not removed: that could hit another's.
    """
    _link(newcomer, folder, successor(folder, dead.attempt))
    if current(folder) != newcomer:
        return
    written = _written(newcomer, folder)
    written.replace(folder / OWNER)
    own = {successor(folder, newcomer.attempt), file_of(folder, newcomer.attempt)}
    for left in {*folder.glob("owner.after-*"), *folder.glob("owner.*.heartbeat")} - own:
        left.unlink(missing_ok=True)


def _link(newcomer: Owner, folder: Path, path: Path) -> None:
    """Give ``newcomer``'s record the name ``path``, whole, unless that exists: whose it is, reading it tells.

    Over NFS a link whose answer was lost is reported as existing, so no answer is trusted.
    """
    written = _written(newcomer, folder)
    try:
        os.link(written, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), path.open("xb") as file:  # a reader may see a part for a moment
            file.write(encode(newcomer))
    finally:
        written.unlink(missing_ok=True)


def _written(newcomer: Owner, folder: Path) -> Path:
    """``newcomer``'s record on the disk, under a name of its own."""
    path = folder / f"owner.{newcomer.attempt}.lock"
    with path.open("wb") as file:
        file.write(encode(newcomer))
        file.flush()
        os.fsync(file.fileno())
    return path
