"""Megatron's dp_reshardable optimizer state, read as if it were saved by weight.

Each TP x PP rank's flat memory is there: a tensor for each bucket and state, with no word on what lies where. Memory
has a model chunk's parameters in reverse, each from a multiple of 64 elements on, in buckets of sizes that the
checkpoint shows (megatron-core 0.19.2: distrib_optimizer.py, _compute_per_buffer_param_layout). So:

1. a range is looked for among the weights, by its ends, rounded to the weight's dtype (``params``);
2. equal ones (norms that are all ones still) are distinguished by the order of modules: what a chunk holds must be an
   uninterrupted stretch of it, fixed by the parameters that are like no other;
3. ``source.check_optimizer`` compares every element that was found with its weight.

What several ranks hold alike (norms on tensor-parallel ranks, a tied embedding on two stages) is read from the first of
them, as megatron-core does when it saves by weight; ``check_optimizer`` compares the other copies whole
(``copies``).
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.shapes import GPTShape
from program.errors import UserError
from program.printing import some
from tools.reshard.checkpoint_source import STATE, STATES
from tools.reshard.megatron import params as megatron_params
from tools.reshard.megatron.files import TorchDist
from tools.reshard.megatron.keys import Style
from tools.reshard.megatron.params import Experts, Norms, Param, Site, flat_sample, key_of, modules, weight_sample
from tools.reshard.tensors import Info, Rectangle
from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

ALIGNMENT = 64
"""Elements to whose multiple a parameter's start is padded (param_and_grad_buffer.py, pad_param_start)."""

BUCKET = re.compile(
    r"^(?:(?P<chained>chained_\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_[^.]*(?:\.[^.]+)*\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)
_OBJECT = re.compile(
    r"^(?:(chained_\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(optimizer|grad_scaler)/shard_0_1$"
)
_ORDERS: Sequence[tuple[Norms, Experts]] = tuple(itertools.product(("before", "inside"), ("by expert", "by layer")))
FIX = (
    "Let Megatron-LM load it in the layout that wrote it, and save it with --dist-ckpt-optim-fully-reshardable; or "
    "take the weights alone: --drop_optimizer."
)


@dataclass(slots=True, frozen=True)
class BucketSegment:
    """A range of a bucket, and the parameters with the same ends."""

    bucket: str
    """Key, but for the state."""
    start: int
    candidates: tuple[Param, ...]

    @property
    def sites(self) -> set[Site]:
        """Where in the model it may be."""
        return {param.site for param in self.candidates}


@dataclass(slots=True, frozen=True)
class BucketRows:
    """A rectangle of a tensor, row by row in a bucket."""

    box: Rectangle
    bucket: str
    start: int


@dataclass(slots=True, frozen=True)
class ReplicaCopy:
    """A parameter that lies in two ranks' memory: (bucket, first element) of the one that is read, and of another."""

    param: Param
    read: tuple[str, int]
    other: tuple[str, int]


@dataclass(slots=True, frozen=True)
class FlatTensor:
    """A state of the optimizer, of the shape of its weight."""

    dtype: str
    shape: tuple[int, ...]
    state: str
    pieces: tuple[BucketRows, ...]


class FlatStates:
    """A folder's tensors, the optimizer's by weight: ``optimizer.state.<state>.<Megatron's key>``."""

    def __init__(
        self, files: TorchDist, pieces: Mapping[str, tuple[BucketRows, ...]], copies: Sequence[ReplicaCopy] = ()
    ) -> None:
        plain: dict[str, Info] = {key: info for key, info in files.tensors.items() if not BUCKET.match(key)}
        self.files, self.copies = files, copies
        self._flat = {
            f"{STATE}{state}.{key}": FlatTensor(
                files.tensors[f"{found[0].bucket}.{state}"].dtype, files.tensors[key].shape, state, found
            )
            for key, found in pieces.items()
            for state in STATES
        }
        self.tensors: Mapping[str, Info] = plain | self._flat

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """As ``TorchDist.read``."""
        if key not in self._flat:
            self.files.read(key, offset, into)
            return
        info = self._flat[key]
        for piece in info.pieces:
            lows = [max(at, start) for at, start in zip(piece.box[0], offset, strict=True)]
            ends = zip(*piece.box, offset, into.shape, strict=True)
            highs = [min(at + size, start + length) for at, size, start, length in ends]
            if all(high > low for low, high in zip(lows, highs, strict=True)):
                cut = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, offset, strict=True))
                inside = [slice(low - at, high - at) for low, high, at in zip(lows, highs, piece.box[0], strict=True)]
                into[cut] = self._part(f"{piece.bucket}.{info.state}", info.dtype, piece, inside)

    def _part(self, key: str, dtype: str, piece: BucketRows, inside: Sequence[slice]) -> np.ndarray:
        """A rectangle of a piece; its rows are read whole."""
        shape = piece.box[1]
        axis = next((number for number, length in enumerate(shape) if length > 1), len(shape) - 1)
        row = math.prod(shape[axis + 1 :])
        first, last = inside[axis].start, inside[axis].stop
        words = np.empty((last - first) * row, dtype=WORDS[ITEM_BYTES[dtype]])
        self.files.read(key, (piece.start + first * row,), words)
        rows = words.reshape(*shape[:axis], last - first, *shape[axis + 1 :])
        return rows[(*inside[:axis], slice(None), *inside[axis + 1 :])]

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def has_buckets(files: TorchDist) -> bool:
    """Whether the optimizer's state is flat."""
    return any(map(BUCKET.match, files.tensors))


