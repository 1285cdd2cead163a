"""The answer to a case from transformers, plain PyTorch and Megatron's scheduler: loss, gradients, norms, updates."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.prepared import Prepared
from models.shapes import GPTShape
from tests.oracle.batches import Microbatch, microbatch
from tests.oracle.case import END, Case
from tests.oracle.exported import State
from tests.oracle.losses import Balance, cross_entropy_sum, rolled, routing_loss, scores_and_counts, tokens_at
from tests.oracle.reference import Output, Reference
from tests.oracle.sizes import Rates, batch_sizes
from training.parts.data import open_source

GlobalBatch = Sequence[Sequence[Microbatch]]
"""Microbatches, each of them a list over the replicas: Megatron's order is microbatch, replica, sample."""


@dataclass(kw_only=True)
class Answer:
    """Of one iteration."""

    loss: float
    gradients: State
    loads: list[Tensor]
    """Tokens of the global batch that each router sent to each expert, [E]; in the order of the model's blocks, and
    then of depths of prediction."""

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        return float(torch.stack([one.double().square().sum() for one in self.gradients.values()]).sum().sqrt())


def global_batches(case: Case, prepared: Prepared) -> Iterator[GlobalBatch]:
    """Of each iteration."""
    config, consumed = case.config, 0
    source, data = open_source(prepared, config, "train"), config.data
    micro, replicas = config.train.micro_batch_size, config.layout(case.world_size).dp
    for size in batch_sizes(config):
        windows = source.fetch(np.arange(consumed, consumed + size))
        parts = [
            microbatch(
                windows[first : first + micro],
                END,
                apart=data.reset_attention_mask,
                restart=data.reset_position_ids,
                masked=data.eod_mask_loss,
            )
            for first in range(0, size, micro)
        ]
        yield [parts[first : first + replicas] for first in range(0, len(parts), replicas)]
        consumed += size


def answer(reference: Reference, batches: GlobalBatch) -> Answer:
    """Loss and gradients of one global batch."""
    shape = reference.shape
    flat = [one for replicas in batches for one in replicas]
    tokens = [max(tokens_at(flat, depth), 1.0) for depth in range(1 + shape.mtp_num_layers)]
    reference.model.zero_grad()
    if reference.mtp is not None:
        reference.mtp.zero_grad()
    balances = [Balance() for _ in tokens] if shape.moe_router_load_balancing_type == "global_aux_loss" else None
    total, loads = 0.0, dict[tuple[int, int], Tensor]()
    for replicas in batches:
        outputs = [list(reference.outputs(batch)) for batch in replicas]
        if balances is not None:
            _balance(outputs, shape, balances)
        for batch, output in zip(replicas, outputs, strict=True):
            loss = torch.zeros(())
            for depth, part in enumerate(output):
                mask, labels = rolled(batch.loss_mask, depth), rolled(batch.labels, depth)
                own = cross_entropy_sum(part.logits, labels, mask) / tokens[depth]
                total += 0.0 if depth else own.item()
                weight = shape.mtp_loss_scaling_factor / shape.mtp_num_layers if depth else 1.0
                balance = balances[depth] if balances is not None else None
                loss = loss + weight * own + routing_loss(part.routers, shape, balance) / len(flat)
                for number, chosen in enumerate(part.chosen):
                    counts = chosen.flatten().bincount(minlength=shape.num_moe_experts)
                    loads[depth, number] = loads.get((depth, number), 0) + counts
            loss.backward()
    return Answer(loss=total, gradients=reference.gradients(), loads=[loads[key] for key in sorted(loads)])


def _balance(outputs: Sequence[Sequence[Output]], shape: GPTShape, balances: list[Balance]) -> None:
    for depth, balance in enumerate(balances):
        for number, routers in enumerate(zip(*(output[depth].routers for output in outputs), strict=True)):
            counts = [scores_and_counts(logits.detach(), shape)[1].sum((0, 1)) for logits in routers]
            balance.add(number, torch.stack(counts).sum(0))


def biases(before: Sequence[Tensor], loads: Sequence[Tensor], rate: float) -> list[Tensor]:
    """Of routers after a step: those of experts with less than the mean load rise (arXiv:2408.15664)."""
    return [
        bias + rate * torch.sign(load.double().mean() - load).to(bias) for bias, load in zip(before, loads, strict=True)
    ]


class AdamW:
    """torch's, with Megatron's rules: weights decay, biases and vectors do not; words have a learning rate."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.optimizer: torch.optim.AdamW | None = None
        self.weights: dict[str, torch.nn.Parameter] = {}

    def updated(self, weights: State, gradients: State, scale: float, rates: Rates, words: Set[str]) -> State:
        """The weights of ``gradients``' names after one step with gradients times ``scale``. words: names of word
        embeddings and output layer."""
        if self.optimizer is None:
            self.weights = {name: torch.nn.Parameter(weights[name].clone()) for name in gradients}
            kinds: tuple[list[torch.nn.Parameter], ...] = ([], [], [])
            for name, param in self.weights.items():
                kinds[2 if name in words else spares(name, param)].append(param)
            others, spared, of_words = kinds
            betas, eps = (self.settings.adam_beta1, self.settings.adam_beta2), self.settings.adam_eps
            groups: list[dict[str, Any]] = [{"params": others}, {"params": spared}, {"params": of_words}]
            self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, weight_decay=0.0)
        first, second, third = self.optimizer.param_groups
        first["lr"] = second["lr"] = rates.learning_rate
        third["lr"] = rates.learning_rate if rates.of_words is None else rates.of_words
        first["weight_decay"] = third["weight_decay"] = rates.weight_decay
        with torch.no_grad():
            for name, param in self.weights.items():
                param.copy_(weights[name])
                param.grad = gradients[name] * scale
        self.optimizer.step()
        return {name: param.detach().clone() for name, param in self.weights.items()}


def spares(name: str, tensor: Tensor) -> bool:
    """Whether a tensor does not decay."""
    return tensor.dim() == 1 or name.endswith("bias")


def clip_scale(norm: float, largest: float) -> float:
    """What gradients are multiplied by: megatron-core's clip_grad_by_total_norm_fp32."""
    return min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0
