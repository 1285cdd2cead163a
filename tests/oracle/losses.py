"""Each loss of a global batch as a sum over its microbatches, by its definition, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.shapes import GPTShape
from tests.oracle.batches import Microbatch


def cross_entropy_sum(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Nats of the tokens that count; logits [b, s, v]."""
    return (cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum()


def rolled(values: Tensor, places: int) -> Tensor:
    """[b, s], each the one ``places`` on; where there is none, 0."""
    return torch.nn.functional.pad(values[:, places:], (0, places)) if places else values


def tokens_at(batches: Sequence[Microbatch], depth: int) -> float:
    """Of a global batch: those that count at a depth of prediction, 0 being the model's own."""
    return sum(float(rolled(batch.loss_mask, depth).sum()) for batch in batches)


def routing_loss(routers: Sequence[Tensor], shape: GPTShape, balance: "Balance | None" = None) -> Tensor:
    """Balancing and z losses of one microbatch on one replica: mean over its tokens, masked ones too, of each router's;
    summed over the routers. Their logits are [b, s, E]."""
    total = torch.zeros(())
    for number, logits in enumerate(routers):
        if shape.moe_z_loss_coeff:
            total = total + shape.moe_z_loss_coeff * logits.logsumexp(-1).square().mean()
        if shape.moe_aux_loss_coeff and shape.moe_router_load_balancing_type != "none":
            total = total + shape.moe_aux_loss_coeff * _balancing(logits, shape, number, balance)
    return total


class Balance:
    """Of global_aux_loss: tokens that each router's experts got so far in this global batch, over all replicas."""

    def __init__(self) -> None:
        self.counts: dict[int, Tensor] = {}
        self.steps: dict[int, int] = {}

    def add(self, number: int, counts: Tensor) -> None:
        self.counts[number] = self.counts.get(number, torch.zeros_like(counts)) + counts
        self.steps[number] = self.steps.get(number, 0) + 1

    def mean(self, number: int) -> Tensor:
        return self.counts[number] / self.steps[number]


def scores_and_counts(logits: Tensor, shape: GPTShape) -> tuple[Tensor, Tensor]:
    """Each token's scores [b, s, E], summing to 1, and how many of its topk choices fall on each expert, likewise;
    neither groups nor biases take part (megatron-core's compute_routing_scores_for_aux_loss)."""
    if shape.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        scores = logits.softmax(-1)
    chosen = scores.topk(shape.moe_router_topk, dim=-1).indices
    return scores, torch.zeros_like(scores).scatter(-1, chosen, 1.0)


def _balancing(logits: Tensor, shape: GPTShape, number: int, balance: Balance | None) -> Tensor:
    """E sum over experts of (share of choices x mean score): arXiv:2101.03961, equation 4; of each sequence by itself
    and then their mean: arXiv:2412.19437, equation 17."""
    scores, choices = scores_and_counts(logits, shape)
    topk, experts = shape.moe_router_topk, shape.num_moe_experts
    if shape.moe_router_load_balancing_type == "seq_aux_loss":
        share = choices.mean(1) / topk
        return experts * (share * scores.mean(1)).sum(-1).mean()
    if balance is not None:
        tokens = float(balance.mean(number).sum()) / topk
        share = balance.mean(number) / (topk * tokens)
        return experts * (share * scores.sum((0, 1)) / tokens).sum()
    return experts * (choices.mean((0, 1)) / topk * scores.mean((0, 1))).sum()
