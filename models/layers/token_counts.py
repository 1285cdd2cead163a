"""How many tokens of a global batch each loss counts, known before the first backward pass.

Gradients of all losses are added up in one buffer and divided once, by the tokens that the cross entropy counts. Every
other loss is a mean of its own and multiplies its part by that number first.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Of one global batch, over all ranks; the same on each of them. A batch without any counts as one token."""

    counted: Tensor
    """fp32 []: unmasked tokens."""
    share: Tensor
    """fp32 []: of all tokens, the unmasked ones."""
    depths: Tensor
    """fp32 [depths]: unmasked tokens whose depth of multi-token prediction has something to predict."""


def no_step(depths: int) -> TokenCounts:
    """Before the first step, and of a model that makes none: losses are summed."""
    one = torch.ones(())
    return TokenCounts(counted=one, share=one, depths=one.expand(depths))


def set_token_counts(config: TransformerConfig, counts: TokenCounts) -> None:
    """For the step that begins; one object serves all chunks of a rank, and reaches each of their modules."""
    config.token_counts = counts


def token_counts(config: TransformerConfig) -> TokenCounts:
    """Of the step that runs."""
    counts: TokenCounts = config.token_counts
    return counts
