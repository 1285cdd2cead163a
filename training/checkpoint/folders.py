"""Where checkpoints lie and which of them counts.

RUN_DIR/checkpoints/iter_0000100/         one checkpoint; it bears this name only when it is committed
RUN_DIR/checkpoints/iter_0000200.tmp-9f3a/    one being written by the attempt 9f3a of this run, or left by a killed one
RUN_DIR/checkpoints/iter_0000200.damaged/ one in whose place an older one was continued
RUN_DIR/checkpoints/iter_0000200.replaced/ one of this iteration from before a start from an earlier one
RUN_DIR/checkpoints/latest                a text file: the name of the folder to continue from
RUN_DIR/checkpoints/uploading             likewise: the one that is on its way into checkpoint.bucket
RUN_DIR/checkpoints/latest_checkpointed_iteration.txt    the same as a number, where Megatron's scripts look for it
"""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from program.durable import replace_file, sync_folder
from program.errors import UserError
from program.untrusted import InputError, read_text
from training.checkpoint.foreign import recognise
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.verify import damages
from training.checkpoint.lineage import LineageCommit, in_order, newest, read_commit

LATEST, LATEST_OF_MEGATRON = "latest", "latest_checkpointed_iteration.txt"
UPLOADING = "uploading"
STATE = "state.json"
TEMPORARY, DAMAGED, REPLACED = ".tmp-", ".damaged", ".replaced"
PROBE = ".probe-"
"""Begins the names by which a save is tried in small."""
NAME_BYTES = 4096
"""At most in ``latest``: one name."""
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
    """Whether ``folder`` was committed: it was renamed to its own name, and its manifest is there."""
    return TEMPORARY not in folder.name and REPLACED not in folder.name and (folder / MANIFEST).is_file()


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, lowest iteration first."""
    numbered = {path: iteration_of(path) for path in root.iterdir()} if root.is_dir() else {}
    found = [path for path, number in numbered.items() if number is not None and is_complete(path)]
    return sorted(found, key=lambda path: numbered[path] or 0)


def incomplete(root: Path) -> list[Path]:
    """Folders in ``root`` with a checkpoint's name but no manifest: it has been lost, since it came before the name."""
    there = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in there if iteration_of(path) is not None and path.is_dir() and not is_complete(path)]


def commits(root: Path) -> list[LineageCommit]:
    """Every complete checkpoint in ``root`` with what its manifest says, lowest iteration first."""
    found = []
    for path in complete(root):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on has just removed or renamed it
            found.append(read_commit(path, iteration_of(path) or 0))
    return found


def misnamed(root: Path) -> list[LineageCommit]:
    """Complete checkpoints whose manifest tells another iteration than their name. They do not count as either."""
    return [one for one in commits(root) if one.is_misnamed]


def latest(root: Path) -> Path | None:
    """The checkpoint to continue from, see ``candidates``."""
    return next(iter(candidates(root)), None)


def named_latest(root: Path) -> tuple[Path | None, int]:
    """What ``latest`` names, and when it was written, in ns. None where it is missing, unreadable, or names nothing
    complete in this folder."""
    named = _named(root, LATEST)
    with contextlib.suppress(OSError):
        return (named, (root / LATEST).stat().st_mtime_ns) if named else (None, 0)
    return None, 0


def uploading(root: Path) -> Path | None:
    """The checkpoint that is on its way into ``checkpoint.bucket``."""
    return _named(root, UPLOADING)


def _named(root: Path, file: str) -> Path | None:
    """The complete checkpoint that a text file in ``root`` names."""
    with contextlib.suppress(OSError, InputError):
        named = root / read_text(root / file, NAME_BYTES).strip()
        if named.parent == root and iteration_of(named) is not None and is_complete(named):
            return named
    return None


def candidates(root: Path) -> list[Path]:
    """The committed checkpoints in ``root`` in the order to try them, see ``in_turn``."""
    return [one.path for one in in_turn(root)]


def in_turn(root: Path | None, elsewhere: Sequence[LineageCommit] = ()) -> list[LineageCommit]:
    """The commits in ``root``, if there is one, and copies of the run's elsewhere, in the order to try them, the one to
    continue from first; of what is in both places, the one in ``root``.

    That is the one that ``latest`` names, or a newer one that descends from it (see ``lineage.newest``); then those it
    descends from, other earlier ones, and at last those of later iterations, of a future that was given up.
    """
    found = [one for one in commits(root) if not one.is_misnamed] if root else []
    known = {one.hash for one in found}
    found += [one for one in elsewhere if one.hash not in known]
    named, written_ns = named_latest(root) if root else (None, 0)
    first = newest(found, next((one for one in found if one.path == named), None), written_ns)
    return [] if first is None else in_order(found, first)


def ahead(root: Path, chosen: Path) -> list[Path]:
    """Complete checkpoints of later iterations than ``chosen``, which a run that continues it has not come to yet."""
    reached = iteration_of(chosen) or 0
    return [path for path in complete(root) if (iteration_of(path) or 0) > reached]


