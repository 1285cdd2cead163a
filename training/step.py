"""One optimizer step, from microbatches to updated weights: the heart of training.

Shape letters: b samples of a microbatch, s sequence, cp context-parallel size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from data.loader import Batch
from models.layers.documents import Documents
from parallel.groups import Ranks
from training.loss_scale import LossScale
from training.optimizer import set_schedule

Chunks = Sequence[DistributedDataParallel]


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRequests:
    """What a rank would like to happen after this step; all ranks' requests are merged, so that all act alike."""

    stop: bool = False
    save: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float
    """Nats per token, mean over the unmasked tokens of the global batch."""
    tokens: int
    """Unmasked tokens of the global batch."""
    grad_norm: float | None
    """L2 norm of the whole model's gradient, before clipping; None where it overflowed."""
    skipped: bool
    """No update: fp16 gradients overflowed (the loss scale went down), or the update policy decided so."""
    loss_scale: float
    learning_rate: float
    requests: StepRequests


@dataclass(kw_only=True, slots=True, frozen=True)
class GradientResult:
    """What forward and backward over a global batch came to, before any weight has changed."""

    loss: float
    tokens: int
    requests: StepRequests
    grad_norm: float | None
    """As this rank has it; None where fp16 gradients overflowed."""
    overflowed: bool
    """fp16 gradients overflowed on some rank: there is no update. The same on every rank, as all below."""
    finite: bool
    """Loss and gradient norm are numbers on every rank; of gradients that overflowed there is no norm."""
    mean_norm: float
    """Of all ranks' gradient norms, which are equal while nothing is wrong."""
    loss_scale: float
    """That these gradients were made with."""
    scale_is_lowest: bool
    """They overflowed though it is ``precision.min_loss_scale``, or fixed."""
    samples: int
    """Of the global batch."""


class UpdatePolicy(Protocol):
    """Stands before the update."""

    def before(self) -> None:
        """Before the first microbatch of an iteration."""
        ...

    def decide(
        self, attempt: GradientResult, microbatches: Sequence[Batch | None], again: Callable[[], GradientResult]
    ) -> tuple[GradientResult, bool]:
        """Which attempt counts, and whether weights are updated with its gradients. Collective: all ranks decide alike.

        again: runs the same microbatches once more, in place of the gradients that there are.
        """
        ...


class SkipOverflows(UpdatePolicy):
    """Lets every update pass, as mcore does."""

    def before(self) -> None:
        """Nothing to remember."""

    def decide(
        self, attempt: GradientResult, microbatches: Sequence[Batch | None], again: Callable[[], GradientResult]
    ) -> tuple[GradientResult, bool]:
        return attempt, not attempt.overflowed


def train_step(
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    microbatches: Sequence[Batch | None],
    ranks: Ranks,
    *,
    seq_length: int,
    micro_batch_size: int,
    learning_rate: float,
    weight_decay: float,
    requests: StepRequests,
    before_update: Callable[[], None] = lambda: None,
    policy: UpdatePolicy | None = None,
) -> StepResult:
    """Forward and backward over all microbatches, one reduction of gradients, clipping, one AdamW update.

    The schedule (no pipeline, 1F1B or interleaved 1F1B) is Megatron's; gradients are reduced once, after the last
    microbatch, and divided by the number of unmasked tokens of the global batch. policy: decides, knowing loss and
    gradient norm, whether there is an update. before_update: called when weights and optimizer are about to change.
    """
    policy = policy or SkipOverflows()
    policy.before()
    set_schedule(optimizer, learning_rate, weight_decay)
    scale = LossScale(optimizer)
    samples = own_samples(microbatches, ranks)

    def accumulate() -> GradientResult:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        scale.restore()
        sums = run_schedule(chunks, microbatches, ranks, seq_length, micro_batch_size, forward_only=False)
        return measure_gradients(sums, optimizer, ranks, requests, scale, samples)

    attempt, update = policy.decide(accumulate(), microbatches, accumulate)
    if update:
        before_update()
        optimizer.step_with_ready_grads()
    return StepResult(
        loss=attempt.loss,
        tokens=attempt.tokens,
        grad_norm=attempt.grad_norm,
        skipped=not update,
        loss_scale=scale.value,
        learning_rate=learning_rate,
        requests=attempt.requests,
    )


def own_samples(microbatches: Sequence[Batch | None], ranks: Ranks) -> int:
    """This rank's share in counting the global batch's samples: a sample is counted once, where it comes in."""
    if not ranks.is_first_stage or ranks.at.tp or ranks.at.cp:
        return 0
    return sum(len(batch.tokens) for batch in microbatches if batch is not None)


