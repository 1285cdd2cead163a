"""Data parallelism around model chunks: Megatron's DistributedDataParallel, or fully_shard where gradients, or weights
too, are in shards."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.fsdp import Fill, FullyShardedChunk
from parallel.groups import Ranks
from parallel.megatron_fields import checked
from parallel.precision import param_gather_settings
from parallel.regions import HeldTensor, whole_tensors

type Chunk = DistributedDataParallel | FullyShardedChunk
Chunks = Sequence[Chunk]
"""A rank's model chunks, one for each virtual pipeline stage, within data parallelism."""
REPLAYED = "_cudagraph_wgrad_ready_event"
"""A parameter's in megatron-core, once a CUDA graph has added to its gradient, of which no hook of autograd's hears."""


def wrap(
    chunks: Sequence[MegatronModule],
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    ranks: Ranks,
    fill: Fill | None = None,
    shards_on_host: bool = False,
) -> Chunks:
    """Each chunk with its gradients reduced over its replicas, and with what parallel.sharding says cut over them.

    fill: gives the shards of ``optim_grads`` and ``optim_grads_params`` their initial values; their chunks were built
    without memory for parameters. Not needed without them. shards_on_host: their shards lie in the host's memory
    (CPUOffloadPolicy).
    """
    wrapped: list[Chunk] = []
    for number, chunk in enumerate(chunks):
        if parallel.fully_sharded:
            assert fill is not None
            wrapped.append(FullyShardedChunk(chunk, parallel, precision, ranks, fill, shards_on_host))
        else:
            wrapped.append(_wrap_whole(chunk, parallel, precision, ranks, is_first=number == 0))
    _tell_schedule(wrapped, parallel, ranks)
    return wrapped


def _wrap_whole(
    chunk: MegatronModule, parallel: ParallelConfig, precision: PrecisionConfig, ranks: Ranks, *, is_first: bool
) -> DistributedDataParallel:
    """A chunk whose weights every data rank holds, with buckets of gradients."""
    return DistributedDataParallel(
        chunk.config,
        ddp_config(parallel, precision),
        chunk if precision.dtype == "fp32" else Float16Module(chunk.config, chunk),
        # Later chunks of a rank have nothing to overlap with unless gradients are reduced during the backward pass.
        disable_bucketing=not is_first and not parallel.overlap_grad_reduce,
        pg_collection=ranks.pgs,
    )


def ddp_config(parallel: ParallelConfig, precision: PrecisionConfig) -> DistributedDataParallelConfig:
    """megatron-core's. Raises SharedMistake for a field in parallel.megatron that it lacks."""
    settings = {
        "use_distributed_optimizer": parallel.sharding == "optim",
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
        "grad_reduce_in_fp32": precision.dtype != "fp32" and precision.grad_reduce_in_fp32,
        "bucket_size": parallel.ddp_bucket_size,
        **param_gather_settings(precision),
    }
    settings |= checked("parallel.megatron", parallel.of_ddp, DistributedDataParallelConfig)
    return DistributedDataParallelConfig(**settings)


def _tell_schedule(wrapped: Chunks, parallel: ParallelConfig, ranks: Ranks) -> None:
    """Give the pipeline schedule, which reads them from the model's config, the hooks into gradient reduction."""
    config: TransformerConfig = wrapped[0].config
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync[0] if len(wrapped) == 1 else no_sync
    if parallel.overlap_grad_reduce and ranks.layout.vpp > 1 and not parallel.fully_sharded:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    coverage = GradientCoverage(wrapped)

    def finalize(model: list[Chunk], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        coverage.check()
        finalize_model_grads(model, num_tokens, **kwargs)
        coverage.reset()

    config.finalize_model_grads_func = finalize


class GradientCoverage:
    """Knows which parameters got a gradient since the last check, and names those that got none.

    Megatron would train such a parameter on zeros silently, or, with overlapped reduction, wait for its bucket.
    Costs one Python call per parameter and microbatch.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.sharded = [chunk for chunk in chunks if isinstance(chunk, FullyShardedChunk)]
        whole = [chunk for chunk in chunks if not isinstance(chunk, FullyShardedChunk)]
        several = len(chunks) > 1
        self.names = {
            param: f"chunk {number}: {name}" if several else name
            for number, chunk in enumerate(whole)
            for name, param in unwrap(chunk).named_parameters()
            if param.requires_grad
        }
        self.seen: set[Tensor] = set()
        for param in self.names:
            param.register_post_accumulate_grad_hook(self.seen.add)

    def check(self) -> None:
        """Raises RuntimeError with the names of parameters without a gradient."""
        missing = [
            name
            for param, name in self.names.items()
            if param not in self.seen and getattr(param, REPLAYED, None) is None
        ]
        for number, chunk in enumerate(self.sharded):
            several = f"chunk {number}: " if len(self.sharded) > 1 else ""
            missing += [several + path for path in chunk.missing_gradients()]
        if missing:
            raise RuntimeError(f"{len(missing)} parameter(s) got no gradient in this step: {', '.join(missing[:8])}")

    def reset(self) -> None:
        """Once gradients are reduced, for which Megatron waits for the replayed ones."""
        self.seen.clear()
        for param in self.names:
            if getattr(param, REPLAYED, None) is not None:
                setattr(param, REPLAYED, None)


def unwrap(chunk: MegatronModule) -> MegatronModule:
    """The model chunk inside data parallelism and precision wrappers; checkpoint keys and names come from it."""
    while not isinstance(chunk, MegatronModule) or isinstance(
        chunk, DistributedDataParallel | FullyShardedChunk | Float16Module
    ):
        chunk = chunk.module
    return chunk


def device_of(chunk: Chunk) -> torch.device:
    """Where it computes; its shards may lie on the host."""
    return chunk.device if isinstance(chunk, FullyShardedChunk) else next(chunk.parameters()).device


def held(chunk: Chunk) -> Iterator[HeldTensor]:
    """What this rank holds of every parameter and buffer of a chunk, in the same order on all data ranks."""
    if isinstance(chunk, FullyShardedChunk):
        return chunk.held()
    return whole_tensors(unwrap(chunk))


def held_by_path(chunk: Chunk) -> dict[str, HeldTensor]:
    """The same of its parameters, by their paths in the chunk without wrappers."""
    if isinstance(chunk, FullyShardedChunk):
        return chunk.shards
    own = {one.tensor: one for one in held(chunk)}
    return {path: own[param] for path, param in unwrap(chunk).named_parameters() if param in own}
