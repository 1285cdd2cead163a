"""Triplane's save, background save and load, as a run does them."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist

from tests.benchmarks.checkpoint import disk, memory
from training.checkpoint import Contents, folders, restore, save
from training.checkpoint.background.saver import BackgroundWriter
from training.checkpoint.callback import SaveCallback
from training.checkpoint.format import writer
from training.checkpoint.saving import saved_boxes
from training.config.checkpoint_config import CheckpointConfig
from training.loop import Callback
from training.progress import Progress
from training.step import RankParts

Numbers = dict[str, float]


def save_once(trainer: RankParts, root: Path) -> Numbers:
    """Seconds until committed, and this rank's growth in bytes."""
    progress, contents = Progress(iteration=1), Contents(keep=1)
    cost = memory.cost(
        lambda: save(root, progress, trainer.chunks, trainer.optimizer, trainer.ranks, contents), dist.barrier
    )
    return {"save_s": cost.seconds, "save_growth": float(cost.grown_bytes)}


def save_unhashed(trainer: RankParts, root: Path) -> Numbers:
    """The same with hashes that cost nothing: what hashing adds."""
    with without_hashes():
        return {"unhashed_save_s": save_once(trainer, root)["save_s"]}


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    """No byte is hashed while pieces are written."""
    with mock.patch.object(writer.xxhash, "xxh3_64", _NoHash), mock.patch.object(writer.xxhash, "xxh3_128", _NoHash):
        yield


class _NoHash:
    def __init__(self, *_data: object) -> None:
        """Nothing."""

    def update(self, _data: object) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        """A constant."""
        return "0"


class BackgroundSaves:
    """Saves as a run has them by default, with the writer process started and its memory in use."""

    def __init__(self, trainer: RankParts, root: Path) -> None:
        self.saves = SaveCallback(root, Contents(keep=1), trainer)
        self.saves.start(Progress())
        self.iteration = 0

    def once(self) -> Numbers:
        """Seconds until training goes on, until all is copied, and until it is committed; bytes of copy and growth."""
        self.iteration += 1
        cost = memory.cost(lambda: self.saves(Progress(iteration=self.iteration)), dist.barrier)
        began = time.perf_counter()
        self.saves.before_update()
        copy_s = cost.seconds + time.perf_counter() - began
        began = time.perf_counter()
        self.saves._hear(600.0)
        dist.barrier()
        writer = cast(BackgroundWriter, self.saves.writer)
        return {
            "stall_s": cost.seconds,
            "copy_s": copy_s,
            "background_save_s": copy_s + time.perf_counter() - began,
            "copy_bytes": float(writer._size),
            "stall_growth": float(cost.grown_bytes),
            "writer_anonymous": float(memory.resident("RssAnon", str(writer._process.pid))),
        }

    def close(self) -> None:
        """End the writer process."""
        Callback.stop(self.saves, Progress(), "done")
        if self.saves.writer is not None:
            self.saves.writer.close()


def load_once(trainer: RankParts, root: Path, verify: Literal["hashes", "sizes"]) -> Numbers:
    """Seconds of a load of files that are not in memory, verification included, and this rank's growth in bytes."""
    if trainer.ranks.rank == 0:
        disk.forget(path for folder in folders.complete(root) for path in folder.iterdir())
    cost = memory.cost(
        lambda: restore(root, CheckpointConfig(verify=verify), trainer.chunks, trainer.optimizer, trainer.ranks),
        dist.barrier,
    )
    return {f"load_{verify}_s": cost.seconds, f"load_{verify}_growth": float(cost.grown_bytes)}


def remove(root: Path, trainer: RankParts) -> None:
    """Make room for the next."""
    dist.barrier()
    if trainer.ranks.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()


def own_bytes(trainer: RankParts) -> int:
    """What this rank writes: its shard."""
    boxes = saved_boxes(trainer.chunks, trainer.optimizer, trainer.ranks)
    return sum(box.data.nbytes for box in boxes if box.writes)


def total_bytes(trainer: RankParts) -> int:
    """What all ranks write."""
    total = torch.tensor([own_bytes(trainer)])
    dist.all_reduce(total)
    return int(total)


def shard(trainer: RankParts) -> dict[str, Any]:
    """The size that growth is compared with."""
    return {"own_bytes": own_bytes(trainer)}
