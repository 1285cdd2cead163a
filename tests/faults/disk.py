"""A disk that is full, out of names, read-only or gone: what a run says, whether it goes on, and what it leaves.

Each case has a small file system (tmpfs) of its own, mounted in a namespace of its own; only root can do that.
"""

import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.launch import Identity
from program.errors import UserError
from tests.faults.damages import Heard
from tests.faults.results import CaseResult, Store
from tests.faults.trainer import TINY, FaultTrainer, configuration, on_ranks, started
from training import checkpoint
from training.checkpoint import folders
from training.checkpoint.background.saver import BackgroundWriter
from training.checkpoint.callback import SaveCallback
from training.checkpoint.format.verify import damages
from training.config.checkpoint_config import CheckpointConfig
from training.step import StepResult

CAMPAIGN = "disk"
TITLE = "Disks that are full, out of names, read-only or gone"
TEXT = """Two ranks train and save at every iteration into a file system of 8 MiB, in the background or while training
waits; then the disk fails. The message must name the folder and what is needed (bytes, files) or what the system said;
training must go on as long as there is a good checkpoint, which must stay whole, and stop with that message where there
is none; the next save behind the repair must be committed."""

RANKS = 2
SIZE_KIB = 8192
NAMES = 200
LIMIT_S = 60


class DiskCaseFailed(Exception):
    """What was not as it must be."""


class DiskScene:
    """A rank that trains and saves; on rank 0 what is done to the disk, and what was said."""

    def __init__(self, trainer: FaultTrainer, heard: Heard, disk: Path, keep: int) -> None:
        self.trainer, self.heard, self.disk, self.root = trainer, heard, disk, disk / "checkpoints"
        contents = checkpoint.Contents(keep=keep, texts={"config.toml": "x = 1\n"})
        self.saves = SaveCallback(self.root, contents, trainer.parts)

    def start(self) -> str | None:
        """What stands in the way of the run before its first step; the same on every rank."""
        try:
            self.saves.start(self.trainer.progress)
        except UserError as error:
            return str(error)
        return None

    def save(self) -> str:
        """Train an iteration, save, and wait until it is known what came of it: what was said, on rank 0."""
        self.trainer.train(self.trainer.progress.iteration + 1)
        self.saves(self.trainer.progress)
        self.saves.before_update()
        deadline = time.monotonic() + 30
        while self.saves.writer is not None and self.saves.writer.is_busy and time.monotonic() < deadline:
            self.saves.after_step(self.trainer.progress, cast(StepResult, None))
            time.sleep(0.005)
        dist.barrier()
        return self.heard()

    def to_disk(self, change: Callable[[Path], None]) -> None:
        """Do something to the disk, on rank 0."""
        if self.trainer.ranks.rank == 0:
            change(self.disk)
        dist.barrier()

    def expect(self, said: str, *texts: str) -> None:
        """On rank 0: all of ``texts`` were said."""
        if missing := [text for text in texts if text not in said] if self.trainer.ranks.rank == 0 else []:
            raise DiskCaseFailed(f"expected {missing} in {said!r}")

    def expect_committed(self, said: str, iteration: int) -> None:
        """On rank 0: this iteration was committed, is the newest, and it and all others are whole."""
        self.expect(said, f"checkpoint {folders.name_of(iteration)} COMMITTED")
        self.expect_newest(iteration)

    def expect_newest(self, iteration: int) -> None:
        """On rank 0: a start would go on from this iteration; whatever is visible is whole."""
        if self.trainer.ranks.rank:
            return
        newest = folders.latest(self.root)
        if newest is None or folders.iteration_of(newest) != iteration:
            raise DiskCaseFailed(f"expected the newest checkpoint to be of iteration {iteration}, found {newest}")
        for path in folders.complete(self.root):
            if found := damages(path, "hashes"):
                raise DiskCaseFailed(f"{path}: {found[0].text}")

    @property
    def needed(self) -> str:
        """Bytes of a checkpoint, as messages have them."""
        return f"{self.saves.needed_bytes:,}"


# ---- what is done to the disk


def fill(spared: int) -> Callable[[Path], None]:
    """Take all space but ``spared`` bytes."""

    def change(disk: Path) -> None:
        free = os.statvfs(disk)
        with (disk / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - spared)

    return change


def use_names(spared: int) -> Callable[[Path], None]:
    """Take all names (inodes) but ``spared``."""

    def change(disk: Path) -> None:
        (disk / "names").mkdir()
        for number in range(os.statvfs(disk).f_favail - spared):
            (disk / f"names/{number}").touch()

    return change


