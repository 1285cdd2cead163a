"""Forward and backward over a global batch's microbatches, by Megatron's pipeline schedules; and what is asked of the
gradients then: the L2 norm of the whole model's, as Megatron computes it, and fp16's loss scale. Neither waits for the
device.

Shapes: b samples of a microbatch, s sequence, cp context-parallel size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from data.loader import Batch
from models.layers.cross_entropy import TokenLoss
from models.layers.documents import Documents
from parallel.ddp import Chunk, Chunks, unwrap
from parallel.groups import Ranks
from training.loss_weights import count_tokens


def forward_backward(
    chunks: Chunks, microbatches: Sequence[Batch | None], ranks: Ranks, seq_length: int, micro_batch_size: int
) -> tuple[Tensor, Callable[[], None]]:
    """Add up the gradients of all microbatches: ``run_schedule``'s sums, and what reduces the gradients.

    Megatron's schedule would reduce them as its last act: ``finalize_and_divide`` (training/loss_weights.py), around
    ``finalize`` (parallel/ddp.py), around Megatron's finalize_model_grads. The call is kept for the step, which makes
    it next, so that it can be read there. With parallel.overlap_grad_reduce most of the reduction has
    run by then, during the last microbatch's backward pass.
    """
    config = chunks[0].config
    finalize, reductions = config.finalize_model_grads_func, list[Callable[[], None]]()
    config.finalize_model_grads_func = lambda *args, **kwargs: reductions.append(partial(finalize, *args, **kwargs))
    try:
        sums = run_schedule(chunks, microbatches, ranks, seq_length, micro_batch_size, forward_only=False)
    finally:
        config.finalize_model_grads_func = finalize
    (reduce_gradients,) = reductions
    return sums, reduce_gradients


def run_schedule(
    chunks: Chunks,
    microbatches: Sequence[Batch | None],
    ranks: Ranks,
    seq_length: int,
    micro_batch_size: int,
    *,
    forward_only: bool,
) -> Tensor:
    """Megatron's pipeline schedule over the microbatches: this rank's (sum of losses, tokens), fp64 [2].

    They are zero but on the last stage. Every virtual stage of a rank walks through the same microbatches.
    """
    if not forward_only:
        count_tokens(chunks, microbatches, ranks)
    results = _run(chunks, microbatches, ranks, seq_length, micro_batch_size, forward_step, forward_only=forward_only)
    return sum((result["sums"] for result in results), torch.zeros(2, dtype=torch.float64, device=ranks.device))


def read_outputs[Microbatch, Reading](
    chunks: Chunks,
    microbatches: Sequence[Microbatch],
    ranks: Ranks,
    seq_length: int,
    micro_batch_size: int,
    forward: Callable[[Microbatch, Chunk], Tensor],
    read: Callable[[Microbatch, Tensor], Reading],
) -> list[Reading]:
    """Forward passes alone, by the same schedule: what ``read`` makes of each microbatch's output, on the last stage;
    nothing elsewhere. forward: a chunk's output."""

    def step(waiting: Iterator[Microbatch], chunk: Chunk) -> tuple[Tensor, Callable[..., Reading]]:
        microbatch = next(waiting)
        return forward(microbatch, chunk), lambda output, non_loss_data: read(microbatch, output)

    return _run(chunks, microbatches, ranks, seq_length, micro_batch_size, step, forward_only=True, reads=True)


def _run(
    chunks: Chunks,
    microbatches: Sequence[Any],
    ranks: Ranks,
    seq_length: int,
    micro_batch_size: int,
    step: Callable[..., tuple[Tensor, Callable[..., Any]]],
    *,
    forward_only: bool,
    reads: bool = False,
) -> list[Any]:
    iterators = [iter(microbatches) for _ in chunks]
    return get_forward_backward_func(
        pp_size=ranks.layout.pp, vp_size=ranks.layout.vpp if ranks.layout.vpp > 1 else None
    )(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=reads,
        pg_collection=None,
    )


