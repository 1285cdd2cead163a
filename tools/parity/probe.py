"""What one rank of a layout does for the proof, and what it writes down."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from data.loader import Batch, Packing
from data.prepared import Prepared
from models.names import canonical
from models.resolve import resolve
from parallel import groups
from parallel.ddp import Chunk, Chunks, held
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.launch import Identity
from training import checkpoint, train
from training.batches import BatchStream
from training.config.run_config import RunConfig
from training.forward_backward import run_schedule
from training.parts.data import open_source
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

LINE_END = ord("\n")
"""What ends a document here, where a token is a byte: 64 bytes of the corpus hardly ever hold the end of a file."""


@dataclasses.dataclass(kw_only=True)
class ProbeTask:
    """What to run: ``iterations`` steps after what ``folder`` holds, if it holds a checkpoint, and what to leave."""

    config: RunConfig
    prepared: Prepared
    folder: Path
    """Run folder: checkpoints are read from it and written to it."""
    notes: Path
    """Folder for what each rank observed: ``<rank>.pt``."""
    gradients: bool = False
    save_at: int | None = None


@dataclasses.dataclass(kw_only=True)
class ProbedPart:
    """A rank's part of a global tensor."""

    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    main: bool
    data: torch.Tensor


def run(identity: Identity, task: ProbeTask, until: int) -> None:
    """Train to iteration ``until`` and write down losses, gradient norms, gradients of step 1 and the data's order."""
    config = task.config
    shape = resolve(config.model, task.prepared.tokenizer.vocab_size)
    with groups.start(
        config.layout(identity.world_size),
        identity,
        device="cpu",
        seed=config.train.seed,
        parallel=config.parallel,
    ) as ranks:
        parts = build_parts(config, shape, ranks)
        chunks, optim = parts.chunks, parts.optimizer
        restored = checkpoint.restore(task.folder / "checkpoints", config.checkpoint, chunks, optim, ranks)
        progress = restored.progress if restored else Progress()
        gradients = step_gradients(config, task.prepared, chunks, ranks, progress) if task.gradients else {}
        observed: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "order": []}
        stream = open_stream(config, task.prepared, ranks, progress)
        while progress.iteration < until:
            watched = Watched(stream, observed["order"])
            progress, result = train.one_step(parts, watched, progress, StepRequests())
            observed["loss"].append(result.loss)
            observed["grad_norm"].append(result.grad_norm)
            if progress.iteration == task.save_at:
                checkpoint.save(
                    task.folder / "checkpoints", progress, chunks, optim, ranks, checkpoint.Contents(keep=1)
                )
        stream.close()
        task.notes.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"observed": observed, "gradients": gradients, "at": tuple(ranks.at)}, task.notes / f"{identity.rank}.pt"
        )


class Watched:
    """A batch stream that writes down a digest of each microbatch's tokens."""

    def __init__(self, stream: BatchStream, order: list[list[str]]) -> None:
        self.stream, self.order = stream, order

    def next(self, seq_length: int) -> list[Batch | None]:
        microbatches = self.stream.next(seq_length)
        self.order.append(
            [
                hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()
                for batch in microbatches
                if batch
                for row in batch.tokens
            ]
        )
        return microbatches

    @property
    def consumed_samples(self) -> int:
        return self.stream.consumed_samples


def open_stream(config: RunConfig, prepared: Prepared, ranks: Ranks, progress: Progress) -> BatchStream:
    return BatchStream(
        lambda: open_source(prepared, config, "train"),
        ranks,
        config.batches,
        config.train.micro_batch_size,
        progress.consumed_samples,
        Packing.from_config(config.data, LINE_END),
    )


def step_gradients(
    config: RunConfig, prepared: Prepared, chunks: Chunks, ranks: Ranks, progress: Progress
) -> dict[str, list[ProbedPart]]:
    """Every parameter's gradient of the next global batch, by canonical name; no weight changes."""
    stream = open_stream(config, prepared, ranks, progress)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    run_schedule(
        chunks,
        stream.next(config.model.seq_length),
        ranks,
        config.model.seq_length,
        config.train.micro_batch_size,
        forward_only=False,
    )
    stream.close()
    found: dict[str, list[ProbedPart]] = {}
    for chunk in chunks:
        for name, piece in gradient_pieces(chunk):
            found.setdefault(name, []).append(piece)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return found


@torch.no_grad()
def gradient_pieces(chunk: Chunk) -> list[tuple[str, ProbedPart]]:
    """A chunk's reduced gradients as pieces of global tensors, where the chunk holds the parameters."""
    gradients = own_gradients(chunk) if isinstance(chunk, FullyShardedChunk) else whole_gradients(chunk)
    pieces = []
    for one in (one for one in held(chunk) if one.tensor in gradients):
        is_main = one.is_main and not any(one.regions[0].replica[: -1 if one.shards else None])
        for box in one.boxes("", gradients[one.tensor], writes=is_main):
            piece = ProbedPart(offset=box.offset, global_shape=box.global_shape, main=is_main, data=box.data.clone())
            pieces.append((canonical(box.key), piece))
    return pieces


def own_gradients(chunk: FullyShardedChunk) -> dict[torch.Tensor, torch.Tensor]:
    """Shard -> its gradient."""
    return {one.tensor: one.tensor.main_grad for one in chunk.shards.values() if one.tensor.numel()}  # type: ignore[attr-defined]


def whole_gradients(chunk: DistributedDataParallel) -> dict[torch.Tensor, torch.Tensor]:
    """Parameter -> its gradient. With ZeRO-1 each data rank reduced only its shard of a bucket: gather the others'."""
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        for bucket in group.buckets:
            whole = bucket.grad_data.clone()
            if chunk.ddp_config.use_distributed_optimizer:
                shards = whole.chunk(group.intra_distributed_optimizer_instance_size)
                mine = shards[group.intra_distributed_optimizer_instance_rank].clone()
                dist.all_gather_into_tensor(whole, mine, group=group.intra_distributed_optimizer_instance_group)
            for param in bucket.params_list:
                start, end = bucket.param_to_index[param]
                gradients[param] = whole[start:end].view(param.shape)
    return gradients