def free_again(disk: Path) -> None:
    """Take back ``fill`` and ``use_names``."""
    (disk / "filler").unlink(missing_ok=True)
    shutil.rmtree(disk / "names", ignore_errors=True)


def make(mode: str) -> Callable[[Path], None]:
    """Let the disk be read-only (``ro``), or writable again (``rw``)."""

    def change(disk: Path) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)

    return change


def take_away(disk: Path) -> None:
    """The folder of checkpoints is not there any more."""
    (disk / "checkpoints").rename(disk / "elsewhere")


def delete_unfinished(disk: Path) -> None:
    """The folders that are being written into."""
    for left in (disk / "checkpoints").glob(f"*{folders.TEMPORARY}*"):
        shutil.rmtree(left)


# ---- the cases


def full_at_the_start(world: DiskScene) -> None:
    """Before the first step, on every rank."""
    world.to_disk(fill(100_000))
    found = world.start()
    if found is None or f"a checkpoint takes {world.needed} bytes, but {world.root} has " not in found:
        raise DiskCaseFailed(f"expected a refusal with the bytes needed, found {found!r}")


def full_later(world: DiskScene) -> None:
    """Between two saves; then there is room again."""
    world.start()
    world.expect_committed(world.save(), 1)
    world.to_disk(fill(100_000))
    said = world.save()
    world.expect(said, "iter_0000002 FAILED", f"takes {world.needed} bytes, but {world.root} has ", "iter_0000001")
    world.expect_newest(1)
    world.to_disk(free_again)
    world.expect_committed(world.save(), 3)


def full_while_writing(world: DiskScene) -> None:
    """There is room for the tensors, not for the tables beside them: the disk says so in the middle of a save."""
    world.start()
    world.expect_committed(world.save(), 1)
    world.to_disk(fill(world.saves.needed_bytes + 8192))
    said = world.save()
    world.expect(said, "iter_0000002 FAILED", "No space left on device", str(world.root), "it takes ", "free there: ")
    world.expect_newest(1)
    world.to_disk(free_again)
    world.expect_committed(world.save(), 3)


