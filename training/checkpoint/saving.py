"""Write a checkpoint, by all ranks together, and wait for it. What one rank finds out all act on alike."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from parallel.ddp import Chunks
from parallel.errors import SharedMistake, UserError
from parallel.groups import Ranks
from parallel.regions import Box
from training.checkpoint import committing, folders, model_state, optimizer_state, rng, storage
from training.checkpoint.model_state import model_boxes, settled
from training.checkpoint.state import JSON, State, encoded
from training.progress import Progress
from training.run_lock.lock import RunLock


def on_first_rank[T](action: Callable[[], T], ranks: Ranks) -> T:
    """Rank 0 does it; every rank gets what came of it, or raises the same SharedMistake or OSError.

    Ranks go on only when it is done, so this is a barrier too. What comes of it must be small; it travels
    pickled.
    """
    outcome: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = SharedMistake(str(error))
        except OSError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device=ranks.device)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_every_rank[T](action: Callable[[], T], ranks: Ranks) -> T:
    """Each rank does it; if one fails with an OSError, every rank raises that rank's.

    Ranks go on only when all are done. One number is reduced; more travels only after a failure.
    """
    result, own = None, None
    try:
        result = action()
    except OSError as error:
        own = error
    failed = torch.tensor([0 if own is None else ranks.rank + 1], device=ranks.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if rank := int(failed):
        texts: list[Any] = [None if own is None else f"rank {ranks.rank} of {ranks.identity.world_size}: {own}"]
        dist.broadcast_object_list(texts, src=rank - 1, device=ranks.device)
        raise OSError(texts[0])
    return result  # type: ignore[return-value]


def gathered[T](own: list[T], ranks: Ranks) -> list[T]:
    """The ranks' lists as one, the same on every rank. Where all are empty, as a rule, one number is reduced."""
    count = torch.tensor([len(own)], device=ranks.device)
    dist.all_reduce(count)
    if not int(count):
        return []
    lists: list[Any] = [None] * ranks.identity.world_size
    dist.all_gather_object(lists, own)
    return [item for found in lists for item in found]


@dataclass(kw_only=True, slots=True, frozen=True)
class Contents:
    """What lies in a checkpoint beside tensors, and which others it lets live."""

    keep: int
    """Newest checkpoints to keep in all."""
    retain_interval: int | None = None
    """Iterations that this divides are kept for good."""
    entries: Mapping[str, JSON] = field(default_factory=dict)
    """For ``state.json``."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Small files by name."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy, by name."""
    parent: str | None = None
    """The checkpoint of the same folder that the first one descends from, by name; later ones from the one before."""
    loaded: str | None = None
    """``hash`` of the run's own checkpoint that this start went back to, see ``Lineage``."""


@torch.no_grad()
def save(
    root: Path,
    progress: Progress,
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    ranks: Ranks,
    contents: Contents,
    lock: RunLock | None = None,
) -> Path:
    """Write ``root/iter_N`` from all ranks; when committed, let ``latest`` name it.

    Each rank writes its own share of the optimizer's state; nothing is gathered. ``lock``: on rank 0, proof that the
    run's folder is still this start's. Raises OSError on every rank where one cannot write; earlier checkpoints are
    untouched then.
    """
    folder = begin_save(root, progress, ranks)
    state = state_of(progress, optimizer, ranks, contents)
    with settled(chunks):
        boxes = saved_boxes(chunks, optimizer, ranks)
        on_every_rank(lambda: storage.write(folder, boxes, ranks.rank), ranks)

    def commit() -> Path:
        path, _ = committing.commit(
            folder,
            writers(ranks),
            texts={**contents.texts, folders.STATE: encoded(state)},
            copies={name: str(source) for name, source in contents.copies.items()},
            about=about(state),
            keep=contents.keep,
            retain_interval=contents.retain_interval,
            parent=contents.parent,
            loaded=contents.loaded,
            lock=lock,
        )
        return path

    return on_first_rank(commit, ranks)


def begin_save(root: Path, progress: Progress, ranks: Ranks) -> Path:
    """The temporary folder that all ranks write into."""
    return on_first_rank(lambda: folders.begin_unfinished(root, progress.iteration, secrets.token_hex(4)), ranks)


def state_of(progress: Progress, optimizer: MegatronOptimizer, ranks: Ranks, contents: Contents) -> State:
    """What goes into ``state.json``. Collective."""
    return State(
        progress=progress,
        layout=ranks.layout,
        device=ranks.device.type,
        optimizer=optimizer_state.numbers(optimizer, ranks),
        entries=contents.entries,
    )


def saved_boxes(chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> list[Box]:
    """What a checkpoint holds of this rank, and which of it this rank writes.

    Weights that are trained are not among it: they are the optimizer's fp32 ones, rounded.
    """
    weights = [box for box in model_boxes(chunks, ranks) if not box.has_master]
    return [
        *weights,
        *optimizer_state.optimizer_boxes(chunks, optimizer, ranks),
        *model_state.fp8_boxes(chunks, ranks),
        *rng.rng_boxes(rng.states(ranks), ranks),
    ]


def writers(ranks: Ranks) -> list[str]:
    """The names of all ranks' files."""
    return [storage.file_name(rank) for rank in range(ranks.identity.world_size)]


def about(state: State) -> dict[str, JSON]:
    """What the manifest says of a checkpoint."""
    return {
        "iteration": state.progress.iteration,
        "consumed_samples": state.progress.consumed_samples,
        "optimizer_step": state.optimizer.get("step"),
        "layout": str(state.layout),
        "versions": state.entries.get("versions"),
        "data": state.entries.get("data"),
    }
