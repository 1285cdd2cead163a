"""Write a checkpoint, by all ranks together."""

from collections.abc import Mapping
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from parallel.groups import Ranks
from training.checkpoint import folders, optimizer_state, rng, storage
from training.checkpoint.agreement import on_first_rank
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
    entries: Mapping[str, JSON],
    files: Mapping[str, Path | str],
) -> Path:
    """Write ``root/iter_N`` from all ranks; when complete, let ``latest`` name it and keep ``keep`` in all.

    ``entries`` go into ``state.json``; ``files`` are copied (a path) or written (a text) beside it. Each rank
    writes its own share of the weights and of the optimizer's state; nothing is gathered. Raises OSError on
    every rank where rank 0 cannot write, and PyTorch's error where another one cannot; earlier checkpoints
    are untouched then.
    """
    folder = on_first_rank(lambda: folders.begin(root, progress.iteration), ranks)
    state = State(
        progress=progress,
        layout=ranks.layout,
        device=ranks.device.type,
        optimizer=optimizer_state.numbers(optimizer, ranks),
        entries=entries,
    )
    with settled(chunks):
        boxes = model_boxes(chunks, ranks) + optimizer_state.optimizer_boxes(chunks, optimizer, ranks)
        storage.write(folder, boxes + rng.rng_boxes(rng.states(ranks), ranks))

    def complete() -> Path:
        storage.finish(folder)
        folders.add_files(folder, files)
        write_state(folder, state)
        return folders.commit(folder, keep)

    return on_first_rank(complete, ranks)
