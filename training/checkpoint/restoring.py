"""Continue from a checkpoint, in any layout."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from parallel.errors import SharedMistake
from parallel.groups import Ranks
from parallel.layout import Layout
from training.checkpoint import fit, folders, optimizer_state, rng
from training.checkpoint.agreement import gathered, on_first_rank
from training.checkpoint.boxes import Box
from training.checkpoint.format.manifest import MANIFEST, DamagedError
from training.checkpoint.format.verify import Depth, damages
from training.checkpoint.model_state import Chunks, model_boxes
from training.checkpoint.progress import Progress
from training.checkpoint.state import JSON, State, read_state
from training.checkpoint.storage import Reader
from training.config import CheckpointConfig

MOST_DAMAGES = 5
"""Damaged files named in one message."""

NOTHING_LEFT = "no good checkpoint is left. Bring these files back, or start in another --run_dir."


@dataclass(kw_only=True, slots=True, frozen=True)
class Restored:
    """What a run continues from."""

    progress: Progress
    path: Path
    entries: Mapping[str, JSON]
    """What ``save`` was given, as JSON has it."""
    layout_before: Layout
    device: str
    """What wrote it: ``cpu`` or ``cuda``."""
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
    """Continue from the newest good checkpoint in ``root``, else start from ``config.load``, else None.

    A run's own checkpoint is restored whole. Of ``config.load``, ``finetune`` takes the weights alone,
    ``no_load_optim`` leaves out the optimizer's state, ``no_load_rng`` the generators'; the latter are
    restored in the same layout on the same kind of device only. Parallel sizes may otherwise differ from
    those that wrote it. Before a parameter is touched the files are verified, by all ranks together; a damaged
    checkpoint is named and an older one taken. Raises UserError, on every rank, for a path without a checkpoint,
    for a checkpoint of another model, and where all are damaged.
    """
    source = choose(root, config, ranks)
    if source is None:
        return None
    with Reader(source.path, ranks.identity.local_world_size) as reader:
        weights = model_boxes(chunks, ranks)
        state = optimizer_state.optimizer_boxes(chunks, optimizer, ranks) if source.optimizer else []
        fit.check(source.path, reader.shapes, weights + state, ranks)
        with sound(source.path, ranks):
            if source.optimizer:
                reader.read([box for box in weights if not box.has_master])
                reader.read(state)
            else:
                read_weights(reader, weights)
        if source.optimizer:
            optimizer_state.set_numbers(optimizer, source.state.optimizer)
            optimizer_state.weights_from_optimizer(chunks, optimizer)
        else:
            optimizer.reload_model_params()
        rng_restored = source.rng and restore_rng(reader, source.state, ranks)
    return Restored(
        progress=source.state.progress if source.progress else Progress(),
        path=source.path,
        entries=source.state.entries,
        layout_before=source.state.layout,
        device=source.state.device,
        rng_restored=rng_restored,
        optimizer_restored=source.optimizer,
    )


def read_weights(reader: Reader, boxes: Sequence[Box]) -> None:
    """Weights as they were saved, or else the optimizer's fp32 ones, rounded."""
    saved = reader.shapes
    for box in boxes:
        key = box.key if box.key in saved else optimizer_state.MASTER + box.key
        reader.read_into(key, box.offset, box.data)


def choose(root: Path, config: CheckpointConfig, ranks: Ranks) -> Source | None:
    """Where to start from: the first good one. Raises UserError where ``config.load`` leads nowhere, or all are bad."""
    own, found, lost = on_first_rank(lambda: (*_candidates(root, config), folders.incomplete(root)), ranks)
    said = [f"checkpoint {path} is damaged: {path / MANIFEST}: expected, not found" for path in lost]
    if said and not own:
        raise SharedMistake("\n".join([*said, NOTHING_LEFT]))
    for text in said:
        ranks.say(f"{text}; it is passed over")
    if not found:
        return None
    path = first_good(found, config.verify, ranks)
    if own and path != found[0]:
        aside = on_first_rank(lambda: _continue_from(path, found[: found.index(path)]), ranks)
        if aside:
            ranks.say(f"set aside, and no checkpoint of this run any more: {', '.join(aside)}")
    state = on_first_rank(lambda: read_state(path), ranks)
    anew = config.finetune and not own
    return Source(
        path=path,
        state=state,
        progress=not anew,
        optimizer=own or not (anew or config.no_load_optim),
        rng=own or not (anew or config.no_load_rng),
    )


def _continue_from(path: Path, damaged: Sequence[Path]) -> list[str]:
    """In place of the damaged ones, which retention would else keep, and delete ``path`` for: their new names.

    What the disk does not take is left as it is: whether it takes checkpoints is looked at before step 1.
    """
    aside = []
    with contextlib.suppress(OSError):
        for folder in damaged:
            aside.append(folders.set_aside(folder).name)
        folders.point_to(path)
    return aside


def _candidates(root: Path, config: CheckpointConfig) -> tuple[bool, list[Path]]:
    """Whether they are the run's own, and the checkpoints to try, in order."""
    if found := folders.candidates(root):
        return True, found
    return False, folders.find(config.load) if config.load is not None else []


def first_good(found: Sequence[Path], depth: Depth, ranks: Ranks) -> Path:
    """The first of ``found`` whose files are what was written; each rank looks at its share of them.

    Says what is damaged, and what is taken instead. Raises UserError, the same on every rank, where nothing is good.
    """
    said = list[str]()
    for path in found:
        damaged = gathered(damages(path, depth, (ranks.rank, ranks.identity.world_size)), ranks)
        if not damaged:
            if said:
                ranks.say(f"falling back to {path}")
            return path
        texts = list(dict.fromkeys(damage.text for damage in sorted(damaged)))
        said.append(f"checkpoint {path} is damaged: " + "; ".join(texts[:MOST_DAMAGES]) + _more(len(texts)))
        ranks.say(said[-1])
    raise SharedMistake("\n".join([*said, NOTHING_LEFT]))


def _more(count: int) -> str:
    return f"; and {count - MOST_DAMAGES} more" if count > MOST_DAMAGES else ""


def restore_rng(reader: Reader, state: State, ranks: Ranks) -> bool:
    """Restore the generators where the checkpoint has just these: same layout, device and generators."""
    if state.layout != ranks.layout or state.device != ranks.device.type:
        return False
    found = {name: torch.empty_like(tensor) for name, tensor in rng.states(ranks).items()}
    boxes = rng.rng_boxes(found, ranks)
    if any(reader.shapes.get(box.key) != box.global_shape for box in boxes):
        return False
    with sound(reader.files.folder, ranks):
        reader.read(boxes)
        try:
            rng.set_states(found, ranks)
        except (RuntimeError, ValueError) as error:  # bytes that are no generator's state
            raise DamagedError(f"a generator's state cannot be restored ({error})") from None
    return True


@contextlib.contextmanager
def sound(path: Path, ranks: Ranks) -> Iterator[None]:
    """Around a rank's own reading: damage that one rank meets, which ``sizes`` does not see, ends all of them alike.

    Nothing that communicates may be in it. Raises SharedMistake.
    """
    problems = []
    try:
        yield
    except (DamagedError, ValueError) as error:  # ValueError: pieces that leave a gap
        problems = [f"rank {ranks.rank}: {error}"]
    if problems := gathered(problems, ranks):
        raise SharedMistake(
            f"checkpoint {path} is damaged: {problems[0]}. Use --checkpoint.verify hashes, which takes an older "
            "checkpoint where it finds such damage, or give another one by --checkpoint.load."
        )
