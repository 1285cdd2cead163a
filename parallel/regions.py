"""Which rectangles of global tensors a rank holds: of a parameter, of its shard, or of any range of its elements.

ZeRO-1 cuts the flat memory of a bucket of parameters among the data ranks, at arbitrary elements; fully_shard gives
each rank some of a parameter's rows. Such a range of a tensor is no rectangle, but it is at most 2 N - 1 rectangles for
N dims: whole rows, and parts of the first and the last row. Written as those, every rank saves its own slice without
asking anybody, and any layout can read it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Box:
    """The rectangle at ``offset`` of the global tensor ``key``."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    """This rank's memory, a view with one dim for each of ``global_shape``: saved from, restored into."""
    writes: bool
    """Whether this rank saves it: of ranks that hold the same box, one does."""
    has_master: bool = False
    """A weight that the optimizer has in fp32, too."""


class FlatBox(NamedTuple):
    """A rectangle of a tensor, and where it begins in the tensor's flat memory."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


def flat_boxes(shape: tuple[int, ...], start: int, end: int) -> list[FlatBox]:
    """The flat range [start, end) of a row-major tensor as rectangles, each contiguous in memory."""
    if start >= end:
        return []
    if not shape:
        return [FlatBox((), (), 0)]
    rest, row = (0,) * (len(shape) - 1), math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows [first, last)
    if first > last:
        return _in_row(shape, last, start, end)
    found = _in_row(shape, first - 1, start, first * row)
    if first < last:
        found.append(FlatBox((first, *rest), (last - first, *shape[1:]), first * row))
    return found + _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], index: int, start: int, end: int) -> list[FlatBox]:
    """The flat range [start, end), which lies within row ``index``."""
    base = index * math.prod(shape[1:])
    inner = flat_boxes(shape[1:], start - base, end - base)
    return [FlatBox((index, *box.offset), (1, *box.shape), base + box.start) for box in inner]


@dataclass(kw_only=True, slots=True, frozen=True)
class Region:
    """A rectangle of a global tensor that a parameter holds, in all or a contiguous part of its memory.

    A gated fc1 holds two: a part of the gate, and a part of the up projection, which lie apart in the global
    tensor.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the rectangle, with one dim for each of ``global_shape``."""
    start: int
    """Where it begins in the parameter's flat memory."""
    replica: tuple[int, ...]
    """Which of the equal copies on other ranks this is; the last number counts data ranks."""

    @property
    def is_original(self) -> bool:
        """Not the copy of one that a TP peer or another pipeline stage (tied embeddings) holds and saves."""
        return not any(self.replica[:-1])

    def boxes(self, prefix: str, data: Tensor, start: int, writes: bool, has_master: bool = False) -> list[Box]:
        """What of ``data``, the parameter's flat elements from ``start`` on, lies in here; as boxes."""
        here, end = start - self.start, start - self.start + data.numel()
        return [
            Box(
                key=prefix + self.key,
                global_shape=self.global_shape,
                offset=tuple(base + own for base, own in zip(self.offset, box.offset, strict=True)),
                data=data[box.start - here : box.start - here + math.prod(box.shape)].view(box.shape),
                writes=writes,
                has_master=has_master,
            )
            for box in flat_boxes(self.shape, max(here, 0), min(end, math.prod(self.shape)))
        ]


class HeldTensor(NamedTuple):
    """What a rank holds of a parameter or a buffer: all of it, or its shard."""

    tensor: Tensor
    regions: list[Region]
    """Of the whole one."""
    start: int = 0
    """Of the first element held, in the whole one's flat memory."""
    shards: int | None = None
    """How many data ranks hold different elements of it; None: all of them hold the same."""
    shard: int = 0
    """Which of them this is."""
    is_main: bool = True
    """Of HSDP's copies of a shard, the one that is saved."""

    def boxes(self, prefix: str, data: Tensor, writes: bool, has_master: bool = False) -> list[Box]:
        """What is held, as boxes; ``data`` has as many elements as ``tensor``."""
        flat = data.view(-1)
        return [box for one in self.regions for box in one.boxes(prefix, flat, self.start, writes, has_master)]


def boxes_of(held: Iterable[HeldTensor]) -> Iterator[Box]:
    """The tensors themselves, as boxes: to be read, or written in place."""
    for one in held:
        yield from one.boxes("", one.tensor.detach(), writes=False)


def whole_tensors(chunk: MegatronModule) -> Iterator[HeldTensor]:
    """Every parameter and buffer of an unwrapped chunk, with the rectangles of global tensors it holds.

    mcore describes them. Transformer Engine's ``_extra_state`` objects, which are pickles, are left out: what they
    hold under fp8 with the recipe "delayed" is in training/checkpoint/model_state.py.
    """
    for entry in nested_values(chunk.sharded_state_dict()):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            yield HeldTensor(entry.data, [_region(entry, start=0)])
        elif isinstance(entry, ShardedTensorFactory):
            yield HeldTensor(entry.data, _pieces(entry))


def _pieces(factory: ShardedTensorFactory) -> list[Region]:
    """What a factory makes of a parameter, found by letting it cut a tensor that has no memory."""
    without_memory = torch.empty(tuple(factory.data.shape), dtype=factory.data.dtype, device="meta")
    pieces = [
        piece
        for piece in nested_values(replace(factory, data=without_memory).build())
        if isinstance(piece, ShardedTensor)
    ]
    found = [_region(piece, start=int(piece.data.storage_offset())) for piece in pieces]
    in_one_piece = all(piece.data.is_contiguous() for piece in pieces)
    if not in_one_piece or sum(math.prod(region.shape) for region in found) != without_memory.numel():
        raise NotImplementedError(f"{factory.key}: mcore cuts it into pieces that are not contiguous in memory")
    return found


def _region(entry: ShardedTensor, start: int) -> Region:
    replica = entry.replica_id if isinstance(entry.replica_id, tuple) else (0, 0, entry.replica_id)
    return Region(
        key=entry.key,
        global_shape=tuple(entry.global_shape),
        offset=tuple(entry.global_offset),
        shape=(1,) * entry.prepend_axis_num + tuple(entry.local_shape),
        start=start,
        replica=replica,
    )
