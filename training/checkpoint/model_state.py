"""Model weights as boxes, and the moment at which they may be read."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from models.layers.fp8_weights import kept_in_fp8
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from training.checkpoint.boxes import Box, Region


@contextlib.contextmanager
def settled(chunks: Chunks) -> Iterator[None]:
    """Every rank's parameters are those of the last update here: no gather is under way or to come.

    With overlap_param_gather a rank otherwise has only its own shard of an update until the next forward
    pass. Costs a gather of the parameters there, and nothing elsewhere. All ranks must enter; entering twice
    is no harm.
    """
    overlapping = [chunk for chunk in chunks if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()


def regions(chunk: MegatronModule) -> Iterator[tuple[Tensor, list[Region]]]:
    """Every parameter and buffer of an unwrapped chunk, with the rectangles of global tensors it holds.

    mcore describes them. Transformer Engine's ``_extra_state`` objects, which are pickles, are left out: what they
    hold under fp8 with the recipe "delayed" is in fp8_state.
    """
    for entry in nested_values(chunk.sharded_state_dict()):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            yield entry.data, [_region(entry, start=0)]
        elif isinstance(entry, ShardedTensorFactory):
            yield entry.data, _pieces(entry)


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


def model_boxes(chunks: Chunks, ranks: Ranks) -> list[Box]:
    """All weights of this rank's chunks. Data ranks hold the same ones and share the writing in turns.

    Those in fp8 have no memory here that could be read into: see ``plain_weights``.
    """
    found: list[Box] = []
    for number, (param, held) in enumerate(entry for chunk in chunks for entry in regions(unwrap(chunk))):
        whole = torch.empty(param.numel(), dtype=param.dtype, device="meta") if kept_in_fp8(param) else param.detach()
        for region in held:
            flat = whole.view(-1)[region.start : region.start + math.prod(region.shape)]
            writes = region.is_original and is_turn_of(number, param, region, ranks)
            found += region.boxes("", flat, region.start, writes, has_master=param.requires_grad)
    return found


def is_turn_of(number: int, param: Tensor, region: Region, ranks: Ranks) -> bool:
    """Whether this rank, of the data ranks that all hold the ``number``-th entry, is the one to write it."""
    is_expert = not getattr(param, "allreduce", True)  # Megatron's mark
    return region.replica[-1] == number % (ranks.pgs.expt_dp if is_expert else ranks.pgs.dp_cp).size()
