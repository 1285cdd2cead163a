"""A checkpoint's tensors by parameter: what is stored of each."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from models.names import shown_name
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import TensorInfo

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema", "average_last", "rng", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

OPTIMIZER, RNG, FP8 = "optimizer.state.", "rng.", "fp8."
KEPT: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq", "momentum_buffer", "ema", "average_last")
"""Of what an optimizer has beside fp32 weights; they are called as in the checkpoint."""
_STATES: Mapping[str, Kind] = {"param": "master", **{kind: kind for kind in KEPT}}
_BLOCK = re.compile(r"((?:layers|mtp)\.(\d+))\.(.+)")
_FIRST, _LAST = ("word_embeddings", "position_embeddings"), ("final_layernorm", "output_layer")


@dataclass(slots=True, frozen=True)
class Stored:
    """One tensor of the checkpoint."""

    key: str
    """In the index."""
    kind: Kind
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(slots=True, frozen=True)
class StoredParameter:
    """What is stored under one name: a weight, its fp32 master, its moments; or a generator's states alone."""

    name: str
    """Canonical, where there is such a name; else the key."""
    states: Mapping[Kind, Stored]
    """In the order of KINDS."""

    @property
    def weights(self) -> Stored | None:
        """The most exact weights there are: the optimizer's, else the model's."""
        return self.states.get("master") or self.states.get("weight")

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(stored.bytes for stored in self.states.values())

    @property
    def elements(self) -> int:
        """Of the weights; 0 where there are none."""
        return self.weights.elements if self.weights else 0

    @property
    def block(self) -> str:
        """``layers.3``, ``mtp.0``; empty outside of the blocks."""
        match = _BLOCK.fullmatch(self.name)
        return match[1] if match else ""

    @property
    def rest(self) -> str:
        """The name within the block."""
        match = _BLOCK.fullmatch(self.name)
        return match[3] if match else self.name


def parameters(tensors: Mapping[str, TensorInfo]) -> list[StoredParameter]:
    """All of a checkpoint's tensors by name, in the order in which a token meets them; generators come last.

    Raises DamagedError for a dtype that no checkpoint has.
    """
    found: dict[str, dict[Kind, Stored]] = {}
    for key, info in tensors.items():
        if info.dtype not in ITEM_BYTES:
            raise DamagedError(f"{key} is {info.dtype}; expected one of {', '.join(ITEM_BYTES)}")
        kind, own = kind_of(key)
        found.setdefault(shown_name(own), {})[kind] = Stored(key, kind, info.dtype, info.shape)
    ordered = ({kind: states[kind] for kind in KINDS if kind in states} for states in found.values())
    return sorted(map(StoredParameter, found, ordered), key=_place)


def kind_of(key: str) -> tuple[Kind, str]:
    """What a key stores, and the key of the weight that it belongs to."""
    if key.startswith(RNG):
        return "rng", key
    if key.startswith(OPTIMIZER):
        state, _, own = key.removeprefix(OPTIMIZER).partition(".")
        return (_STATES[state], own) if state in _STATES else ("other", key)
    return ("other" if key.startswith(FP8) else "weight"), key


def bytes_by_kind(found: list[StoredParameter]) -> dict[Kind, int]:
    """Kind -> bytes, of the kinds that are there."""
    sizes = {
        kind: sum(parameter.states[kind].bytes for parameter in found if kind in parameter.states) for kind in KINDS
    }
    return {kind: size for kind, size in sizes.items() if size}


def _place(parameter: StoredParameter) -> tuple[int, int, bool, str]:
    """Embedding, blocks, multi-token prediction, output layer, what has no canonical name, generators."""
    name = parameter.name
    block = _BLOCK.fullmatch(name)
    if "rng" in parameter.states:
        return 5, 0, False, name
    if block:
        is_mlp = block[3].startswith(("mlp.", "pre_mlp_layernorm."))
        return (1 if name.startswith("layers.") else 3), int(block[2]), is_mlp, block[3]
    if name.startswith(_FIRST):
        return 0, 0, False, name.replace("word_", "")
    return (2 if name.startswith(_LAST) else 4), 0, False, name