def full_of_old_ones(world: DiskScene) -> None:
    """Room for two, and three are to be kept: the oldest makes room, and the save is tried again by itself."""
    world.start()
    world.to_disk(lambda disk: fill(world.saves.needed_bytes * 29 // 10)(disk))
    world.expect_committed(world.save(), 1)
    world.expect_committed(world.save(), 2)
    world.expect(world.save(), "iter_0000003 FAILED", f"takes {world.needed} bytes", "iter_0000002")
    if world.trainer.ranks.rank == 0 and not world.saves.requests().save:
        raise DiskCaseFailed("the save that failed is not tried again")
    world.expect_committed(world.save(), 4)


def full_before_the_first(world: DiskScene) -> None:
    """There is nothing to come back to: the run ends."""
    world.start()
    world.to_disk(fill(100_000))
    world.save()


def no_names(world: DiskScene) -> None:
    """No inode for the files of a checkpoint."""
    world.start()
    world.expect_committed(world.save(), 1)
    world.to_disk(use_names(5))
    world.expect(world.save(), "iter_0000002 FAILED", f"{world.root} can take 5 more (inodes)", "files, but")
    world.expect_newest(1)
    world.to_disk(free_again)
    world.expect_committed(world.save(), 3)


def read_only_at_the_start(world: DiskScene) -> None:
    """Before the first step, on every rank."""
    world.to_disk(make("ro"))
    found = world.start()
    if found is None or f"cannot be written to {world.root}: Read-only file system" not in found:
        raise DiskCaseFailed(f"expected a refusal that names the folder, found {found!r}")


def read_only_later(world: DiskScene) -> None:
    """With two checkpoints, of which none can be deleted either."""
    world.start()
    world.save()
    world.expect_committed(world.save(), 2)
    world.to_disk(make("ro"))
    said = world.save()
    world.expect(said, "iter_0000003 FAILED", f"cannot be written to {world.root}: Read-only file system")
    world.expect_newest(2)
    world.expect(world.save(), "iter_0000004 FAILED")
    world.to_disk(make("rw"))
    world.expect_committed(world.save(), 5)


def gone(world: DiskScene) -> None:
    """The folder of checkpoints was moved away: the next save says so, and creates it."""
    world.start()
    world.expect_committed(world.save(), 1)
    world.to_disk(take_away)
    said = world.save()
    world.expect(said, f"{world.root} is gone, and the checkpoints in it")
    world.expect_committed(said, 2)


def gone_while_writing(world: DiskScene) -> None:
    """The folder that is being written into was deleted under the writers."""
    world.start()
    world.expect_committed(world.save(), 1)
    writer = cast(BackgroundWriter, world.saves.writer)
    os.kill(writer._process.pid, signal.SIGSTOP)
    world.trainer.train(2)
    world.saves(world.trainer.progress)
    world.saves.before_update()
    world.to_disk(delete_unfinished)
    os.kill(writer._process.pid, signal.SIGCONT)
    said = world.save()
    world.expect(said, "iter_0000002 FAILED", "No such file or directory", str(world.root))
    world.expect_committed(said, 3)


Scenario = Callable[[DiskScene], None]

CASES: Mapping[str, Scenario] = {
    "full before the first step": full_at_the_start,
    "full between two saves": full_later,
    "full in the middle of a save": full_while_writing,
    "full of older checkpoints": full_of_old_ones,
    "full before the first checkpoint": full_before_the_first,
    "no inodes left": no_names,
    "read-only before the first step": read_only_at_the_start,
    "read-only between two saves": read_only_later,
    "folder moved away between two saves": gone,
    "folder deleted in the middle of a save": gone_while_writing,
}
ENDS: Mapping[Scenario, str] = {full_before_the_first: "FAILED, and there is no other one"}
"""Cases that end the run, with what is then said."""
ONLY_BACKGROUND: Sequence[Scenario] = (gone_while_writing,)
KEEP: Mapping[Scenario, int] = {full_of_old_ones: 3}
SEEN: Mapping[Scenario, str] = {
    full_at_the_start: "refused before step 1",
    read_only_at_the_start: "refused before step 1",
    full_before_the_first: "said; the run ends",
    full_of_old_ones: "said; training goes on; an old one makes room, tried again, committed",
    gone: "said; created again, committed",
}
GOES_ON = "said; training goes on; committed when the disk is back"


def cases(count: int) -> list[str]:
    """Every failure, in the background and while training waits."""
    every = [
        f"{name}, {how}"
        for name, scenario in CASES.items()
        for how in ("in the background", "while training waits")
        if how == "in the background" or scenario not in ONLY_BACKGROUND
    ]
    return every[:count]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases. Raises PermissionError where a file system cannot be mounted."""
    for number, case in enumerate(todo):
        began = time.monotonic()
        name, _, how = case.partition(", ")
        problem = in_own_mounts(scratch / str(number), CASES[name], background=how == "in the background")
        outcome = SEEN.get(CASES[name], GOES_ON)
        seconds = time.monotonic() - began
        store.add(
            CaseResult(campaign=CAMPAIGN, case=case, kind=name, outcome=outcome, seconds=seconds, problem=problem)
        )
        printed()


def in_own_mounts(folder: Path, scenario: Scenario, *, background: bool) -> str:
    """Run a case in a process of its own, whose mounts end with it: what is wrong, or an empty text."""
    folder.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            (folder / "problem").write_text(_mounted(folder, scenario, background))
            code = 0
        except BaseException:
            (folder / "problem").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    os.waitpid(pid, 0)
    text = (folder / "problem").read_text()
    if "PermissionError" in text and "unshare" in text:
        raise PermissionError("a file system of its own cannot be mounted for these cases: run them as root")
    return text


def _mounted(folder: Path, scenario: Scenario, background: bool) -> str:
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    disk = folder / "disk"
    disk.mkdir()
    options = f"size={SIZE_KIB}k,nr_inodes={NAMES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "triplane-faults", str(disk)], check=True)
    failure = on_ranks(RANKS, folder / "logs", DiskTask(scenario, disk, background)) or ""
    if (expected := ENDS.get(scenario)) is not None:
        return "" if expected in failure else f"expected the run to end with {expected!r}, found {failure!r}"
    return failure


@dataclass(frozen=True)
class DiskTask:
    """A case, on every rank."""

    scenario: Scenario
    disk: Path
    background: bool

    def __call__(self, identity: Identity) -> None:
        signal.alarm(LIMIT_S)
        heard = Heard(os.memfd_create("console"))
        fd = heard.console if identity.rank == 0 else None
        config = replace(
            configuration(ParallelConfig(distributed_timeout_minutes=0.5), **TINY),
            checkpoint=CheckpointConfig(async_save=self.background),
        )
        with started(config, identity, fd) as trainer:
            world = DiskScene(trainer, heard, self.disk, KEEP.get(self.scenario, 2))
            self.scenario(world)
            if world.saves.writer is not None:
                world.saves.writer.close()
