"""The next token from the logits."""

import torch
from torch import Tensor

from training.generation.settings import Sampling


def generator_of(sampling: Sampling, number: int) -> torch.Generator:
    """Of text ``number``; on the CPU, whatever computes the logits."""
    return torch.Generator().manual_seed(sampling.seed + number)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token. logits: fp32 [v]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits.cpu(), sampling), 1, generator=generator))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """fp32 [v]: by temperature, then of the top_k, then of the top_p."""
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    found = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1:
        ordered, order = found.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        found[order[before >= sampling.top_p]] = 0
        found /= found.sum()
    return found