def measure_gradients(
    sums: Tensor, optimizer: MegatronOptimizer, ranks: Ranks, requests: StepRequests, scale: LossScale, samples: int
) -> GradientResult:
    """Reduced gradients made ready for the update, their norm, and what all ranks know of them; one reduction."""
    ready, grad_norm = ready_gradients(optimizer)
    norm = 0.0 if grad_norm is None else grad_norm
    loss, tokens, (stop, save, overflowed, bad, norms, all_samples) = all_reduce_stats(
        sums, ranks, requests.stop, requests.save, not ready, not math.isfinite(norm), norm, samples
    )
    return GradientResult(
        loss=loss,
        tokens=tokens,
        requests=StepRequests(stop=stop > 0, save=save > 0),
        grad_norm=grad_norm,
        overflowed=overflowed > 0,
        finite=math.isfinite(loss) and bad == 0,
        mean_norm=norms / ranks.identity.world_size,
        loss_scale=scale.value,
        scale_is_lowest=overflowed > 0 and scale.is_lowest,
        samples=int(all_samples),
    )


def ready_gradients(optimizer: MegatronOptimizer) -> tuple[bool, float | None]:
    """Megatron's ``step`` up to the update, but without it: gradients unscaled, their norm taken, and clipped.

    Returns whether ``step_with_ready_grads`` may follow, and the norm, which is None where fp16 gradients overflowed.
    Every optimizer of megatron-core 0.19.2 ends its ``step`` with a call of that method (optimizer/optimizer.py), so
    it is hidden behind one that does nothing: clipping stays Megatron's, bit for bit. Knowing the norm before the
    update costs a GPU the time in which it would have been given the optimizer's kernels.
    """
    vars(optimizer)["step_with_ready_grads"] = lambda: True
    try:
        ready, grad_norm, _ = optimizer.step()
    finally:
        del vars(optimizer)["step_with_ready_grads"]
    return ready, None if grad_norm is None else float(grad_norm)


@torch.no_grad()
def evaluate(
    chunks: Chunks,
    batches: Callable[[], Sequence[Batch | None]],
    eval_iters: int,
    ranks: Ranks,
    *,
    seq_length: int,
    micro_batch_size: int,
) -> float:
    """Mean loss in nats per token over ``eval_iters`` global batches, dropout off."""
    for chunk in chunks:
        chunk.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for _ in range(eval_iters):
        sums += run_schedule(chunks, batches(), ranks, seq_length, micro_batch_size, forward_only=True)
    for chunk in chunks:
        chunk.train()
    loss, _, _ = all_reduce_stats(sums, ranks)
    return loss


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
    iterators = [iter(microbatches) for _ in chunks]
    results = get_forward_backward_func(
        pp_size=ranks.layout.pp, vp_size=ranks.layout.vpp if ranks.layout.vpp > 1 else None
    )(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        pg_collection=None,
    )
    return sum((result["sums"] for result in results), torch.zeros(2, dtype=torch.float64, device=ranks.device)).cpu()


def forward_step(
    microbatches: Iterator[Batch | None], chunk: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """What the schedule calls for each microbatch and chunk: the chunk's output, and how to make a loss of it."""
    batch = next(microbatches)
    if batch is None:  # a middle stage: its input comes from the stage before, through the schedule
        return chunk(None, None, None), partial(loss_sums, loss_mask=None)
    documents = None
    if batch.starts is not None:  # every chunk needs them, also where it makes nothing of the tokens
        documents = Documents(batch.starts, chunk.config.context_parallel_size)
    output = chunk(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,  # multi-token prediction makes its losses within
        packed_seq_params=documents,
    )
    return output, partial(loss_sums, loss_mask=batch.loss_mask)


def loss_sums(losses: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of unmasked losses and their number; both [b, s/cp]. Division comes after reduction over all ranks,
    so that ranks with fewer tokens do not weigh more."""
    assert loss_mask is not None
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), {"sums": torch.stack([total.detach(), tokens]).double()}


def all_reduce_stats(sums: Tensor, ranks: Ranks, *numbers: float) -> tuple[float, int, list[float]]:
    """The global batch's mean loss and tokens, and the sums over all ranks of ``numbers``, by one small reduction.

    Only TP rank 0 of the last stage counts, so that TP peers, which hold the same loss, are not counted twice.
    """
    counts = sums if ranks.is_last_stage and ranks.at.tp == 0 else torch.zeros_like(sums)
    packed = torch.cat([counts, torch.tensor(numbers, dtype=torch.float64)]).to(ranks.device)
    dist.all_reduce(packed)
    total, tokens, *totals = packed.tolist()
    return total / max(tokens, 1.0), int(tokens), totals
