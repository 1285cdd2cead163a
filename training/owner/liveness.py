"""Whether the owner of a run's folder still lives."""

import time
from collections.abc import Callable
from pathlib import Path

from training.owner import heartbeat
from training.owner.processes import is_running
from training.owner.record import Owner, current, describe

STILL_S = 60.0  # without a heartbeat for so long, an owner that cannot be looked at is dead: 30 beats
POLL_S = 0.25
QUIET_S = 2.5 * heartbeat.BEAT_S  # a live owner has shown itself by then, and nothing need be said of waiting


def is_dead(
    folder: Path, owner: Owner, newcomer: Owner, still_s: float = STILL_S, say: Callable[[str], None] = print
) -> bool:
    """Whether ``newcomer`` may take ``folder`` over from ``owner``; False also when the owner changes meanwhile.

    At once where it can be known; else the owner's heartbeat is watched for up to ``still_s`` seconds.
    """
    seen = _seen_dead(owner, newcomer)
    return _stands_still(folder, owner, still_s, say) if seen is None else seen


def _seen_dead(owner: Owner, newcomer: Owner) -> bool | None:
    """None where only the heartbeat can tell."""
    here = owner.machine == newcomer.machine
    if _was_copied(owner, newcomer, here):
        return True
    same_job = owner.slurm_job == newcomer.slurm_job != ""
    if same_job and owner.slurm_restart_count != newcomer.slurm_restart_count:
        return owner.slurm_restart_count < newcomer.slurm_restart_count  # SLURM ends a job before it restarts it
    return not is_running(owner.pid, owner.process_start) if here else None


def _was_copied(owner: Owner, newcomer: Owner, here: bool) -> bool:
    """Whether ``owner`` owns another folder, of which this is a copy, with its ``owner.json``.

    A folder that was moved keeps its inode. Device numbers are of one machine only. And some file systems (sshfs,
    object stores) make inodes up: what lies at the same path is never taken for a copy.
    """
    if owner.folder_path in ("", newcomer.folder_path):
        return False
    moved_device = here and owner.folder_device != newcomer.folder_device
    return owner.folder_inode != newcomer.folder_inode or moved_device


def _stands_still(folder: Path, owner: Owner, still_s: float, say: Callable[[str], None]) -> bool:
    """Whether nothing moves for ``still_s`` seconds by our own clock; clocks of hosts differ, counters do not.

    Seconds in which we, or the file server, stood still ourselves do not count: the owner could not beat either.
    """
    file = heartbeat.file_of(folder, owner.attempt)
    counted, still, said = heartbeat.count(file), 0.0, False
    last = time.monotonic()
    while still < still_s:
        time.sleep(POLL_S)
        if heartbeat.count(file) != counted or current(folder) != owner:
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
