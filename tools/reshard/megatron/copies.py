"""Copies of what several ranks hold alike, in Megatron's dp_reshardable form, compared whole."""

from collections.abc import Iterator

import numpy as np

from parallel.errors import UserError
from tools.convert.dtypes import cast
from tools.reshard.checkpoint_source import STATES
from tools.reshard.megatron.dp_reshardable import FIX, FlatStates, ReplicaCopy
from tools.reshard.megatron.files import TorchDist
from tools.reshard.megatron.params import key_of
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

STEP_BYTES = 16 << 20
"""Of each of the two that are compared at a time."""


def differing(states: FlatStates) -> list[str]:
    """Our keys of the parameters whose copies differ in any bit of any state. Reads every byte of every copy once.

    That alone is no reason to refuse them: nothing in Megatron keeps the copies of TP ranks alike but that all compute
    the same. Raises UserError where a copy does not even round to the same weight: it was taken for another tensor.
    """
    return sorted({key_of(copy.param.site) for copy in states.copies if _differs(states.files, copy)})


def _differs(files: TorchDist, copy: ReplicaCopy) -> bool:
    found = False
    for state in STATES:
        dtype = files.tensors[f"{copy.read[0]}.{state}"].dtype
        for first, other in _stretches(files, copy, state, dtype):
            if np.array_equal(first, other):
                continue
            found = True
            one, another = (cast(words, dtype, copy.param.dtype) for words in (first, other))
            if state == "param" and not np.array_equal(one, another):
                raise UserError(
                    f"{files.folder}: {copy.other[0]} from element {copy.other[1]:,} on begins and ends as "
                    f"{key_of(copy.param.site)}, but is not the same weight as in {copy.read[0]}. {FIX}"
                )
    return found


def _stretches(files: TorchDist, copy: ReplicaCopy, state: str, dtype: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A state of both, a few MB at a time."""
    step = STEP_BYTES // ITEM_BYTES[dtype]
    for at in range(0, copy.param.size, step):
        pair = []
        for bucket, start in (copy.read, copy.other):
            words = np.empty(min(step, copy.param.size - at), dtype=WORDS[ITEM_BYTES[dtype]])
            files.read(f"{bucket}.{state}", (start + at,), words)
            pair.append(words)
        yield pair[0], pair[1]
