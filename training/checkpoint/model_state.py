"""Model weights as boxes, and the moment at which they may be read."""

import contextlib
from collections.abc import Iterator

import torch

from models.layers.fp8_weights import kept_in_fp8
from parallel.ddp import Chunks, held
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.regions import Box, HeldTensor


@contextlib.contextmanager
def settled(chunks: Chunks) -> Iterator[None]:
    """Every rank's parameters are those of the last update here: no gather is under way or to come.

    With overlap_param_gather a rank otherwise has only its own shard of an update until the next forward
    pass. Costs a gather of the parameters there, and nothing elsewhere. All ranks must enter; entering twice
    is no harm.
    """
    overlapping = [
        chunk
        for chunk in chunks
        if not isinstance(chunk, FullyShardedChunk) and chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles
    ]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()


def model_boxes(chunks: Chunks, ranks: Ranks) -> list[Box]:
    """All weights of this rank's chunks, or its shards. What data ranks hold alike they write in turns.

    Those in fp8 have no memory here that could be read into: see ``plain_weights``.
    """
    found: list[Box] = []
    for number, one in enumerated(chunks):
        data = one.tensor.detach()
        if kept_in_fp8(one.tensor):
            data = torch.empty(data.numel(), dtype=data.dtype, device="meta")
        found += one.boxes("", data, writes=is_writer(number, one, ranks), has_master=one.tensor.requires_grad)
    return found


def enumerated(chunks: Chunks) -> Iterator[tuple[int, HeldTensor]]:
    """What this rank holds of all chunks, numbered alike on all data ranks."""
    return enumerate(one for chunk in chunks for one in held(chunk))


def is_writer(number: int, one: HeldTensor, ranks: Ranks) -> bool:
    """Whether this rank writes what it holds of the ``number``-th parameter or buffer: its shard, or, of what all data
    ranks hold, what it is this one's turn to write. Not where a TP peer or another pipeline stage does."""
    region = one.regions[0]
    if not region.is_original:
        return False
    if one.shards is not None:
        return one.is_main
    is_expert = not getattr(one.tensor, "allreduce", True)  # Megatron's mark
    return bool(region.replica[-1] == number % (ranks.pgs.expt_dp if is_expert else ranks.pgs.dp_cp).size())