def by_weight(
    files: TorchDist, weights: Collection[str], shape: GPTShape, style: Style, moe: Collection[int | None]
) -> FlatStates:
    """The optimizer's state by weight. Raises UserError for what is not found, or is ambiguous, by name."""
    params = list(megatron_params.held_params(files, weights, shape, style, moe))
    index: dict[bytes, list[Param]] = {}
    for param in params:
        index.setdefault(weight_sample(files, param), []).append(param)
    places: dict[Param, tuple[str, int]] = {}
    copies: list[ReplicaCopy] = []
    for buckets in buffers_of(files).values():
        segments = [segment for bucket in buckets for segment in _segments(files, bucket, params, index)]
        for segment, param in zip(segments, _told_apart(files.folder, segments, shape), strict=True):
            here = (segment.bucket, segment.start)
            if places.setdefault(param, here) != here:
                copies.append(ReplicaCopy(param, places[param], here))
    if lost := [key_of(param.site) for param in params if param not in places]:
        raise UserError(f"{files.folder}: found no optimizer's state of {_some(lost)}. {FIX}")
    return FlatStates(files, pieces_of(places), copies)


def buffers_of(files: TorchDist) -> dict[tuple[str, int, int], list[str]]:
    """The buckets of each model chunk's memory on each TP x PP rank, in order: keys without their state.

    By the chained optimizer's prefix, the rank's number, and the buffer's. Raises UserError where a state is lacking.
    """
    found: dict[tuple[str, int, int], dict[int, str]] = {}
    for key, info in files.tensors.items():
        if match := BUCKET.match(key):
            bucket = key.removesuffix(f".{match['state']}")
            owner = (match["chained"] or "", int(match["group"]), int(match["buffer"]))
            found.setdefault(owner, {})[int(match["bucket"])] = bucket
            param = files.tensors.get(f"{bucket}.param")
            if match["state"] not in STATES or param is None or param.shape != info.shape:
                raise UserError(f"{files.folder}: {key} is no state of Adam beside {bucket}.param. {FIX}")
    for buckets in found.values():
        for bucket, state in itertools.product(buckets.values(), STATES):
            if f"{bucket}.{state}" not in files.tensors:
                raise UserError(f"{files.folder}: lacks {bucket}.{state}. {FIX}")
    return {owner: [buckets[number] for number in sorted(buckets)] for owner, buckets in sorted(found.items())}


def _segments(
    files: TorchDist, bucket: str, params: Sequence[Param], index: Mapping[bytes, Sequence[Param]]
) -> Iterator[BucketSegment]:
    """A bucket's ranges in order, each with what it may be."""
    key = f"{bucket}.param"
    info = files.tensors[key]
    ends = {chunk.offset[0] + chunk.shape[0] for chunk in info.chunks}  # of parameters, of padding, of data ranks
    kinds = {(param.dtype, param.size, len(param.boxes)): param for param in params}
    at = 0
    while at < info.shape[0]:
        fitting = [param for (_, size, _), param in kinds.items() if at + size in ends]
        samples = dict.fromkeys(flat_sample(files, key, at, param) for param in fitting)
        found = [param for sample in samples for param in index.get(sample, ())]
        if not found:
            sizes = {param.size for param in fitting}
            names = [key_of(param.site) for param in params if param.size in sizes]
            raise UserError(
                f"{files.folder}: {key} does not round to any weight from element {at:,} on. It should be one of "
                f"{_some(names) or 'the weights, none of which fits'}. {FIX}"
            )
        ahead = aligned(found[0].size)  # a short one's padding may make it look like a longer one
        yield BucketSegment(bucket, at, tuple(param for param in found if aligned(param.size) == ahead))
        at += ahead


