"""The target against the source, element by element, moments included."""

from pathlib import Path

import numpy as np

from parallel.errors import UserError
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.plan import ReshardPlan
from tools.reshard.tensors import TargetTensor, Tensors, rectangles
from training.checkpoint.format.pieces import ITEM_BYTES

STEP_BYTES = 24 << 20
"""Of a rectangle that is compared: other ones than were written, so that an error at their edges shows."""


def verify(source: CheckpointSource, plan: ReshardPlan, files: Tensors, target: Path) -> str:
    """That the target has each planned tensor, no other, and the source's numbers in it: a sentence on what it found.

    files: the target, opened by the reader of its format. Raises UserError with the tensors that differ.
    """
    wanted = {each.key: each for group in plan.groups for each in group}
    found = files.tensors
    differing = [f"{key} (missing)" for key in wanted if key not in found]
    differing += [f"{key} (not of the source)" for key in found if key not in wanted]
    for key, each in wanted.items():
        if key in found:
            info = found[key]
            if (info.dtype, tuple(info.shape)) != (each.dtype, each.shape):
                differing.append(f"{key} ({info.dtype} {list(info.shape)}, expected {each.dtype} {list(each.shape)})")
            elif (at := _first_difference(each, source.files, files)) is not None:
                differing.append(f"{key} (from {list(at)} on)")
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise UserError(f"{target} differs from {source.folder} in {', '.join(differing[:5])}{more}. Do not use it.")
    return f"verified: {len(wanted):,} tensors of {target} are those of {source.folder}, bit by bit."


def _first_difference(target: TargetTensor, source: Tensors, files: Tensors) -> tuple[int, ...] | None:
    item = ITEM_BYTES[target.dtype]
    for offset, shape in rectangles(target.shape, item, STEP_BYTES, apart=int(target.stacked)):
        expected = target.words(source, (offset, shape))
        found = np.empty(shape, dtype=expected.dtype)
        files.read(target.key, offset, found)
        if not np.array_equal(expected, found):
            return offset
    return None
