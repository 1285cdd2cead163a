"""The states of all random-number generators of a rank, as bytes in tensors.

The states of all ranks are one global tensor [ranks, bytes] per generator. They mean something to the same
layout only.
"""

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.groups import Ranks
from parallel.random_states import set_tracked_states, tracked_states
from parallel.regions import Box

PREFIX = "rng."
_TRACKER = "megatron."
_WORDS = "<624I"  # the Mersenne Twister's state (Matsumoto, Nishimura, TOMACS 1998), of Python and of NumPy
_REST = "<I?d"  # position in it; whether a normal number is left over; that number


def states(ranks: Ranks) -> dict[str, Tensor]:
    """Generator -> its state, uint8 [n]: PyTorch's, CUDA's, Python's, NumPy's and the tracker's."""
    found = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if ranks.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return found | {_TRACKER + name: state for name, state in tracked_states().items()}


def set_states(found: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Inverse of ``states``."""
    torch.set_rng_state(found["torch"])
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], ranks.device)
    tracked = {name.removeprefix(_TRACKER): state for name, state in found.items() if name.startswith(_TRACKER)}
    set_tracked_states(tracked)
    words, position, has_spare, spare = _unpack(found["python"])
    random.setstate((3, (*words, position), spare if has_spare else None))
    words, position, has_spare, spare = _unpack(found["numpy"])
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, int(has_spare), spare))


def rng_boxes(found: Mapping[str, Tensor], ranks: Ranks) -> list[Box]:
    """This rank's row of each generator's global tensor."""
    return [
        Box(
            key=PREFIX + name,
            global_shape=(ranks.identity.world_size, state.numel()),
            offset=(ranks.rank, 0),
            data=state.view(1, -1),
            writes=True,
        )
        for name, state in found.items()
    ]


def _python_state() -> Tensor:
    _, words, spare = random.getstate()
    return _pack(words[:624], words[624], spare is not None, spare or 0.0)


def _numpy_state() -> Tensor:
    _, words, position, has_spare, spare = np.random.get_state()
    return _pack(words, position, has_spare, spare)


def _pack(words: Any, position: int, has_spare: bool | int, spare: float) -> Tensor:
    packed = struct.pack(_WORDS, *words) + struct.pack(_REST, position, bool(has_spare), spare)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpack(state: Tensor) -> tuple[tuple[int, ...], int, bool, float]:
    packed = state.numpy().tobytes()
    size = struct.calcsize(_WORDS)
    position, has_spare, spare = struct.unpack(_REST, packed[size:])
    return struct.unpack(_WORDS, packed[:size]), position, has_spare, spare
