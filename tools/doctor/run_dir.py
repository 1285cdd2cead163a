"""What a run asks of the file system of its folder, on one node.

Checkpoints are committed by rename and fsync; a run claims its folder by a hard link (training/run_lock/lock.py); the
cache of prepared data is guarded by flock, with a fall-back.
"""

import contextlib
import fcntl
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from program.durable import replace_file
from program.untrusted import read_text
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, judged

GROUP = "run_dir"
SLOW_S = 0.25
"""A small file written, fsynced and renamed; a local disk takes 1 to 20 ms, a healthy NFS or Lustre up to 50."""
FOLDER = "doctor"
"""Below the run's folder."""


def folder_of(run_dir: Path) -> Path:
    """Where the doctor writes."""
    return run_dir / FOLDER


def token_path(run_dir: Path, rank: int) -> Path:
    """The small file that ``rank`` writes and other nodes read."""
    return folder_of(run_dir) / f"token-{rank:05d}"


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: "token" that this node's file holds."""
    if situation.run_dir is None:
        return NodeCheck(findings=[judged(GROUP, "shared folder", "not checked", "no --run_dir was given")])
    folder = folder_of(situation.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        replace_file(token_path(situation.run_dir, situation.rank), token.encode())
    except OSError as error:
        found = f"{situation.run_dir} cannot be written: {error.strerror or error}"
        fix = "mount the shared folder here, or use another --run_dir"
        return NodeCheck(findings=[judged(GROUP, "write", "wrong", found, "a writable folder", fix, setting=True)])
    kind = file_system(folder)
    scratch = folder / f"scratch-{situation.rank:05d}"
    with _scratch(scratch):
        findings = [finding for check in CHECKS if (finding := check(scratch)) is not None]
        if not findings:
            found = f"rename, fsync, hard link, exclusive create and flock work ({kind})"
            findings = [judged(GROUP, "operations", "ok", found)]
        findings.append(_speed(scratch))
    return NodeCheck(findings=findings, facts={"token": token})


def file_system(path: Path) -> str:
    """Its type as Linux names it (nfs4, lustre, ext4, …): the mount whose path is the longest above ``path``."""
    best, kind = "", "unknown"
    try:
        lines = read_text(Path("/proc/mounts")).splitlines()
    except OSError:
        return kind
    there = str(path.resolve())
    for _, mount, of_kind, *_ in (line.split() for line in lines):
        place = mount.replace("\\040", " ")
        if (there == place or there.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, kind = place, of_kind
    return kind


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[None]:
    try:
        path.mkdir(exist_ok=True)
        yield
    finally:
        for file in path.glob("*"):
            file.unlink(missing_ok=True)
        path.rmdir()


def _wrong(check: str, error: OSError | str, fix: str, warning: bool = False) -> Finding:
    words = error if isinstance(error, str) else (error.strerror or str(error))
    return judged(GROUP, check, "warning" if warning else "wrong", words, "it works", fix, setting=True)


def _rename(scratch: Path) -> Finding | None:
    try:
        for text in ("old", "new"):
            replace_file(scratch / "renamed", text.encode())
        if read_text(scratch / "renamed") != "new":
            return _wrong("rename", "the old content is there after a rename", "use another file system")
    except OSError as error:
        return _wrong("rename and fsync", error, "use another file system: checkpoints are committed by rename")
    return None


def _exclusive(scratch: Path) -> Finding | None:
    try:
        for _ in range(2):
            os.close(os.open(scratch / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return None
    except OSError as error:
        return _wrong("exclusive create", error, "use another file system")
    return _wrong("exclusive create", "one name was created twice", "use another file system")


def _link(scratch: Path) -> Finding | None:
    try:
        (scratch / "linked").write_text("")
        (scratch / "link").hardlink_to(scratch / "linked")
    except OSError as error:
        return _wrong("hard link", error, "use another file system: a run claims its folder by a hard link")
    return None


def _lock(scratch: Path) -> Finding | None:
    with (scratch / "locked").open("w") as first, (scratch / "locked").open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _wrong("flock", error, "mount with locks (Lustre: -o flock); data is prepared without them", True)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _wrong("flock", "a lock is given twice", "mount with locks", warning=True)
    return None


CHECKS: tuple[Callable[[Path], Finding | None], ...] = (_rename, _exclusive, _link, _lock)


def _speed(scratch: Path) -> Finding:
    times = []
    for turn in range(5):
        began = time.perf_counter()
        replace_file(scratch / "small", f"{turn}".encode() * 4096)
        times.append(time.perf_counter() - began)
    typical = statistics.median(times)
    found, numbers = "{:.1f} ms for 4 KiB with fsync and rename", [typical * 1e3]
    if typical <= SLOW_S:
        return judged(GROUP, "small write", "ok", found, setting=True, numbers=numbers)
    expected, fix = f"below {SLOW_S * 1e3:.0f} ms", "the file system is loaded, or far: many small files will be slow"
    return judged(GROUP, "small write", "warning", found, expected, fix, setting=True, numbers=numbers)
