"""Whether what a checkpoint holds can be a run's. Hashes that fit say only that it is what somebody wrote.

Of ``state.json`` before a rank reads tensors, of tensors when they have been read: one more pass over memory. A run
saves no weights that are not finite (``fault.nonfinite``), so those that are there were changed since.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel.regions import Box
from program.schema import JSON, fits, shown
from training.checkpoint import folders
from training.checkpoint.account import account_problems
from training.checkpoint.chosen_weights import AVERAGES
from training.checkpoint.format.index import CheckpointIndex
from training.checkpoint.format.manifest import DamagedError, read_manifest
from training.checkpoint.format.verify import Damage
from training.checkpoint.schedule_entry import ENTRY as SCHEDULE
from training.checkpoint.schedule_entry import schedule_problems
from training.checkpoint.state import State, read_state, step_of

STATE_PREFIX = "optimizer.state."
WEIGHTS, SECOND_MOMENT = f"{STATE_PREFIX}param.", f"{STATE_PREFIX}exp_avg_sq."
KNOWN = (
    WEIGHTS, f"{STATE_PREFIX}exp_avg.", SECOND_MOMENT, f"{STATE_PREFIX}momentum_buffer.",
    *(f"{STATE_PREFIX}{name}." for name in AVERAGES),
)  # fmt: skip
"""What keys of AdamW's states begin with; what a user's own optimizer keeps means what it likes."""
ROUNDED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""dtypes that torch finds extremes of."""


def state_damages(folder: Path) -> list[Damage]:
    """What is impossible in ``state.json``: it is none, or its numbers do not fit each other, the folder's name, or
    what the manifest says of them."""
    try:
        state, about = read_state(folder), read_manifest(folder).about
    except DamagedError as error:
        return [Damage(folders.STATE, str(error), not error.by_system)]
    problems = _state_problems(folder, state, about)
    return [Damage(folders.STATE, f"{folder / folders.STATE}: {text}") for text in problems]


def _state_problems(folder: Path, state: State, about: Mapping[str, JSON]) -> Iterator[str]:
    named, progress = folders.iteration_of(folder), state.progress
    if named not in (None, progress.iteration):
        yield f"expected iteration {named}, as the folder is named, found {progress.iteration}"
    for name, found in (("iteration", progress.iteration), ("consumed_samples", progress.consumed_samples)):
        if about.get(name) not in (None, found):
            yield f"progress.{name}: expected {shown(about[name])}, as the manifest says, found {found:,}"
    yield from _optimizer_problems(state.optimizer, about)
    yield from account_problems(state.entries, progress, step_of(state.optimizer))
    yield from (f"entries.{SCHEDULE}.{text.rstrip('.')}" for text in schedule_problems(state.entries))


def _optimizer_problems(optimizer: Mapping[str, JSON], about: Mapping[str, JSON]) -> Iterator[str]:
    step = step_of(optimizer)
    if step is not None and about.get("optimizer_step") not in (None, step):
        yield f"optimizer.step: expected {shown(about['optimizer_step'])}, as the manifest says, found {step:,}"
    groups = optimizer.get("param_groups")
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        for name in ("lr", "weight_decay"):
            value = group.get(name, 0.0) if isinstance(group, dict) else 0.0
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                yield f"optimizer.param_groups.{number}.{name}: expected 0 or more, found {value}"
    if scaler := optimizer.get("grad_scaler"):
        scale = scaler.get("scale") if isinstance(scaler, dict) else None
        if not isinstance(scale, int | float) or not 0 < scale < math.inf:
            yield f"optimizer.grad_scaler.scale: expected a finite number above 0, found {shown(scale)}"
        for name in ("growth_tracker", "hysteresis_tracker"):
            if isinstance(scaler, dict) and not fits(scaler.get(name), int):  # hysteresis goes below 0
                yield f"optimizer.grad_scaler.{name}: expected a whole number, found {shown(scaler.get(name))}"


def check_values(boxes: Sequence[Box], files: CheckpointIndex, step: int | None = None, known: bool = True) -> None:
    """Whether what was read into ``boxes`` can be weights, moments of AdamW's and Muon's, and fp8's scales.

    step: the optimizer's, with its state. known: it is AdamW or Muon, and not a user's own. No communication. Raises
    DamagedError with the first element that cannot be.
    """
    for box in boxes:
        of_state = box.key.startswith(STATE_PREFIX)
        if of_state and not box.key.startswith(KNOWN if known else WEIGHTS):
            continue
        is_square = box.key.startswith(SECOND_MOMENT)
        least, most = _extremes(box.data)
        if not (math.isfinite(least) and math.isfinite(most)) or (is_square and least < 0):
            raise DamagedError(_named(box, files, is_square))
        if is_square and most > 0 and step == 0:
            raise DamagedError(
                f"{files.folder / folders.STATE}: optimizer.step: expected 1 or more, since {box.key} is up to "
                f"{most:.3g}, found 0"
            )


def _extremes(data: Tensor) -> tuple[float, float]:
    """The least and the most; NaN where one is among them. 0 of what has no elements, or no numbers with a point."""
    if not data.numel() or not data.is_floating_point() or data.is_meta:
        return 0.0, 0.0
    least, most = torch.aminmax(data if data.dtype in ROUNDED else data.float())
    return float(least), float(most)


def _named(box: Box, files: CheckpointIndex, is_square: bool) -> str:
    numbers = box.data.float()
    wrong = ~numbers.isfinite() | (numbers < 0) if is_square else ~numbers.isfinite()
    first = wrong.nonzero()[0].tolist()
    at = [start + place for start, place in zip(box.offset, first, strict=True)]
    expected = "0 or more" if is_square else "a finite number"
    found = f"{box.key}{at}: expected {expected}, found {float(numbers[tuple(first)]):.6g}"
    return f"{_file_of(box.key, at, files)}: {found}{_others(int(wrong.sum()))}"


def _others(count: int) -> str:
    return f", and {count - 1:,} more like it" if count > 1 else ""


def _file_of(key: str, at: Sequence[int], files: CheckpointIndex) -> Path:
    """Where an element lies."""
    key = key if key in files.tensors else f"{WEIGHTS}{key}"
    for piece in files.pieces(key):
        spans = zip(at, piece.offset, piece.shape, strict=True)
        if all(start <= place < start + size for place, start, size in spans):
            return files.folder / piece.file
    return files.folder
