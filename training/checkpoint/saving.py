"""Write a checkpoint, by all ranks together."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from parallel.groups import Ranks
from training.checkpoint import folders, optimizer_state, rng, storage
from training.checkpoint.agreement import on_every_rank, on_first_rank
from training.checkpoint.boxes import Box
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.model_state import Chunks, model_boxes, settled
from training.checkpoint.progress import Progress
from training.checkpoint.state import JSON, State, write_state


@torch.no_grad()
def save(
    root: Path,
    progress: Progress,
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    ranks: Ranks,
    *,
    keep: int,
    retain_interval: int | None = None,
    entries: Mapping[str, JSON],
    files: Mapping[str, Path | str],
) -> Path:
    """Write ``root/iter_N`` from all ranks; when committed, let ``latest`` name it and keep ``keep`` in all.

    ``entries`` go into ``state.json``; ``files`` are copied (a path) or written (a text) beside it. Each rank
    writes its own share of the optimizer's state; nothing is gathered. Raises OSError on every rank where one
    cannot write; earlier checkpoints are untouched then.
    """
    folder = on_first_rank(lambda: folders.begin(root, progress.iteration, secrets.token_hex(4)), ranks)
    state = State(
        progress=progress,
        layout=ranks.layout,
        device=ranks.device.type,
        optimizer=optimizer_state.numbers(optimizer, ranks),
        entries=entries,
    )
    with settled(chunks):
        boxes = saved_boxes(chunks, optimizer, ranks)
        on_every_rank(lambda: storage.write(folder, boxes, ranks.rank), ranks)
    writers = ranks.identity.world_size
    return on_first_rank(lambda: commit(folder, state, writers, files, keep, retain_interval), ranks)


def saved_boxes(chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> list[Box]:
    """What a checkpoint holds of this rank, and which of it this rank writes.

    Weights that are trained are not among it: they are the optimizer's fp32 ones, rounded.
    """
    weights = [box for box in model_boxes(chunks, ranks) if not box.has_master]
    return [
        *weights,
        *optimizer_state.optimizer_boxes(chunks, optimizer, ranks),
        *rng.rng_boxes(rng.states(ranks), ranks),
    ]


def commit(
    folder: Path,
    state: State,
    writers: int,
    files: Mapping[str, Path | str],
    keep: int,
    retain_interval: int | None,
) -> Path:
    """On one rank, when all writers are done: make a checkpoint of what they wrote."""
    names = [storage.file_name(rank) for rank in range(writers)]
    facts = merge(folder, names)
    remove_tables(folder, names)
    folders.add_files(folder, files)
    write_state(folder, state)
    about: dict[str, JSON] = {"iteration": state.progress.iteration, "layout": str(state.layout)}
    write_manifest(folder, facts, about)
    return folders.commit(folder, keep, retain_interval)
