"""Fully sharded data parallelism: torch's fully_shard (FSDP2) around a model chunk, as Megatron's schedules want it.

A unit's weights are gathered, and its gradients reduced, together: a block, experts that EP splits, the embedding, the
output layer, a depth of multi-token prediction; the root has the rest (the last norm, tied embeddings).

    optim_grads_params (ZeRO-3)  A unit is whole while it computes: it is gathered before its forward pass, and again
                                 before its backward pass, for each microbatch. Not twice: the root, the output layer
                                 without a pipeline, and the embedding, whose backward pass needs no weight.
    optim_grads (ZeRO-2)         A unit is whole from its first forward pass in a step to its last backward pass.
    both                         Gradients are reduced into shards by the backward pass of each microbatch. Between
                                 steps weights, gradients and the optimizer's state are shards.

So a step of m microbatches gathers a unit 2 m times, or once, and reduces it m times; ZeRO-1 does each once. HSDP's
copies all-reduce their gradients once a step, after the last microbatch; in 16 bits after each.

With optimizer.optimizer_cpu_offload shards and their gradients lie in host memory (CPUOffloadPolicy): each gather
copies this rank's fp32 shard, which is pinned, to the GPU first, and each reduction copies its result back. From the
second microbatch on the host waits for that copy and adds it to the gradients before; HSDP's copies come back once.

megatron-core's TorchFullyShardedDataParallel is not used: it averages gradients over ranks, and its scale_gradients
does nothing, so that with a loss per token they are wrong by a factor (tests/parallel/test_fsdp.py).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.fsdp_units import ShardRanks, shard, sharded_over
from parallel.groups import Ranks
from parallel.regions import HeldTensor, Region, whole_tensors

Fill = Callable[[Sequence[HeldTensor]], None]
"""Gives tensors their initial values."""


class FullyShardedChunk(_BaseDataParallel):
    """A model chunk in shards over its data ranks.

    The optimizer, and all else that asks for ``named_parameters``, sees plain fp32 tensors: views of this rank's
    shards, but for those without an element. So Adam and clipping need no DTensor, and dense parameters and experts,
    which are cut over different ranks, can be in one norm. ``main_grad`` is their gradient, fp32, once
    ``finish_grad_sync`` has been called.
    """

    def __init__(
        self,
        chunk: MegatronModule,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        ranks: Ranks,
        fill: Fill,
        on_host: bool = False,
    ) -> None:
        """chunk: built without memory for its parameters ("meta"). What it holds is described before it is cut.
        on_host: shards are in the host's memory."""
        module = chunk if precision.dtype == "fp32" else Float16Module(chunk.config, chunk)
        super().__init__(config=chunk.config, module=module)
        self.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False, overlap_grad_reduce=True)
        self.keeps_weights = parallel.sharding == "optim_grads"
        self.adds_copies_once = precision.dtype == "fp32" or precision.grad_reduce_in_fp32
        over = sharded_over(ranks, parallel.num_distributed_optimizer_instances)
        paths = {param: path for path, param in chunk.named_parameters()}
        whole = list(whole_tensors(chunk))
        held = {paths[one.tensor]: one.regions for one in whole if one.tensor in paths}
        self.buffers_held = [one for one in whole if one.tensor not in paths]
        marks = {path: dict(vars(param)) for param, path in paths.items()}
        module._apply(lambda tensor: tensor.float() if tensor.is_meta else tensor)  # buffers stay as they are
        self.units = shard(module, chunk, parallel, precision, over, CPUOffloadPolicy() if on_host else OffloadPolicy())
        self.device, self.on_host = ranks.device, on_host
        module._apply(self._with_memory)
        for unit in self.units:  # the first gather moves shards that need padding: what is kept must come after it
            unit.unshard()
            unit.reshard()
        self.sharded: dict[str, Any] = dict(chunk.named_parameters())
        """By its path in the chunk, each parameter as fully_shard has it between steps: a DTensor."""
        self.shards: dict[str, HeldTensor] = {}
        """By the same paths, this rank's part of it."""
        for path, param in self.sharded.items():
            param.__dict__.update(marks[path])  # Megatron's: fully_shard makes new parameters (pytorch issue 136929)
            self.shards[path] = _shard_of(param, held[path], over.of(param))
        self.views: dict[str, Any] = {path: one.tensor for path, one in self.shards.items()}
        fill([*self.shards.values(), *self.buffers_held])

    def _with_memory(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device="cpu" if self.on_host and isinstance(tensor, DTensor) else self.device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The chunk's. Without a backward pass to come, all weights are freed after it."""
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            for unit in self.units:
                unit.reshard()
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Views of the shards, [rows, ...] fp32; not of those that are empty, which no optimizer's kernel expects."""
        yield from ((f"module.{path}", view) for path, view in self.views.items() if view.numel())

    def held(self) -> Iterator[HeldTensor]:
        """What this rank holds of every parameter, and its buffers."""
        yield from self.shards.values()
        yield from self.buffers_held

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, more microbatches follow: no wait for reductions, no sum over HSDP's copies and, with optim_grads, no
        weight is freed."""
        self._end_backward(is_last=False)
        try:
            yield
        finally:
            self._end_backward(is_last=True)

    def _end_backward(self, *, is_last: bool) -> None:
        self.units[0].set_is_last_backward(is_last)
        if self.adds_copies_once:  # until then microbatches are added up in the type of the reductions
            self.units[0].set_requires_all_reduce(is_last)
        if self.keeps_weights:
            self.units[0].set_reshard_after_backward(is_last)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Gradients are in shards by now: show them where Megatron looks for them."""
        for path, param in self.sharded.items():
            gradient = None if param.grad is None else param.grad.to_local()
            if self.on_host and gradient is not None and _is_summed_later(path, param):
                gradient = gradient.to(self.device)  # NCCL sums nothing in the host's memory
            # On the module's own parameter, too: Megatron sums those of tied embeddings over stages there.
            param.main_grad = self.views[path].main_grad = gradient

    def missing_gradients(self) -> list[str]:
        """Paths of the parameters that got none since ``zero_grad_buffer``."""
        return [path for path, param in self.sharded.items() if param.requires_grad and param.grad is None]

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        if self.on_host:
            scaling_factor = float(scaling_factor)  # waits for the device, as the host's update must
            for view in self.views.values():
                view.main_grad = view.main_grad.cpu()
        torch._foreach_mul_([view.main_grad for view in self.views.values()], scaling_factor)

    def zero_grad_buffer(self) -> None:
        for path, param in self.sharded.items():
            param.grad = param.main_grad = None
            self.views[path].main_grad = None

    def whole_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter, by its path, as the forward pass uses it, one unit at a time. Collective."""
        inner = self.module.module if isinstance(self.module, Float16Module) else self.module
        for unit in self.units:
            unit.unshard()
            yield from (entry for entry in inner.named_parameters() if entry[1] is not self.sharded[entry[0]])
            unit.reshard()

    def observe_reductions(self, note: Callable[[Tensor], None]) -> None:
        """Call ``note`` with this rank's own gradients of a unit, or of a parameter that is not cut, before they are
        summed over ranks, after each microbatch. Collective."""
        for unit in self.units:
            unit.set_custom_reduce_scatter(_ObservedReduceScatter(note))  # type: ignore[arg-type]
        for path, param in self.whole_parameters():
            if self.shards[path].shards == 1:  # it is reduced over HSDP's copies, if at all
                param.register_post_accumulate_grad_hook(lambda own: note(own.grad))


class _ObservedReduceScatter:
    """torch's own, with a look at what goes in. fully_shard's interface (torch.distributed.fsdp, ReduceScatter)."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self.note = note

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.note(input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _shard_of(param: Any, found: list[Region], over: ShardRanks) -> HeldTensor:
    view = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
    vars(view).update({name: value for name, value in vars(param).items() if not name.startswith("_")})
    first, count = over.rows(len(param))
    assert len(view) == count, f"fully_shard cut {tuple(param.shape)} into other rows than torch.chunk does"
    row = math.prod(param.shape[1:])
    return HeldTensor(view, found, first * row, shards=over.size, shard=over.rank, is_main=over.is_main)


def _is_summed_later(path: str, param: Tensor) -> bool:
    """megatron-core's finalize_model_grads sums it over TP ranks, or over the stages that share embeddings."""
    marks = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")
    return any(getattr(param, mark, False) for mark in marks) or "q_layernorm" in path or "k_layernorm" in path
