"""Blocks by torch.compile (train.compile): attention, MLPs and mixers become fused kernels as they first run.

Layers of one kind share one compiled function, so a deep model compiles about as long as one of two blocks. What Dynamo
cannot follow runs as it is written, between compiled parts: experts with their exchange of tokens, attention of packed
documents, and the linear layers of tensor parallelism whose collectives run beside products. Parameters, their names
and checkpoints stay as they are; so do hooks of a layer, which run around its compiled part. Not yet run on a GPU.
"""

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from models.layers import max_logits
from models.layers.attention import SDPAttention
from models.layers.cuda_graphs import kernel_by_kernel
from parallel.cpu import eager

Function = Callable[..., Any]
MOST_VARIANTS = 64
"""Of one function: layers that differ in shape or kind, sizes that change. Beyond it, it runs as it is written."""
KEPT_RECORDS = 4096
"""Compilations that torch remembers (64 by itself) until training.metrics.compilation has read them."""

OWN_LIMIT = {"recompile_limit": MOST_VARIANTS, "isolate_recompiles": True}
"""Arguments of torch.compile from torch 2.12 or 2.13 on."""
HAS_OWN_LIMIT = OWN_LIMIT.keys() <= inspect.signature(torch.compile).parameters.keys()
"""Whether kinds that inherit one forward do not count, and name, each other's compilations. Where they do, they share
Dynamo's limit."""


class Compiler:
    """Of one rank's chunks."""

    def __init__(
        self, device: torch.device, latent_attention: bool = False, backend: str | Function = "inductor"
    ) -> None:
        """latent_attention: the model has it. backend: of torch.compile; a test's may stop before Inductor."""
        self.backend, self.functions = backend, dict[type, Function]()
        # Dropout draws what it draws uncompiled. Inductor's search for attention in our own, which is torch's already,
        # fails where values are narrower than keys (torch 2.13, fx_passes/fuse_attention.py, _sfdp_replacement_29).
        self.options = {"fallback_random": True, **({"pattern_matcher": False} if latent_attention else {})}
        if device.type == "cpu":
            eager.allow_compilation()
        _prepare_dynamo()
        SDPAttention.within_documents = torch.compiler.disable(SDPAttention.within_samples)
        max_logits.collect = torch.compiler.disable(max_logits.collect)

    def install(self, chunk: HybridModel) -> None:
        """For each layer of a chunk's stack, and of its depths of multi-token prediction."""
        for stack in chunk.modules():
            if isinstance(stack, HybridStack):
                self.compile(stack.layers)

    def compile(self, layers: Sequence[nn.Module]) -> None:
        """Each as it is first called. A layer takes its input [s, b, h] first, or as ``hidden_states``."""
        for layer in layers:
            if getattr(layer, "is_moe_layer", False):
                experts: Any = layer.mlp
                experts.forward = torch.compiler.disable(experts.forward)
            layer.forward = CompiledForward(self._of_kind(type(layer)), layer)  # no submodule: no key of a state dict

    def _of_kind(self, kind: type[nn.Module]) -> Function:
        if kind not in self.functions:
            options: Any = self.options if self.backend == "inductor" else None
            limit: dict[str, Any] = OWN_LIMIT if HAS_OWN_LIMIT else {}
            self.functions[kind] = torch.compile(kind.forward, backend=self.backend, options=options, **limit)
        return self.functions[kind]


class CompiledForward:
    """A layer's ``forward``: the function that its kind shares, on this layer."""

    def __init__(self, function: Function, layer: nn.Module) -> None:
        self.function, self.layer = function, layer

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, _with_plain_strides(hidden_states), *args, **kwargs)


@contextlib.contextmanager
def as_written(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """No layer runs compiled, or as a CUDA graph, meanwhile: in evaluation and generation, whose sizes are others, and
    where hooks look into layers."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if is_compiled(layer)]
    kept = [(layer, layer.__dict__.pop("forward")) for layer in layers]
    try:
        with kernel_by_kernel(chunks):
            yield
    finally:
        for layer, forward in kept:
            layer.forward = forward


def is_compiled(layer: nn.Module) -> bool:
    """Whether it has been through ``Compiler.compile``."""
    return isinstance(layer.__dict__.get("forward"), CompiledForward)


def cache_dir() -> str:
    """Where compiled kernels are kept for the next start."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


def _prepare_dynamo() -> None:
    """Warnings, which megatron-core gives from within layers, do not cut a layer in two; hooks that are added to a
    compiled layer's parts later are seen; and no compilation of a start is forgotten before it is counted."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import set_compilation_metrics_limit

    dynamo.config.ignore_logging_functions.add(warnings.warn)
    dynamo.config.skip_nnmodule_hook_guards = False
    set_compilation_metrics_limit(KEPT_RECORDS)
    if not HAS_OWN_LIMIT:
        dynamo.config.recompile_limit = MOST_VARIANTS
        # torch 2.11 would write its settings as JSON into each record, cannot for this one, and loses the record
        dynamo.utils._get_dynamo_config_for_logging = lambda: None


def _with_plain_strides(hidden: Tensor) -> Tensor:
    """[s, b, h] with the strides of a fresh tensor. With b = 1 the embedding's are those of [b, s, h], which hold the
    same memory: the first layer would be compiled for them alone."""
    s, b, h = hidden.shape
    if b == 1 and hidden.is_contiguous() and hidden.stride() != (h, h, 1):
        return hidden.view(s * h).view(s, b, h)
    return hidden
