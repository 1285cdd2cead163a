"""The next token from the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How it is chosen."""

    temperature: float = 0.0
    """Logits are divided by it. 0: the most probable token, always (greedy)."""
    top_k: int = 0
    """Only the so many most probable tokens. 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    """Text number i is drawn from the generator of ``seed`` + i, alone or beside others, in any layout."""

    def problems(self, prefix: str = "") -> list[str]:
        """What is out of range. prefix: before the fields' names."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"{prefix}temperature must be 0 (greedy) or more, found {self.temperature}.")
        if self.top_k < 0:
            found.append(f"{prefix}top_k must be 0 (all) or more, found {self.top_k}.")
        if not 0 < self.top_p <= 1:
            found.append(f"{prefix}top_p must be above 0 and at most 1, found {self.top_p}.")
        if not 0 <= self.seed < 2**62:
            found.append(f"{prefix}seed must be 0 or more, found {self.seed}.")
        return found

    def generator(self, number: int) -> torch.Generator:
        """Of text ``number``; on the CPU, whatever computes the logits."""
        return torch.Generator().manual_seed(self.seed + number)


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
