"""Disk, Triplane and megatron-core in turns, on the ranks of one run."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from parallel.launch import Identity
from tests.benchmarks.checkpoint import disk, megatron, ours
from tests.benchmarks.checkpoint.trainer import configuration, started
from training.step import RankParts

FORMS: tuple[megatron.Form, ...] = ("fully_reshardable", "dp_reshardable")


@dataclass(kw_only=True, frozen=True)
class Rounds:
    """What to measure."""

    folder: Path
    """On the disk that is measured."""
    rounds: int
    """After one that does not count."""
    num_layers: int
    hidden_size: int


def measure(identity: Identity, job: Rounds, output: Path) -> None:
    """On every rank: all rounds; each rank leaves its numbers in ``output.RANK``."""
    with started(configuration(job.num_layers, job.hidden_size), identity) as trainer:
        inherited = multiprocessing.active_children()
        found = list(_rounds(trainer, job))
        megatron.end_helpers(inherited)
        result = {**ours.shard(trainer), "total_bytes": ours.total_bytes(trainer), "rounds": found}
        output.with_suffix(f".{identity.rank}").write_text(json.dumps(result))


def _rounds(trainer: RankParts, job: Rounds) -> Iterator[dict[str, float]]:
    background = ours.BackgroundSaves(trainer, job.folder / "background")
    source = _source(trainer)
    for number in range(job.rounds + 1):
        found = _yardsticks(trainer, source, job.folder) | _ours(trainer, job.folder / "ours") | background.once()
        for form in FORMS:
            folder = job.folder / form
            found |= megatron.save_once(trainer, folder, form) | megatron.load_once(trainer, folder, form)
            ours.remove(folder, trainer)
        if number:
            yield found
            if trainer.ranks.rank == 0:
                os.write(1, b".")
    background.close()
    ours.remove(job.folder / "background", trainer)
    source.unlink(missing_ok=True)


def _ours(trainer: RankParts, root: Path) -> dict[str, float]:
    found = ours.save_unhashed(trainer, root)
    ours.remove(root, trainer)
    found |= ours.save_once(trainer, root)
    for verify in ("sizes", "hashes"):
        found |= ours.load_once(trainer, root, verify)
    ours.remove(root, trainer)
    return found


def _source(trainer: RankParts) -> Path:
    """As many bytes as a checkpoint has, in memory."""
    path = Path("/dev/shm") / f"triplane-benchmark-{os.getpid()}"
    size = ours.total_bytes(trainer)
    return disk.random_file(path, size) if trainer.ranks.rank == 0 else path


def _yardsticks(trainer: RankParts, source: Path, folder: Path) -> dict[str, float]:
    """On rank 0, while the others wait."""
    found = {}
    if trainer.ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "dd"
        found = {"dd_write_s": disk.write_s(source, target), "dd_read_s": disk.read_s(target)}
        target.unlink()
    dist.barrier()
    return found


def clean(folder: Path) -> None:
    """Nothing is left behind."""
    shutil.rmtree(folder, ignore_errors=True)
