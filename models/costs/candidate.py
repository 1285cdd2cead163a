"""One layout that can be priced: sizes of every axis, batch arithmetic, what is recomputed and sharded."""

from dataclasses import dataclass
from typing import Literal

from parallel.config import ParallelConfig, Sharding
from parallel.stages import layers_per_chunk, layout_string

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


FULLY_SHARDED = {zero: name for name, zero in ZERO.items() if zero > 1}
"""Below, use_distributed_optimizer says it."""


def parallel_config(layout: Candidate, *, experts: bool = False) -> ParallelConfig:
    """The recipe's section of this layout, of a model with experts or without."""
    interleaved = layout.vpp if layout.vpp > 1 else None
    ends = layout.split == "ends"
    return ParallelConfig(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=interleaved,
        num_layers_in_first_pipeline_stage=layout.first_layers if ends and layout.first_layers else None,
        num_layers_in_last_pipeline_stage=layout.last_layers if ends and layout.last_layers else None,
        account_for_embedding_in_pipeline_split=layout.split == "embedding_and_loss",
        account_for_loss_in_pipeline_split=layout.split in ("embedding_and_loss", "loss"),
        pipeline_model_parallel_layout=layout_string(layout.chunk_layers) if layout.split == "layout" else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if experts else None,
        use_distributed_optimizer=layout.zero >= 1,
        data_parallel_sharding_strategy=FULLY_SHARDED.get(layout.zero),
        num_distributed_optimizer_instances=layout.copies,
        overlap_grad_reduce=layout.overlap and layout.dp * layout.cp > 1,
        overlap_param_gather=layout.overlap and layout.dp * layout.cp > 1 and layout.zero >= 1,
    )


def chunks(layers: int, layout: Candidate) -> list[int]:
    """Blocks of each chunk, first to last."""
    if layout.chunk_layers:
        return list(layout.chunk_layers)
    whole = layout.pp * layout.vpp
    if layout.split == "even" and layers % whole:  # only published runs, by programs that deal layers out one by one
        return [layers // whole + (number < layers % whole) for number in range(whole)]
    return layers_per_chunk(parallel_config(layout), layers)
