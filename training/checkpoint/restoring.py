"""Continue from a checkpoint, in any layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from parallel.groups import Ranks
from parallel.layout import Layout
from training.checkpoint import fit, folders, optimizer_state, rng
from training.checkpoint.agreement import on_first_rank
from training.checkpoint.model_state import Chunks, model_boxes
from training.checkpoint.progress import Progress
from training.checkpoint.state import JSON, State, read_state
from training.checkpoint.storage import Reader
from training.config import CheckpointConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Restored:
    """What a run continues from."""

    progress: Progress
    path: Path
    entries: Mapping[str, JSON]
    """What ``save`` was given, as JSON has it."""
    layout_before: Layout
    rng_restored: bool
    optimizer_restored: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """Which checkpoint to read, and what of it."""

    path: Path
    state: State
    progress: bool
    optimizer: bool
    rng: bool


@torch.no_grad()
def restore(
    root: Path, config: CheckpointConfig, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks
) -> Restored | None:
    """Continue from the newest checkpoint in ``root``, else start from ``config.load``, else None.

    A run's own checkpoint is restored whole. Of ``config.load``, ``finetune`` takes the weights alone,
    ``no_load_optim`` leaves out the optimizer's state, ``no_load_rng`` the generators'; the latter are
    restored in the same layout on the same kind of device only. Parallel sizes may otherwise differ from
    those that wrote it. Raises UserError, on every rank and before a parameter is touched, for a path without
    a checkpoint and for a checkpoint of another model.
    """
    source = on_first_rank(lambda: choose(root, config), ranks)
    if source is None:
        return None
    reader = Reader(source.path)
    weights = model_boxes(chunks, ranks)
    state = optimizer_state.optimizer_boxes(chunks, optimizer, ranks) if source.optimizer else []
    fit.check(source.path, reader.shapes, weights + state, ranks)
    reader.read(weights)
    # Second, because in fp32 the optimizer's weights are the model's memory: they win, where bf16 was saved.
    reader.read(state)
    if source.optimizer:
        optimizer_state.set_numbers(optimizer, source.state.optimizer)
        optimizer_state.weights_from_optimizer(chunks, optimizer)
    else:
        optimizer.reload_model_params()
    return Restored(
        progress=source.state.progress if source.progress else Progress(),
        path=source.path,
        entries=source.state.entries,
        layout_before=source.state.layout,
        rng_restored=source.rng and restore_rng(reader, source.state, ranks),
        optimizer_restored=source.optimizer,
    )


def choose(root: Path, config: CheckpointConfig) -> Source | None:
    """Where to start from. Raises UserError where ``config.load`` leads nowhere."""
    own = folders.latest(root)
    if own is not None:
        return Source(path=own, state=read_state(own), progress=True, optimizer=True, rng=True)
    if config.load is None:
        return None
    path = folders.find(config.load)
    anew = config.finetune
    return Source(
        path=path,
        state=read_state(path),
        progress=not anew,
        optimizer=not (anew or config.no_load_optim),
        rng=not (anew or config.no_load_rng),
    )


def restore_rng(reader: Reader, state: State, ranks: Ranks) -> bool:
    """Restore the generators where the checkpoint has just these: same layout, device and generators."""
    if state.layout != ranks.layout or state.device != ranks.device.type:
        return False
    found = {name: torch.empty_like(tensor) for name, tensor in rng.states(ranks).items()}
    boxes = rng.rng_boxes(found, ranks)
    if any(reader.shapes.get(box.key) != box.global_shape for box in boxes):
        return False
    reader.read(boxes)
    rng.set_states(found, ranks)
    return True
