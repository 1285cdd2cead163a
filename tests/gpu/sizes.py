"""How large the models are that are measured: for a card, or for a try of the control flow."""

from dataclasses import dataclass
from typing import Literal

SizeName = Literal["card", "tiny"]
Role = Literal["dense", "small", "experts", "latent"]
"""latent: multi-latent attention over experts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """Of every subject that measures time or memory."""

    shapes: dict[Role, tuple[str, ...]]
    """Published shapes; the first of which a layer fits the card is taken, with as many layers as fit."""
    seq_length: int
    most_layers: int
    """Of the model whose throughput is measured."""
    few_layers: int
    """Of those whose memory, fusions and checkpoints are."""
    warmup_steps: int
    steps: int
    """That count: medians are of these."""
    microbatches: int
    card_products: bool
    """Matrix products, copies and collectives in a card's sizes; False: in a CPU's."""
    fp8_steps: int
    """Of both losses that are compared."""
    checkpoint_bytes: int
    """Of the checkpoint whose stall is measured, at most; less where the host has not four times as much free."""


SIZES: dict[str, Sizes] = {
    "card": Sizes(
        shapes={
            "dense": ("llama3_8b", "llama32_1b", "demo"),
            "small": ("llama32_1b", "demo"),
            "experts": ("mixtral_8x7b", "mixtral_tiny"),
            "latent": ("deepseek_v2_lite", "deepseek_v2_tiny"),
        },
        seq_length=8192, most_layers=32, few_layers=4, warmup_steps=3, steps=7, microbatches=4, card_products=True,
        checkpoint_bytes=12 * 2**30, fp8_steps=20,
    ),
    "tiny": Sizes(
        shapes={
            "dense": ("llama3_tiny",),
            "small": ("llama3_tiny",),
            "experts": ("mixtral_tiny",),
            "latent": ("deepseek_v2_tiny",),
        },
        seq_length=64, most_layers=2, few_layers=2, warmup_steps=1, steps=2, microbatches=2, card_products=False,
        checkpoint_bytes=2**30, fp8_steps=5,
    ),
}  # fmt: skip
"""card: an 8B-shaped model at 8,192 tokens. tiny: a try of everything, whose times mean nothing."""
