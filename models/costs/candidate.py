"""One layout that can be priced: sizes of every axis, batch arithmetic, what is recomputed and sharded."""

from dataclasses import dataclass
from typing import Literal

from parallel.config import Sharding
from parallel.stages import layout_string

Recompute = Literal["none", "core_attn", "mlp", "operators", "moe", "full"]
"""Megatron's recompute_modules one at a time, or whole layers. operators: every second product and what is cheap, as
torchtitan's "selective op" does; Triplane does not."""
Zero = Literal[0, 1, 2, 3]
ZERO: dict[Sharding, Zero] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""The stage of a parallel.data_parallel_sharding_strategy."""
Split = Literal["even", "embedding_and_loss", "loss", "ends", "layout"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    """Short names, as users of tools.plan type them; a recipe has Megatron's."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    mbs: int = 1
    microbatches: int = 1
    recompute: Recompute = "none"
    """What the backward pass computes a second time."""
    zero: Zero = 1
    """0: all replicated; 1: optimizer state split over DP x CP; 2: gradients too; 3: weights too (FSDP)."""
    copies: int = 1
    """HSDP: groups of DP x CP ranks that each hold all shards."""
    overlap: bool = True
    """Gradients are reduced, and weights gathered, while others compute."""
    sequence_parallel: bool = True
    precision: str = "bf16"
    first_layers: int = 0
    """Of the first pipeline stage; 0: an equal share."""
    last_layers: int = 0
    split: Split = "even"
    """How layers were dealt to stages, as the recipe says it; "layout": by ``chunk_layers``, as Megatron's
    pipeline_model_parallel_layout."""
    chunk_layers: tuple[int, ...] = ()
    """Layers of each chunk, first to last, where they are known already; empty: as ``split`` deals them."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        axes = [("TP", self.tp, True), ("PP", self.pp, True), ("VPP", self.vpp, self.vpp > 1)]
        axes += [("CP", self.cp, self.cp > 1), ("EP", self.ep, self.ep > 1), ("ETP", self.etp, self.etp > 1)]
        axes += [("DP", self.dp, True), ("MBS", self.mbs, True)]
        text = " ".join(f"{name}{size}" for name, size, shown in axes if shown)
        words = [f"ends {self.first_layers}/{self.last_layers}"] if self.split == "ends" else []
        words += [layout_string(self.chunk_layers)] if self.split == "layout" else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"ZeRO-{self.zero}"] if self.zero != 1 else []
        words += [f"{self.copies} copies of the shards"] if self.copies > 1 else []
        words += [] if self.overlap or self.dp * self.cp == 1 else ["no overlap"]
        words += [] if self.sequence_parallel or self.tp == 1 else ["no sequence parallelism"]
        words += [] if self.precision in ("bf16", "fp16") else [self.precision]
        return ", ".join([text, *words])