def forward_step(microbatches: Iterator[Batch | None], chunk: Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """What the schedule calls for each microbatch and chunk: the chunk's output, and how to make a loss of it."""
    batch, own_loss = next(microbatches), unwrap(chunk).own_loss
    output = forward(batch, chunk)
    if own_loss is not None and batch is not None:
        return output, partial(own_loss_sums, batch=batch, own_loss=own_loss)
    return output, partial(loss_sums, loss_mask=None if batch is None else batch.loss_mask)


def forward(batch: Batch | None, chunk: Chunk) -> Tensor:
    """A chunk's output: on the last stage each token's cross entropy [b, s/cp]; with train.loss [2, b, s/cp]."""
    if batch is None:  # a middle stage: its input comes from the stage before, through the schedule
        return chunk(None, None, None)
    documents = None
    if batch.starts is not None or chunk.config.rope_restarts:  # also where a chunk makes nothing of the tokens
        documents = Documents(batch.starts, batch.position_ids, chunk.config.context_parallel_size)
    return chunk(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,  # multi-token prediction makes its losses within
        packed_seq_params=documents,
    )


def loss_sums(losses: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of unmasked losses and their number; both [b, s/cp]. Division comes after reduction over all ranks,
    so that ranks with fewer tokens do not weigh more."""
    assert loss_mask is not None
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), {"sums": torch.stack([total.detach(), tokens]).double()}


def own_loss_sums(outputs: Tensor, batch: Batch, own_loss: TokenLoss) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """``loss_sums`` of the user's loss (train.loss), and, where nothing is trained, of the cross entropy: validation
    losses compare, whatever was trained on. outputs: cross entropy and log_z, [2, b, s/cp]."""
    losses, log_z = outputs
    return loss_sums(own_loss(losses, log_z, batch) if torch.is_grad_enabled() else losses, batch.loss_mask)


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """fp64 [1] on this rank's device, the same on every rank.

    get_grad_norm_fp32 of megatron-core 0.19.2 reads the sum over ranks from the device, and without Transformer Engine
    waits for the norm of each parameter. Parts of the optimizer whose ranks differ (experts) are summed apart.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    gradients = [part.get_grads_for_grad_norm() for part in parts]
    if len(parts) > 1 and optimizer.grads_states_parallel_group_is_shared():
        parts, gradients = parts[:1], [[gradient for part in gradients for gradient in part]]
    squares = [torch.zeros(1, dtype=torch.float32, device=device) for _ in parts]
    for square, part, found in zip(squares, parts, gradients, strict=True):
        if found:
            square += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found, 2, torch.float32))) ** 2.0
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
    return torch.cat(squares).double().sum(0, keepdim=True).sqrt()


class LossScale:
    """Kept while an iteration decides which of several attempts counts. 1.0, and nothing to keep, but with fp16."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = _optimizer_parts(optimizer)
        scalers = [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
        self.tensors = [optimizer.get_loss_scale()] if scalers else []  # mcore replaces its tensors, and fills none
        """fp32 [1] on the device; none but with fp16."""
        self.kept = [(scaler, dict(vars(scaler))) for scaler in scalers]

    def is_lowest(self, value: float) -> bool:
        """Whether it is fixed, or as low as it may become. Waits for the device."""
        return all(value <= float(getattr(scaler, "min_scale", math.inf)) for scaler, _ in self.kept)

    def update(self, overflowed: bool) -> None:
        """Move it by what became of these gradients. All ranks with the same answer."""
        for scaler, _ in self.kept:
            scaler.update(overflowed)

    def restore(self) -> None:
        """As it was found: the same microbatches come once more."""
        for scaler, state in self.kept:
            vars(scaler).update(state)


@torch.no_grad()
def prepare_gradients(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """Give the optimizer its gradients, with fp16 divided by the loss scale: whether this rank's overflow, fp64 [1].

    prepare_grads of megatron-core 0.19.2 reduces the overflow over ranks, reads it and moves the loss scale. Here it
    stays on the device and travels with the loss (``measure`` in training/step.py), and ``update`` moves the scale.
    """
    found = torch.zeros(1, dtype=torch.float64, device=device)
    for part in _optimizer_parts(optimizer):
        if getattr(part, "grad_scaler", None) is None:
            part.prepare_grads()
        elif not part.is_stub_optimizer:
            part._copy_model_grads_to_main_grads()
            part.found_inf.fill_(0.0)
            gradients = part._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, part.found_inf, part.grad_scaler.inv_scale)
            found += part.found_inf
    return found


def _optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
