"""The layouts of which one card plays one rank: published models, at the sizes and worlds that they are trained in."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import ModelConfig
from tests.gpu.measured_models import with_layers
from tools.parity.layouts import with_layout
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig

BALANCED = ("moe_router_force_load_balancing=True",)
"""Megatron's random routing: every expert gets about as many tokens, as the planner is asked to take them."""
NARROW: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 16, "num_query_groups": 8, "vocab_size": 2048}
TOYS: dict[str, dict[str, Any]] = {
    "llama3_8b": NARROW | {"ffn_hidden_size": 1024},
    "llama3_70b": NARROW | {"ffn_hidden_size": 1024},
    "mixtral_8x7b": NARROW | {"ffn_hidden_size": 512},
    "deepseek_v2_lite": {"hidden_size": 256, "ffn_hidden_size": 512, "moe_ffn_hidden_size": 128, "vocab_size": 2048},
}
"""Widths that eight tensor ranks still share."""
TOY_TOKENS, TOY_LAYERS = 256, 2
"""Of a sample, and of a rank: as few as leave activations the most of what a rank holds."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LayoutRow:
    """One rank of one layout."""

    model: str
    layout: str
    """As ``tools.parity.layouts`` reads it, with dpN: all ranks of the world."""
    microbatches: int
    """As few as fill the pipeline to its peak: PP, or two rounds of PP where stages are interleaved."""
    train: dict[str, Any] = field(default_factory=dict)
    """More fields of the recipe's section."""
    stage: Literal["fullest", "last"] = "fullest"
    """fullest: the one that is predicted to hold most, and most often ends a run; last: with output layer and loss,
    which takes longest."""


ROWS = {
    "llama3_8b-zero3": LayoutRow(model="llama3_8b", layout="dp64zero3", microbatches=2),
    "llama3_8b-zero2mlp": LayoutRow(
        model="llama3_8b", layout="dp64zero2", microbatches=2,
        train={"recompute": "selective:mlp"},
    ),
    "llama3_8b-tp2cp2": LayoutRow(model="llama3_8b", layout="tp2spcp2dp16overlap", microbatches=2),
    "llama3_8b-tp2pp4vpp2": LayoutRow(model="llama3_8b", layout="tp2sppp4vpp2dp8overlap", microbatches=8),
    "llama3_70b-tp8pp4": LayoutRow(model="llama3_70b", layout="tp8sppp4dp2overlap", microbatches=4),
    "llama3_70b-tp8pp4last": LayoutRow(
        model="llama3_70b", layout="tp8sppp4dp2overlap", microbatches=4, stage="last"
    ),
    "llama3_70b-tp8pp4vpp5": LayoutRow(model="llama3_70b", layout="tp8sppp4vpp5dp8overlap", microbatches=8),
    "llama3_70b-tp8pp8full": LayoutRow(
        model="llama3_70b", layout="tp8sppp8dp4overlap", microbatches=8,
        train={"recompute": "full:uniform:1"},
    ),
    "mixtral_8x7b-tp4pp4ep8": LayoutRow(model="mixtral_8x7b", layout="tp4sppp4ep8etp1dp4overlap", microbatches=4),
    "deepseek_v2_lite-ep8": LayoutRow(model="deepseek_v2_lite", layout="ep8dp256overlap", microbatches=2),
}  # fmt: skip
"""64 or 256 ranks each."""


def recipe_of(row: LayoutRow, seq_length: int, *, toy: bool) -> tuple[RunConfig, int]:
    """The run, and its number of ranks. toy: fewer and narrower layers on the same layout, of ``TOY_TOKENS``."""
    model = ModelConfig(shape=row.model, seq_length=TOY_TOKENS if toy else seq_length)
    train = TrainConfig(global_batch_size=1, micro_batch_size=1, **row.train)
    bare = RunConfig(model=model, optimizer=OptimizerConfig(lr_decay_style="constant"), train=train)
    config, job_size = with_layout(bare, row.layout)
    layout = config.layout(job_size)
    more: dict[str, Any] = {"megatron": BALANCED} if layout.ep > 1 else {}
    if toy:
        more |= TOYS[row.model]
        model = with_layers(model, max(layout.chunks, TOY_LAYERS * layout.pp))
    batch = row.microbatches * layout.dp
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, **more),
        train=dataclasses.replace(train, global_batch_size=batch),
    ), job_size
