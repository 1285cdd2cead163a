"""One optimizer step, from microbatches to updated weights: the heart of training.

``train_step`` is its table of contents: forward_backward, reduce, measure, decide, clip and update.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from data.loader import Batch
from parallel.ddp import Chunks
from parallel.groups import Ranks
from training.config.lr_schedule import ScheduledRates
from training.config.run_config import RunConfig
from training.forward_backward import LossScale, forward_backward, gradient_norm, prepare_gradients
from training.optimizer import set_schedule


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRequests:
    """What a rank would like to happen after this step; all ranks' requests are merged, so that all act alike."""

    stop: bool = False
    """End, to be continued by the same command (exit code 75)."""
    save: bool = False
    finish: bool = False
    """End as if train_iters were reached: the run is done (exit code 0)."""


class UpdateDecision(enum.Enum):
    """What becomes of a step's gradients."""

    UPDATE = "update"
    SKIP = "skip"
    """No update: fp16 gradients overflowed (the loss scale went down), or the update policy says so."""
    REPLAY = "replay"
    """No update yet: the same microbatches run once more, and that step decides."""


@dataclass(kw_only=True, frozen=True)
class GradientResult:
    """What forward and backward over a global batch came to, before any weight has changed."""

    loss: float
    """Nats per token, mean over the unmasked tokens of the global batch. The same on every rank."""
    tokens: int
    """Unmasked tokens of the global batch."""
    samples: int
    """Of the global batch."""
    requests: StepRequests
    grad_norm: float | None
    """L2 norm of the whole model's gradient, before clipping, as this rank has it; None where it overflowed."""
    mean_norm: float
    """Of all ranks' gradient norms, which are equal while nothing is wrong."""
    finite: bool
    """Loss and gradient norm are finite on every rank; gradients that overflowed have no norm."""
    overflowed: bool
    """fp16 gradients overflowed on some rank: there is no update."""
    loss_scale: float
    """That these gradients were made with."""
    scale_is_lowest: bool
    """They overflowed though it is ``precision.min_loss_scale``, or fixed."""


@dataclass(kw_only=True, frozen=True)
class StepResult(GradientResult):
    """What a step did."""

    learning_rate: float
    decision: UpdateDecision
    decoupled_learning_rate: float | None = None
    """Of word embeddings and output layer, where they have one of their own."""

    @property
    def skipped(self) -> bool:
        """No weight has changed."""
        return self.decision is not UpdateDecision.UPDATE


@dataclass(kw_only=True, slots=True, frozen=True)
class RankParts:
    """What is trained, as far as it lies on this rank."""

    config: RunConfig
    chunks: Chunks
    optimizer: MegatronOptimizer
    ranks: Ranks


type StepAgain = Callable[[Callable[[GradientResult], UpdateDecision]], StepResult]
"""The same step, by another decision."""


def skip_overflows(gradients: GradientResult) -> UpdateDecision:
    """As mcore does: every update but that of fp16 gradients that overflowed."""
    return UpdateDecision.SKIP if gradients.overflowed else UpdateDecision.UPDATE


