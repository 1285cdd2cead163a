"""Continue from a checkpoint, in any layout."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from megatron.core.optimizer import MegatronOptimizer

from models.layers.fp8_weights import plain_weights
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from parallel.layout import Layout
from parallel.regions import Box
from program.errors import SharedMistake
from training.checkpoint import fit, folders, model_state, optimizer_state, rng
from training.checkpoint.agreement import gathered, on_first_rank
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.verify import Depth, damages, strangers
from training.checkpoint.model_state import model_boxes
from training.checkpoint.plausible import check_values, state_damages
from training.checkpoint.start import find_start
from training.checkpoint.state import JSON, State, read_state, step_of
from training.checkpoint.storage import TensorReader
from training.config.checkpoint_config import CheckpointConfig
from training.progress import Progress

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
    fp8_restored: bool
    """The scales of the fp8 recipe "delayed", or there are none."""
    optimizer_restored: bool
    own: bool
    """One of this run's own checkpoints, which the next ones descend from."""
    loaded: str | None
    """``hash`` of the run's own checkpoint that ``config.load`` went back to."""


class UnsoundError(Exception):
    """A checkpoint that verified well and could not be read; the same on every rank."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RestoreSource:
    """Which checkpoint to read, and what of it."""

    path: Path
    state: State
    own: bool
    loaded: str | None
    progress: bool
    optimizer: bool
    rng: bool


@torch.no_grad()
def restore(
    root: Path, config: CheckpointConfig, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks
) -> Restored | None:
    """Continue from the newest good checkpoint in ``root``, else start from ``config.load``, else None.

    A run's own checkpoint is restored whole; ``config.load`` may choose an older one of them. Of another
    ``config.load``, ``finetune`` takes the weights alone, ``no_load_optim`` leaves out the optimizer's state,
    ``no_load_rng`` the generators'; the latter are restored in the same layout on the same kind of device only.
    Parallel sizes may otherwise differ from those that wrote it. Before a parameter is touched the files are verified,
    by all ranks together; a damaged checkpoint, or one whose values cannot be a run's (``plausible``), is named and an
    older one taken. Raises UserError, on every rank, for a path without a checkpoint, for a checkpoint of another
    model, and where all are damaged.
    """
    refused: dict[Path, str] = {}
    while (source := choose(root, config, ranks, refused)) is not None:
        if refused:
            ranks.say(f"falling back to {source.path}")
        try:
            rng_restored, fp8_restored = _read(source, chunks, optimizer, ranks)
        except UnsoundError as error:  # what verifying has not seen: the next one overwrites all of it
            refused[source.path] = f"checkpoint {source.path} is damaged: {error}"
            ranks.say(refused[source.path])
            if source.own:
                on_first_rank(partial(_set_aside, source.path), ranks)
            continue
        return Restored(
            progress=source.state.progress if source.progress else Progress(),
            path=source.path,
            entries=source.state.entries,
            layout_before=source.state.layout,
            device=source.state.device,
            rng_restored=rng_restored,
            fp8_restored=fp8_restored,
            optimizer_restored=source.optimizer,
            own=source.own,
            loaded=source.loaded,
        )
    return None


def _read(source: RestoreSource, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> tuple[bool, bool]:
    """Fill this rank's memory: whether the generators were restored, too, and fp8's scales. Raises UnsoundError, on
    every rank."""
    with TensorReader(source.path, ranks.identity.local_world_size) as reader:
        weights = model_boxes(chunks, ranks)
        slices = optimizer_state.slices_on_the_host(optimizer) if source.optimizer else {}
        needed = optimizer_state.names_and_shapes(chunks, optimizer if source.optimizer else None)
        absent = _absent_averages(source, reader.shapes, optimizer)
        needed = {key: shape for key, shape in needed.items() if not key.startswith(absent)}
        fit.check(source.path, reader.shapes, needed, ranks)
        with sound(ranks):
            if source.optimizer:
                boxes = [box for box in weights if not box.has_master]
                kept = optimizer_state.boxes_of_slices(chunks, slices, ranks)
                boxes += [box for box in kept if not box.key.startswith(absent)]
                reader.read(boxes)
                check_values(boxes, reader.files, _step(source), optimizer_state.has_known_state(optimizer))
            else:
                read_model(reader, chunks, ranks)
        for piece in slices.values():
            piece.store()
        # Before weights are quantized with them.
        fp8_restored = source.optimizer and restore_fp8(reader, chunks, ranks)
        if source.optimizer:
            optimizer_state.set_numbers(optimizer, source.state.optimizer)
            optimizer_state.weights_from_optimizer(chunks, optimizer)
        else:
            optimizer_state.optimizer_from_weights(optimizer)
        if absent:
            optimizer.averages.start_again([key.split(".")[2] for key in absent])
        return source.rng and restore_rng(reader, source.state, ranks), fp8_restored


def _absent_averages(source: RestoreSource, saved: Iterable[str], optimizer: MegatronOptimizer) -> tuple[str, ...]:
    """What keys of averages begin with that start from the checkpoint's weights."""
    prefixes = [f"{optimizer_state.PREFIX}{name}." for name in optimizer_state.averages(optimizer)]
    return tuple(one for one in prefixes if not source.optimizer or not any(key.startswith(one) for key in saved))