def aligned(count: int, divisor: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-count // divisor) * divisor


def _told_apart(folder: Path, segments: Sequence[BucketSegment], shape: GPTShape) -> list[Param]:
    """Which parameter each segment of a model chunk's memory is."""
    seen = {expert for segment in segments for _, expert in segment.sites}
    for norms, experts in _ORDERS:
        order = [site for site in modules(shape, norms, experts) if site[1] in seen]
        if (sites := _stretch(segments[::-1], order)) is not None:
            return _of_one_rank(folder, segments, sites[::-1])
        if megatron_params.EMBEDDING in segments[-1].sites and (sites := _stretch(segments[-2::-1], order)) is not None:
            # Multi-token prediction on a later stage: it has an embedding of its own before its blocks.
            return _of_one_rank(folder, segments, [*sites[::-1], megatron_params.EMBEDDING])
    names = [key_of(site) for segment in segments for site in sorted(segment.sites, key=str)[:1]]
    raise UserError(
        f"{folder}: {segments[0].bucket} and what follows it hold {_some(names)}, which is not the order of "
        f"megatron-core's modules; nothing else tells equal tensors apart. {FIX}"
    )


def _stretch(segments: Sequence[BucketSegment], order: Sequence[Site]) -> Sequence[Site] | None:
    """The part of the modules' order that a model chunk's parameters are, each of which is one it may be."""
    for segment, number in zip(segments, range(len(segments)), strict=True):
        (site, *others) = segment.sites
        if not others and order.count(site) == 1:
            first = order.index(site) - number
            part = order[first : first + len(segments)] if first >= 0 else []
            fits = len(part) == len(segments) and all(
                site in segment.sites for site, segment in zip(part, segments, strict=True)
            )
            return part if fits else None
    return None


def _of_one_rank(folder: Path, segments: Sequence[BucketSegment], sites: Sequence[Site]) -> list[Param]:
    """The parameters at ``sites``: of equal slices that of the tensor-parallel rank whose memory it is."""
    choices = [
        [param for param in segment.candidates if param.site == site]
        for segment, site in zip(segments, sites, strict=True)
    ]
    ranks: dict[tuple[int, bool], int] = {}
    for found in choices:
        number, size = found[0].tp
        if len(found) == 1 and ranks.setdefault((size, found[0].site[1] is None), number) != number:
            raise UserError(
                f"{folder}: {key_of(found[0].site)} in {segments[0].bucket} is of tensor-parallel rank {number}, "
                f"others there are not. {FIX}"
            )
    chosen = []
    for found in choices:
        mine = [p for p in found if ranks.get((p.tp[1], p.site[1] is None)) == p.tp[0]]
        if len(mine) != 1:
            raise UserError(
                f"{folder}: nothing tells which slice of {key_of(found[0].site)} is in {segments[0].bucket}: its "
                f"slices are equal. {FIX}"
            )
        chosen.append(mine[0])
    return chosen


def pieces_of(places: Mapping[Param, tuple[str, int]]) -> dict[str, tuple[BucketRows, ...]]:
    """Where the rectangles of each weight lie, by Megatron's key."""
    found: dict[str, list[BucketRows]] = {}
    for param, (bucket, start) in places.items():
        for box in param.boxes:
            found.setdefault(param.key, []).append(BucketRows(box, bucket, start))
            start += math.prod(box[1])
    return {key: tuple(pieces) for key, pieces in found.items()}


def optimizer_numbers(files: TorchDist) -> dict[str, Any]:
    """Parameter groups and the loss scale of each of the chained optimizers, as the other forms' common state has them.

    A rank that has no element of a parameter group does not count its steps: the largest count is taken.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in sorted(files.objects):
        if (match := _OBJECT.match(key)) is None:
            continue
        value = files.object(key)
        value = value[0] if isinstance(value, list) and value else value
        known = found.setdefault(match[1] or "", {}).setdefault(match[3], value)
        if match[3] == "optimizer":
            for group, other in zip(known["param_groups"], value["param_groups"], strict=False):
                group["step"] = max(int(group.get("step") or 0), int(other.get("step") or 0))
    return found


def _some(names: Sequence[str]) -> str:
    return some(list(dict.fromkeys(names)))


# ---- copies of what several ranks hold alike, in Megatron's dp_reshardable form, compared whole


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
