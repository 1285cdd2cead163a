"""Where checkpoints lie and which of them counts. No torch here.

RUN_DIR/checkpoints/iter_0000100/         one checkpoint; it bears this name only when it is committed
RUN_DIR/checkpoints/iter_0000200.tmp-9f3a/    one being written by the attempt 9f3a of this run, or left by a killed one
RUN_DIR/checkpoints/iter_0000200.damaged/ one in whose place an older one was continued
RUN_DIR/checkpoints/latest                a text file: the name of the folder to continue from
RUN_DIR/checkpoints/latest_checkpointed_iteration.txt    the same as a number, where Megatron's scripts look for it
"""

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

from parallel.errors import UserError
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.writer import sync_folder, write_durably

LATEST, LATEST_OF_MEGATRON = "latest", "latest_checkpointed_iteration.txt"
STATE = "state.json"
TEMPORARY, DAMAGED = ".tmp-", ".damaged"
_NAME = re.compile(r"iter_(\d{7,15})")


def checkpoints(run_dir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def name_of(iteration: int) -> str:
    """``iter_0000100`` for 100."""
    return f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int | None:
    """The iteration that a checkpoint folder's name tells; None for another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` was committed: its manifest, which is written last, is there."""
    return TEMPORARY not in folder.name and (folder / MANIFEST).is_file()


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, lowest iteration first."""
    numbered = {path: iteration_of(path) for path in root.iterdir()} if root.is_dir() else {}
    found = [path for path, number in numbered.items() if number is not None and is_complete(path)]
    return sorted(found, key=lambda path: numbered[path] or 0)


def incomplete(root: Path) -> list[Path]:
    """Folders in ``root`` with a checkpoint's name but no manifest: it has been lost, since it came before the name."""
    there = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in there if iteration_of(path) is not None and path.is_dir() and not is_complete(path)]


def latest(root: Path) -> Path | None:
    """The checkpoint to continue from: the one that ``latest`` names, else that of the highest iteration.

    ``latest`` is not followed when it is missing, unreadable, or names no complete checkpoint of this folder.
    """
    try:
        named = root / (root / LATEST).read_text().strip()
    except (OSError, ValueError):  # ValueError: not text
        named = root
    if named.parent == root and iteration_of(named) is not None and is_complete(named):
        return named
    return next(reversed(complete(root)), None)


def candidates(root: Path) -> list[Path]:
    """The committed checkpoints in ``root`` in the order to try them: the latest, older ones, then abandoned ones."""
    newest, found = latest(root), complete(root)
    place = found.index(newest) if newest in found else -1
    return found[place::-1] + found[:place:-1] if place >= 0 else found[::-1]


def find(path: str) -> list[Path]:
    """What ``--checkpoint.load PATH`` means: a checkpoint, those in a folder of them, or a run's, the best first.

    Raises UserError, with what was found instead.
    """
    folder = Path(path).expanduser()
    if is_complete(folder):
        return [folder]
    for root in (folder, checkpoints(folder)):
        if found := candidates(root):
            return found
    raise UserError(
        f"checkpoint.load {path}: expected a checkpoint (iter_..., with {MANIFEST}), a folder of checkpoints or "
        f"a run's folder; found {_description(folder)}. Give the path of one that a run has completed."
    )


def _description(path: Path) -> str:
    if not path.exists():
        return "nothing there"
    if not path.is_dir():
        return "a file"
    names = sorted(entry.name for entry in path.iterdir())
    if path.name.startswith("iter_"):
        return f"an incomplete checkpoint, with {', '.join(names) or 'nothing in it'}"
    if not names:
        return "an empty folder"
    return f"a folder with {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"


def begin(root: Path, iteration: int, attempt: str) -> Path:
    """An empty folder to write into, under a name that nothing takes for a checkpoint.

    What killed or abandoned saves left behind is removed first: one run owns the folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"*{TEMPORARY}*"):
        remove(left)
    folder = root / f"{name_of(iteration)}{TEMPORARY}{attempt}"
    folder.mkdir()
    return folder


def copy(source: Path, target: Path) -> None:
    """A copy of a file that is on the disk when this returns."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def give_name(temporary: Path) -> Path:
    """Give a folder that has its manifest the name that makes it a checkpoint."""
    folder = temporary.with_name(temporary.name.partition(TEMPORARY)[0])
    if folder.exists():  # this iteration once more, after a start from an earlier one
        folder.replace(folder.with_name(f"{folder.name}{TEMPORARY}replaced"))
    temporary.replace(folder)
    sync_folder(folder.parent)
    return folder


def point_to(folder: Path) -> None:
    """Let ``latest`` name ``folder``; a reader sees the old name or the new one, never a part."""
    write_durably(folder.parent / LATEST, f"{folder.name}\n".encode())
    write_durably(folder.parent / LATEST_OF_MEGATRON, f"{iteration_of(folder)}\n".encode())


def set_aside(folder: Path) -> Path:
    """Take the checkpoint's name from a damaged one, so that no start and no retention counts it: its new path.

    It stays on the disk, for whoever has better copies of its files and gives it its name back.
    """
    names = itertools.chain([DAMAGED], (f"{DAMAGED}-{number}" for number in itertools.count(2)))
    target = next(path for name in names if not (path := folder.with_name(f"{folder.name}{name}")).exists())
    folder.replace(target)
    sync_folder(folder.parent)
    return target


def prune(root: Path, keep: int, retain_interval: int | None = None) -> None:
    """Delete all but ``keep`` complete checkpoints: ``latest`` always stays, then the highest iterations below it.

    Those above it are of a future that was abandoned when an earlier checkpoint was continued: they go first.
    Iterations that ``retain_interval`` divides stay, and do not count. What the disk does not let go of stays too, for
    the next time: a checkpoint that was committed has not failed for that.
    """
    for path in candidates(root)[keep:]:
        if retain_interval and (iteration_of(path) or 0) % retain_interval == 0:
            continue
        doomed = path.with_name(f"{path.name}{TEMPORARY}removed")
        with contextlib.suppress(OSError):
            path.replace(doomed)  # so that a kill in the middle leaves nothing that looks complete
            remove(doomed)
    for left in root.glob(f"*{TEMPORARY}replaced"):
        with contextlib.suppress(OSError):
            remove(left)


def remove(path: Path) -> None:
    """Delete a folder or a file that nobody needs."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
