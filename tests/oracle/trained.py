"""What Triplane makes of a case: its ranks train some iterations, and each leaves what it holds."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from data.loader import Packing
from data.prepared import Prepared
from models.init import constant_of, std_of, uniform_of
from models.names import canonical
from models.shapes import GPTShape
from parallel import groups
from parallel.ddp import Chunks, held
from parallel.launch import Identity
from parallel.regions import Box
from tests.oracle.case import Case
from tools.parity.probe import gradient_pieces
from training import train
from training.batches import BatchStream
from training.config.schedules import batch_schedule
from training.parts.data import open_source
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

STARTED = "started"
"""A file: there was a model to train."""
Parts = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
"""Canonical name, shape of the whole, offset, values."""


def train_case(identity: Identity, case: Case, prepared: Prepared, notes: Path) -> None:
    """One rank: ``case.steps`` iterations from random weights; what each did goes to ``notes``/RANK.pt."""
    config = case.config
    start = groups.start(
        config.layout(identity.world_size),
        identity,
        device="cpu",
        seed=config.train.seed,
        parallel=config.parallel,
    )
    with start as ranks:
        parts = build_parts(config, case.shape, ranks)
        chunks, optim = parts.chunks, parts.optimizer
        (notes / STARTED).touch()
        randomise(chunks, case.shape, case.weights_seed)
        stream = BatchStream(
            lambda: open_source(prepared, config, "train"),
            ranks,
            batch_schedule(config.train, config.model.seq_length),
            config.train.micro_batch_size,
            0,
            Packing.from_config(config.data, prepared.tokenizer.eod),
        )
        progress, steps = Progress(), list[dict[str, Any]]()
        for _ in range(case.steps):
            step: dict[str, Any] = {"weights": weights(chunks)}

            def before_update(step: dict[str, Any] = step) -> None:
                step["gradients"] = gradients(chunks)

            progress, result = train.one_step(parts, stream, progress, StepRequests(), before_update=before_update)
            step |= {"loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
            step |= {"tokens": result.tokens, "samples": result.samples, "clipped": gradients(chunks)}
            step["weight_decay"] = max((group["weight_decay"] for group in optim.param_groups), default=0.0)
            gather(chunks)
            step["updated"] = weights(chunks)
            steps.append(step)
        stream.close()
        torch.save(steps, notes / f"{identity.rank}.pt")


def boxes(chunks: Chunks, *, mine: bool) -> Iterator[Box]:
    """What this rank holds of parameters and of routers' biases. mine: and is the one to save."""
    for chunk in chunks:
        for one in held(chunk):
            for box in one.boxes("", one.tensor.detach(), writes=False):
                if not mine or not any(one.regions[0].replica[:-1]):
                    yield box


@torch.no_grad()
def randomise(chunks: Chunks, shape: GPTShape, seed: int) -> None:
    """Weights with which no tensor can be missed: biases are not 0, norms not 1, and matrices halve what they multiply.

    Equal on every layout: a whole tensor is drawn by its name, and a rank takes its part.
    """
    for box in boxes(chunks, mine=False):
        name = canonical(box.key)
        if uniform_of(name) is not None:
            if name.endswith(".self_attention.A_log"):
                box.data.sub_(3.0)  # a delta net that forgets all but the last token norms what is nearly 0
            continue
        number = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "little")
        noise = torch.randn(box.global_shape, generator=torch.Generator().manual_seed(number))
        if std_of(name, shape) is None:
            noise = constant_of(name, shape) + 0.3 * noise
        else:
            noise *= 0.5 * noise.shape[-1] ** -0.5
        offsets = zip(box.offset, box.data.shape, strict=True)
        box.data.copy_(noise[tuple(slice(start, start + size) for start, size in offsets)])


def gather(chunks: Chunks) -> None:
    """Updated weights, where Megatron would gather them during the next forward pass."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def weights(chunks: Chunks) -> Parts:
    return [(canonical(box.key), box.global_shape, box.offset, box.data.clone()) for box in boxes(chunks, mine=True)]


def gradients(chunks: Chunks) -> Parts:
    pieces = [one for chunk in chunks for one in gradient_pieces(chunk)]
    return [(name, piece.global_shape, piece.offset, piece.data) for name, piece in pieces if piece.main]