def _step(source: RestoreSource) -> int:
    """The optimizer's own count. Raises DamagedError where the checkpoint has the optimizer's tensors and no number."""
    if (step := step_of(source.state.optimizer)) is None:
        raise DamagedError(f"{source.path / folders.STATE}: optimizer.step: expected a number of updates, found none")
    return step


def read_model(reader: TensorReader, chunks: Chunks, ranks: Ranks, prefix: str = optimizer_state.MASTER) -> None:
    """The weights alone, those in fp8 too. prefix: of the optimizer's tensors that are to be the weights."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(plain_weights(unwrap(chunk)))
        read_weights(reader, model_boxes(chunks, ranks), prefix)


def read_weights(reader: TensorReader, boxes: Sequence[Box], prefix: str = optimizer_state.MASTER) -> None:
    """Weights as they were saved, or else the optimizer's fp32 ones, rounded. prefix: as of ``read_model``; what is not
    trained lies under its own name alone."""
    saved = reader.shapes
    for box in boxes:
        key = box.key if box.key in saved else prefix + box.key
        reader.read_into(key, box.offset, box.data)
    check_values(boxes, reader.files)


def choose(
    root: Path, config: CheckpointConfig, ranks: Ranks, refused: Mapping[Path, str] = MappingProxyType({})
) -> RestoreSource | None:
    """Where to start from: the first good one. Raises UserError where ``config.load`` leads nowhere, or all are bad.

    refused: checkpoints that a rank could not read, and why.
    """
    found = on_first_rank(partial(find_start, root, config, tuple(refused)), ranks)
    if found.lost and not found.own:
        raise SharedMistake("\n".join([*found.lost, NOTHING_LEFT]))
    for text in [*(f"{text}; it is skipped" for text in found.lost), *found.notes]:
        ranks.say(text)
    if not found.candidates:
        if refused:
            raise SharedMistake("\n".join([*refused.values(), NOTHING_LEFT]))
        return None
    path, damaged = first_good(found.candidates, config.verify, ranks)
    if found.own:
        for text in on_first_rank(partial(_continue_from, root, path, damaged, config.load), ranks):
            ranks.say(text)
    fresh = config.finetune and not found.own
    return RestoreSource(
        path=path,
        state=on_first_rank(lambda: read_state(path), ranks),
        own=found.own,
        loaded=found.loaded,
        progress=not fresh,
        optimizer=found.own or not (fresh or config.no_load_optim),
        rng=found.own or not (fresh or config.no_load_rng),
    )


def _continue_from(root: Path, path: Path, damaged: Sequence[Path], load: str | None) -> list[str]:
    """What is said of the checkpoints that a start at ``path`` leaves behind; those that are damaged are set aside.

    Retention would else keep these, and delete ``path`` for them. What the disk does not take is left as it is: whether
    it takes checkpoints is looked at before step 1.
    """
    aside, said = [], []
    with contextlib.suppress(OSError):
        for folder in damaged:
            aside.append(folders.set_aside(folder).name)
        if damaged:
            folders.point_to(path)
    if aside:
        said.append(f"set aside, and no checkpoint of this run any more: {', '.join(aside)}")
    with contextlib.suppress(OSError, DamagedError):
        if unknown := strangers(path):
            shown = ", ".join(unknown[:MOST_DAMAGES]) + _more(len(unknown))
            said.append(f"warning: {path} holds files that are not of the checkpoint, and are ignored: {shown}")
    if newer := folders.ahead(root, path):
        names = ", ".join(one.name for one in newer[:MOST_DAMAGES]) + _more(len(newer))
        why = f"latest is {path.name}" if folders.named_latest(root)[0] == path else "see above"
        why = f"checkpoint.load is {load}" if load and Path(load).name == path.name else why
        said.append(
            f"newer checkpoints are not resumed from ({why}): {names}. Each stays until this run has saved a later "
            f"iteration and verified it. To continue one of them, write its name into {root / folders.LATEST}"
        )
    return said


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        folders.set_aside(path)


def first_good(found: Sequence[Path], depth: Depth, ranks: Ranks) -> tuple[Path, list[Path]]:
    """The first of ``found`` whose files are what was written, and those before it whose content is damaged.

    Each rank verifies its share of the files. Says what is damaged, and what is taken instead. Raises UserError, the
    same on every rank, where nothing is good.
    """
    said, damaged = list[str](), list[Path]()
    for path in found:
        own = damages(path, depth, (ranks.rank, ranks.identity.world_size))
        if ranks.rank == 0 and not own:
            own = state_damages(path)
        if not (problems := gathered(own, ranks)):
            if said:
                ranks.say(f"falling back to {path}")
            return path, damaged
        if any(problem.is_content for problem in problems):
            damaged.append(path)
        texts = list(dict.fromkeys(problem.text for problem in sorted(problems)))
        said.append(f"checkpoint {path} is damaged: " + "; ".join(texts[:MOST_DAMAGES]) + _more(len(texts)))
        ranks.say(said[-1])
    raise SharedMistake("\n".join([*said, NOTHING_LEFT]))


def _more(count: int) -> str:
    return f"; and {count - MOST_DAMAGES} more" if count > MOST_DAMAGES else ""


def restore_rng(reader: TensorReader, state: State, ranks: Ranks) -> bool:
    """Restore the generators where the checkpoint has just these: same layout, device and generators."""
    if state.layout != ranks.layout or state.device != ranks.device.type:
        return False
    found = {name: torch.empty_like(tensor) for name, tensor in rng.states(ranks).items()}
    boxes = rng.rng_boxes(found, ranks)
    if any(reader.shapes.get(box.key) != box.global_shape for box in boxes):
        return False
    with sound(ranks):
        reader.read(boxes)
        try:
            rng.set_states(found, ranks)
        except (RuntimeError, ValueError) as error:  # bytes that are no generator's state
            raise DamagedError(f"a generator's state cannot be restored ({error})") from None
    return True


def restore_fp8(reader: TensorReader, chunks: Chunks, ranks: Ranks) -> bool:
    """Restore the scales of fp8's recipe "delayed" where the checkpoint has just these: written with that recipe,
    histories as long, and the same EP. Else they start at 1, as a new run's do."""
    boxes = model_state.fp8_boxes(chunks, ranks)
    if gathered([box.key for box in boxes if reader.shapes.get(box.key) != box.global_shape][:1], ranks):
        return False
    with sound(ranks):
        reader.read(boxes)
        check_values(boxes, reader.files)
    return True


@contextlib.contextmanager
def sound(ranks: Ranks) -> Iterator[None]:
    """Around a rank's own reading: damage that one rank meets, which ``sizes`` does not see, is damage for all.

    Nothing that communicates may be in it. Raises UnsoundError, on every rank.
    """
    problems = []
    try:
        yield
    except (DamagedError, ValueError) as error:  # ValueError: pieces that leave a gap
        problems = [f"rank {ranks.rank}: {error}"]
    if problems := gathered(problems, ranks):
        raise UnsoundError(problems[0])
