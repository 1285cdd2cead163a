"""Write a checkpoint, by all ranks together, and wait for it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.regions import Box
from training.checkpoint import committing, folders, model_state, optimizer_state, rng, storage
from training.checkpoint.agreement import on_every_rank, on_first_rank
from training.checkpoint.model_state import model_boxes, settled
from training.checkpoint.state import JSON, State, encoded
from training.progress import Progress
from training.run_lock.lock import RunLock


@dataclass(kw_only=True, slots=True, frozen=True)
class Contents:
    """What lies in a checkpoint beside tensors, and which others it lets live."""

    keep: int
    """Newest checkpoints to keep in all."""
    retain_interval: int | None = None
    """Iterations that this divides are kept for good."""
    milestones: tuple[int, ...] = ()
    """Iterations that are kept for good: where stages end."""
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

    return on_first_rank(lambda: committing.commit(filled(folder, state, contents, ranks), lock)[0], ranks)


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


def filled(folder: Path, state: State, contents: Contents, ranks: Ranks) -> committing.FilledFolder:
    """What becomes a checkpoint once all ranks have written into ``folder``."""
    return committing.FilledFolder(
        folder=str(folder),
        writers=tuple(storage.file_name(rank) for rank in range(ranks.identity.world_size)),
        texts={**contents.texts, folders.STATE: encoded(state)},
        copies={name: str(source.absolute()) for name, source in contents.copies.items()},
        about=about(state),
        keep=contents.keep,
        retain_interval=contents.retain_interval,
        milestones=contents.milestones,
        parent=contents.parent,
        loaded=contents.loaded,
    )


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
