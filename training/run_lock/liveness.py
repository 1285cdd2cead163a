"""Whether the owner of a run's folder still lives."""

import time
from collections.abc import Callable
from pathlib import Path

from parallel.processes import is_running
from training.run_lock import lock_heartbeat
from training.run_lock.record import Owner, current, describe

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
