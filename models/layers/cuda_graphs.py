"""Layers as CUDA graphs (kernels.cuda_graph_impl "local"): Megatron's, and what it leaves to the program.

The first iteration runs kernel by kernel and notes what each layer is called with. Then Megatron's schedule captures a
graph of each layer's forward and of its backward pass, and every later iteration launches those.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from torch import nn

from models.shapes import GPTShape
from parallel.random_states import set_tracked_states, tracked_states

MANAGER = "cudagraph_manager"
"""A layer that has it is called as a graph."""


def settings(shape: GPTShape, on: bool) -> dict[str, Any]:
    """mcore's fields. How many tokens an expert gets is the router's choice, and a graph's sizes are fixed: layers of
    experts run kernel by kernel."""
    if not on:
        return {"cuda_graph_impl": "none", "cuda_graph_modules": []}
    dense = ["mlp"] if not all(shape.moe_blocks) else []
    return {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": ["attn", *dense] if shape.num_moe_experts else [],
        # What a stage sends is the same tensor each time; emptied once sent, it would stay empty.
        "deallocate_pipeline_outputs": False,
    }


def install(sequence_parallel: bool) -> None:
    """Let Megatron's schedules capture with the random states that layers run with, and leave these as they were.

    And without a progress bar in the ranks' logs.
    """
    cuda_graphs.HAVE_TQDM = False
    schedules.create_cudagraphs = _without_drawing(functools.partial(_capture, sequence_parallel))


def _capture(sequence_parallel: bool) -> Any:
    """Shards of a sequence differ in what they drop: LayerStack (spec.py) sees to that around layers, not in them."""
    with get_cuda_rng_tracker().fork() if sequence_parallel else contextlib.nullcontext():
        return cuda_graphs.create_cudagraphs()


def _without_drawing(capture: Callable[[], Any]) -> Callable[[], Any]:
    """A resumed run captures once more, and what warms a capture up draws: it would go on with other numbers."""

    def capturing() -> Any:
        if not cuda_graphs._CudagraphGlobalRecord.cudagraph_record:
            return None
        # A capture sets gradients aside and puts them back; overlapped reductions may still write them: Megatron-LM has
        # finished these by now, and here the step does once the schedule has returned.
        torch.cuda.synchronize()
        tracked, own = tracked_states(), torch.cuda.get_rng_state()
        try:
            return capture()
        finally:
            set_tracked_states(tracked)
            torch.cuda.set_rng_state(own)

    return capturing


def separate_microbatches(chunk: HybridModel) -> None:
    """In a pipeline each microbatch has graphs of its own, and Megatron captures none of a backward pass while an input
    waits for the forward pass of a later microbatch: the rotary embedding, which all share, is copied for each."""
    if chunk.position_embedding_type == "rope":
        chunk.rotary_pos_emb.register_forward_hook(lambda _module, _inputs, embedding: embedding.clone())


@contextlib.contextmanager
def kernel_by_kernel(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """No layer is called as a graph meanwhile: in an evaluation, which drops nothing and whose microbatches are
    others, and where hooks look into layers."""
    kept = [(layer, layer._modules.pop(MANAGER)) for chunk in chunks for layer in _graphed(chunk)]
    try:
        yield
    finally:
        for layer, manager in kept:
            layer._modules[MANAGER] = manager


def _graphed(chunk: nn.Module) -> list[nn.Module]:
    return [module for module in chunk.modules() if MANAGER in module._modules]
