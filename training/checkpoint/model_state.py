"""Model weights as boxes, and the moment at which they may be read; and Transformer Engine's scales of the fp8 recipe
"delayed", with the histories of largest values they come from.

Scales are the same on every rank of a pipeline stage: Transformer Engine reduces them over TP, CP and DP after each
pass. So one rank writes them, and any layout reads them; experts' ones, which a rank has for its own experts by number,
need the same EP. Other recipes have none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from models.layers.fp8_weights import kept_in_fp8
from parallel.ddp import Chunks, device_of, held, unwrap
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


FP8_PREFIX = "fp8."
FP8_PASSES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""Transformer Engine's names of the two sets that a module has."""


@torch.no_grad()
def fp8_tensors(chunks: Chunks) -> dict[str, Tensor]:
    """The live scales, fp32 [n], and histories, fp32 [length, n], by key: allocated here where no step has yet."""
    config = chunks[0].config
    if config.fp8 is None or config.fp8_recipe != "delayed" or device_of(chunks[0]).type != "cuda":
        return {}
    found = {}
    for chunk in chunks:
        for name, module in _quantizing(unwrap(chunk)):
            if not module.fp8_initialized:  # one that keeps its weights in fp8 has scales, but does not update them yet
                _allocate(module, config)
            for which, key in FP8_PASSES.items():
                state = module.fp8_meta[key]
                found[f"{FP8_PREFIX}{name}.{which}.scale"] = state.scale
                found[f"{FP8_PREFIX}{name}.{which}.amax_history"] = state.amax_history
    return found


@contextlib.contextmanager
def fp8_kept(chunks: Chunks) -> Iterator[None]:
    """Within, forward passes leave no trace: the values that an evaluation sees would else move scales of training."""
    states = list(fp8_tensors(chunks).values())
    before = [state.clone() for state in states]
    try:
        yield
    finally:
        if states:
            torch._foreach_copy_(states, before)


def _allocate(module: Any, config: TransformerConfig) -> None:
    """As its first forward pass would. All modules are then updated together from the first pass on: with several
    chunks, those of chunks that had not run yet would else miss updates that a resumed run must make."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with get_fp8_context(config):
        module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)


def _quantizing(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with matrices that are multiplied in fp8, by the names of their parameters in the whole model."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    layers = {
        f"{path}.layers.{here}.": f"{path}.layers.{layer.layer_number - 1}."
        for path, stack in chunk.named_modules()
        if isinstance(stack, HybridStack)
        for here, layer in enumerate(stack.layers)
    }
    for path, module in chunk.named_modules():
        if isinstance(module, TransformerEngineBaseModule) and next(module.parameters(recurse=False), None) is not None:
            within = next((prefix for prefix in layers if path.startswith(prefix)), "")
            yield layers.get(within, "") + path.removeprefix(within), module


def fp8_boxes(chunks: Chunks, ranks: Ranks) -> list[Box]:
    """Of this rank's stage; its first rank writes."""
    writes = ranks.at.tp == ranks.at.cp == ranks.at.dp == 0
    return [
        Box(key=key, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim(), data=tensor, writes=writes)
        for key, tensor in fp8_tensors(chunks).items()
    ]