def find(path: str, say: Callable[[str], None] = lambda _: None, name: str = "checkpoint.load") -> list[Path]:
    """What ``--checkpoint.load PATH`` means: a checkpoint, those in a folder of them, or a run's, the best first.

    name: the field that says so. say: called for each later one whose manifest is gone, since an older one is then
    taken for the newest.
    Raises UserError, with what was found instead.
    """
    folder = Path(path).expanduser()
    if is_complete(folder):
        return [folder]
    for root in (folder, checkpoints(folder)):
        if found := candidates(root):
            for lost in incomplete(root):
                if (iteration_of(lost) or 0) > (iteration_of(found[0]) or 0):
                    say(f"warning: {lost} is damaged: {lost / MANIFEST}: expected, not found; taking {found[0].name}")
            return found
    if (foreign := recognise(folder)) is not None:
        command = foreign.command("CONVERTED", "RECIPE.toml")
        raise UserError(f"{name} {path}: {foreign.description}. Convert it, and give the result: {command}")
    raise UserError(
        f"{name} {path}: expected a checkpoint (iter_..., with {MANIFEST}), a folder of checkpoints or "
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


def begin_unfinished(root: Path, iteration: int, attempt: str) -> Path:
    """An empty folder to write into, under a name that nothing takes for a checkpoint.

    What killed or abandoned saves left behind is removed first: one run owns the folder. Another's start may probe it
    at this moment, before it is refused, and remove its probe itself.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"*{TEMPORARY}*"):
        remove(left)
    for left in root.glob(f"{PROBE}*"):
        with contextlib.suppress(FileNotFoundError):
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
    """Give a folder that has its manifest the name that makes it a checkpoint.

    One that has this name already, of a future that was given up, is kept beside it until ``prune`` has seen that this
    one is whole; ``recover`` brings it back where a kill came between.
    """
    folder = temporary.with_name(temporary.name.partition(TEMPORARY)[0])
    if folder.exists():
        folder.replace(_free(folder, REPLACED))
    temporary.replace(folder)
    sync_folder(folder.parent)
    return folder


def recover(root: Path) -> list[Path]:
    """Give checkpoints their names back that a killed commit has left without a successor: their paths.

    What a killed start was uploading is not uploaded any more.
    """
    found = []
    with contextlib.suppress(OSError):
        (root / UPLOADING).unlink(missing_ok=True)
    for left in sorted(root.glob(f"*{REPLACED}*")) if root.is_dir() else []:
        folder = left.with_name(left.name.partition(REPLACED)[0])
        if not folder.exists() and (left / MANIFEST).is_file():
            left.replace(folder)
            found.append(folder)
    return found


def point_to(folder: Path) -> None:
    """Let ``latest`` name ``folder``; a reader sees the old name or the new one, never a part."""
    replace_file(folder.parent / LATEST, f"{folder.name}\n".encode())
    replace_file(folder.parent / LATEST_OF_MEGATRON, f"{iteration_of(folder)}\n".encode())


def set_aside(folder: Path) -> Path:
    """Take the checkpoint's name from a damaged one, so that no start and no retention counts it: its new path.

    It stays on the disk, so that an operator with good copies of its files can restore its name.
    """
    target = _free(folder, DAMAGED)
    folder.replace(target)
    sync_folder(folder.parent)
    return target


def _free(folder: Path, ending: str) -> Path:
    """A path beside ``folder``, named after it, that nothing has."""
    endings = itertools.chain([ending], (f"{ending}-{number}" for number in itertools.count(2)))
    return next(path for one in endings if not os.path.lexists(path := folder.with_name(f"{folder.name}{one}")))


def too_old(
    order: Sequence[LineageCommit], keep: int, retain_interval: int | None, milestones: Sequence[int]
) -> list[LineageCommit]:
    """What retention does not keep of commits in the order of ``in_turn``, see ``prune``."""
    behind = [one for one in order if one.iteration <= order[0].iteration]
    kept = {one.iteration for one in behind if retain_interval and one.iteration % retain_interval == 0}
    return [one for one in behind[keep:] if one.iteration not in kept.union(milestones)]


def prune(root: Path, keep: int, retain_interval: int | None = None, milestones: Sequence[int] = ()) -> None:
    """Delete all but ``keep`` complete checkpoints: the latest always stays, then those it descends from.

    Later iterations, which the run has not come to again, stay and do not count, nor do ``milestones`` and those that
    ``retain_interval`` divides, nor the one that is on its way into a bucket.
    What the latest does not descend from goes only when every byte of the latest was read and is good. What the disk
    does not let go of stays for the next time: a checkpoint that was committed has not failed for that.
    """
    order = in_turn(root)
    if not order:
        return
    last, taken = order[0], uploading(root)
    doomed = [one for one in too_old(order, keep, retain_interval, milestones) if one.path != taken]
    replaced = sorted(root.glob(f"*{REPLACED}*"))
    strangers = [one for one in doomed if last.lineage.number and not last.descends_from(one)]
    if (strangers or replaced) and damages(last.path, "hashes"):
        doomed, replaced = [one for one in doomed if one not in strangers], []
    for path in [*(one.path for one in doomed), *replaced]:
        gone = path.with_name(f"{path.name}{TEMPORARY}removed")
        with contextlib.suppress(OSError):
            path.replace(gone)  # so that a kill in the middle leaves nothing that looks complete
            remove(gone)


def remove(path: Path) -> None:
    """Delete a folder or a file that is not needed any more; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
