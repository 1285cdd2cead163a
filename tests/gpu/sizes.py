"""How large the models are that are measured: for a card, or for a try of the control flow."""

from dataclasses import dataclass, field
from typing import Any, Literal

SizeName = Literal["card", "tiny"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """Of every subject that measures time or memory."""

    width: dict[str, Any] = field(default_factory=dict)
    """Of the measured models: fields of a recipe's model section over the published ones."""
    seq_length: int = 8192
    most_layers: int = 32
    """Of the model whose throughput is measured; fewer where the card does not hold them."""
    warmup_steps: int = 3
    steps: int = 7
    microbatches: int = 4
    memory_layers: int = 16
    memory_seq_length: int = 4096
    card_products: bool = True
    """Matrix products and copies in a card's sizes (False: in a CPU's)."""
    checkpoint_bytes: int = 6 * 2**30
    """Of the checkpoint whose stall is measured; less where the host has not eight times as much free."""
    buffer_bytes: int = 2**30
    """That the limit of a copy to pinned memory is measured with."""


TINY_WIDTH = {
    "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96, "vocab_size": 512,
    "kv_channels": 16,
}  # fmt: skip

SIZES: dict[str, Sizes] = {
    "card": Sizes(),
    "tiny": Sizes(
        width=TINY_WIDTH, seq_length=64, most_layers=2, warmup_steps=1, steps=2, microbatches=2, memory_layers=2,
        memory_seq_length=64, card_products=False, checkpoint_bytes=2**20, buffer_bytes=2**20,
    ),
}  # fmt: skip
"""card: the 8B shape at 8,192 tokens. tiny: a try of everything in minutes on any card, whose times mean nothing."""