def train_step(
    parts: RankParts,
    microbatches: Sequence[Batch | None],
    rates: ScheduledRates,
    requests: StepRequests,
    decide: Callable[[GradientResult], UpdateDecision] = skip_overflows,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Forward and backward over all microbatches, one reduction of gradients, clipping, one AdamW update.

    Gradients are divided by the number of unmasked tokens of the global batch. decide: whether there is an update,
    knowing loss and gradient norm. before_update: called when weights and optimizer are about to change.
    """
    config, chunks, optimizer, ranks = parts.config, parts.chunks, parts.optimizer, parts.ranks
    set_schedule(optimizer, rates)
    scale = LossScale(optimizer)
    zero_gradients(chunks, optimizer)
    sizes = config.model.seq_length, config.train.micro_batch_size
    sums, reduce_gradients = forward_backward(chunks, microbatches, ranks, *sizes)
    reduce_gradients()
    gradients = measure(sums, optimizer, ranks, requests, scale, own_samples(microbatches, ranks))
    decision = decide(gradients)
    if decision is UpdateDecision.UPDATE:
        before_update()
        updated = clip_and_update(optimizer, gradients.grad_norm)
        decision = UpdateDecision.UPDATE if updated else UpdateDecision.SKIP
    return StepResult(
        **vars(gradients),
        learning_rate=rates.learning_rate,
        decoupled_learning_rate=rates.decoupled_learning_rate,
        decision=decision,
    )


def zero_gradients(chunks: Chunks, optimizer: MegatronOptimizer) -> None:
    """Of the buffers that gradients are added up in, and of the optimizer's copies."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def own_samples(microbatches: Sequence[Batch | None], ranks: Ranks) -> int:
    """This rank's share in counting the global batch's samples: a sample is counted once, where it comes in."""
    if not ranks.is_first_stage or ranks.at.tp or ranks.at.cp:
        return 0
    return sum(len(batch.tokens) for batch in microbatches if batch is not None)


def measure(
    sums: Tensor, optimizer: MegatronOptimizer, ranks: Ranks, requests: StepRequests, scale: LossScale, samples: int
) -> GradientResult:
    """Unscale the reduced gradients, take their norm, and let all ranks know of it by one small reduction.

    The only wait for the device in a step. Knowing the norm before the update costs a GPU the time in which it would
    have been given the optimizer's kernels.
    """
    overflow = prepare_gradients(optimizer, ranks.device)
    norm = gradient_norm(optimizer, ranks.device)
    asked = [requests.stop, requests.save, requests.finish]
    own = torch.tensor([*asked, samples], dtype=norm.dtype, pin_memory=norm.is_cuda)
    packed = torch.cat([counted(sums, ranks), norm, ~norm.isfinite(), overflow, own.to(norm.device, non_blocking=True)])
    dist.all_reduce(packed)
    numbers = torch.cat([packed, norm, *scale.tensors]).tolist()
    loss, tokens, norms, bad, overflows, stop, save, finish, all_samples, own_norm, *scales = numbers
    overflowed, mean_loss, loss_scale = overflows > 0, loss / max(tokens, 1.0), scales[0] if scales else 1.0
    scale.update(overflowed)
    return GradientResult(
        loss=mean_loss,
        tokens=int(tokens),
        samples=int(all_samples),
        requests=StepRequests(stop=stop > 0, save=save > 0, finish=finish > 0),
        grad_norm=None if overflowed else own_norm,
        mean_norm=0.0 if overflowed else norms / ranks.identity.world_size,
        finite=math.isfinite(mean_loss) and (overflowed or bad == 0),
        overflowed=overflowed,
        loss_scale=loss_scale,
        scale_is_lowest=overflowed and scale.is_lowest(loss_scale),
    )


def clip_and_update(optimizer: MegatronOptimizer, grad_norm: float | None) -> bool:
    """Megatron's own ``step`` with gradients that ``measure`` has prepared; whether there was an update.

    ``step`` of megatron-core 0.19.2 begins with prepare_grads and get_grad_norm (ChainedOptimizer, which stands around
    every AdamW). They are answered with what is known: clipping and update stay Megatron's, bit for bit.
    """
    answers: dict[str, Callable[[], Any]] = {"prepare_grads": lambda: False, "get_grad_norm": lambda: grad_norm}
    vars(optimizer).update(answers)
    try:
        updated, _, _ = optimizer.step()
    finally:
        for name in answers:
            del vars(optimizer)[name]
    return bool(updated)


def counted(sums: Tensor, ranks: Ranks) -> Tensor:
    """Loss and tokens of this rank, fp64 [2], as they count in a sum over all ranks: only TP rank 0 of the last stage
    does, so that TP peers, which hold the same loss, are not counted twice."""
    return sums if ranks.is_last_stage and ranks.at.tp == 0 else torch.zeros_like(sums)
