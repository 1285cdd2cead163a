"""Where checkpoints lie and which of them counts. No torch here.

RUN_DIR/checkpoints/iter_0000100/    one checkpoint; it bears this name only when it is complete
RUN_DIR/checkpoints/latest           a text file: the name of the folder to continue from
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from parallel.errors import UserError

LATEST = "latest"
STATE = "state.json"
INDEX = ".metadata"  # what PyTorch's distributed checkpoint calls its table of contents
UNFINISHED = ".unfinished"
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
    """Whether ``folder`` holds a whole checkpoint, as far as its names and its main files tell."""
    return not folder.name.endswith(UNFINISHED) and (folder / STATE).is_file() and (folder / INDEX).is_file()


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, lowest iteration first."""
    numbered = {path: iteration_of(path) for path in root.iterdir()} if root.is_dir() else {}
    found = [path for path, number in numbered.items() if number is not None and is_complete(path)]
    return sorted(found, key=lambda path: numbered[path] or 0)


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


def find(path: str) -> Path:
    """What ``--checkpoint.load PATH`` means: a checkpoint, the newest in a folder of them, or a run's newest.

    Raises UserError, with what was found instead.
    """
    folder = Path(path).expanduser()
    if is_complete(folder):
        return folder
    for root in (folder, checkpoints(folder)):
        if (newest := latest(root)) is not None:
            return newest
    raise UserError(
        f"checkpoint.load {path}: expected a checkpoint (iter_..., with {STATE}), a folder of checkpoints or "
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


def begin(root: Path, iteration: int) -> Path:
    """An empty folder to write into, under a name that nothing takes for a checkpoint.

    What a killed save left behind is removed first.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"*{UNFINISHED}"):
        shutil.rmtree(left)
    folder = root / (name_of(iteration) + UNFINISHED)
    folder.mkdir()
    return folder


def add_files(folder: Path, files: Mapping[str, Path | str]) -> None:
    """Copy (a path) or write (a text) each of ``files`` into ``folder`` under its name."""
    for name, source in files.items():
        if isinstance(source, Path):
            shutil.copyfile(source, folder / name)
        else:
            (folder / name).write_text(source)


def commit(unfinished: Path, keep: int) -> Path:
    """Give a completely written folder its name, let ``latest`` name it, and delete what is beyond ``keep``.

    A kill in between leaves the earlier checkpoints, and ``latest`` names one of them or this one.
    """
    root, folder = unfinished.parent, unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    if folder.exists():  # this iteration once more, after a start from an earlier one
        folder.replace(folder.with_name(f"{folder.name}.replaced{UNFINISHED}"))
    unfinished.replace(folder)
    point_to(folder)
    prune(root, keep)
    return folder


def point_to(folder: Path) -> None:
    """Let ``latest`` name ``folder``; a reader sees the old name or the new one, never a part."""
    temporary = folder.parent / (LATEST + UNFINISHED)
    with temporary.open("w") as file:
        file.write(folder.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder.parent / LATEST)


def prune(root: Path, keep: int) -> None:
    """Delete all but ``keep`` complete checkpoints: ``latest`` always stays, then the highest iterations below it.

    Those above it are of a future that was abandoned when an earlier checkpoint was continued: they go first.
    """
    newest, found = latest(root), complete(root)
    place = found.index(newest) if newest else 0
    others = [*found[place + 1 :], *found[:place]]
    for path in others[: max(0, len(others) - (keep - 1))]:
        doomed = path.with_name(path.name + UNFINISHED)
        path.replace(doomed)  # so that a kill in the middle leaves nothing that looks complete
        shutil.rmtree(doomed)
    for left in root.glob(f"*.replaced{UNFINISHED}"):
        shutil.rmtree(left)
