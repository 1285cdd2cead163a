"""What is asked: a model, a cluster, so many GPUs, a batch, and what the user has decided already."""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from models.config import ModelConfig
from models.costs.candidate import Candidate
from models.resolve import resolve
from models.shapes import GPTShape
from models.sublayers import OffloadModule
from tools.clusters import Cluster
from training.config.optimizer_config import OptimizerConfig

SWITCHES = ("sequence_parallel", "overlap")
"""On wherever there is something to switch; off makes nothing smaller, and nothing faster but where the host's launches
set the pace (a test holds that), and is planned for whoever asks."""
AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "mbs", "recompute", "zero", "copies", "precision", *SWITCHES)
"""Fields of a candidate that can be fixed."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PlanRequest:
    """One planning problem. fixed: value of each axis that the user has decided."""

    model: ModelConfig
    cluster: Cluster
    num_gpus: int
    global_batch_size: int
    fixed: dict[str, int | str] = field(default_factory=dict)
    grad_reduce_in_fp32: bool = True
    """Of the recipe that the question came from (precision.grad_reduce_in_fp32)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Of that recipe: where and in how many bits its state is kept."""
    averages: dict[str, Any] = field(default_factory=dict)
    """Of that recipe's weights (train.ema_decay), bytes by Software's names."""
    cross_entropy_chunk_tokens: int | None = None
    """Of that recipe, too."""
    cpu_offloading_num_layers: int = 0
    """The same."""
    offload_modules: tuple[OffloadModule, ...] = ()
    """The same: of train.offload_modules."""
    activation_offload_fraction: float = 1.0
    """Of these modules' bytes."""
    compile: bool = False
    """The same: blocks by torch.compile."""
    cuda_graphs: bool = False
    """Blocks run as CUDA graphs: the host launches no kernel of theirs on its own."""

    @property
    def shape(self) -> GPTShape:
        """With the published vocabulary."""
        return _shape(self.model)

    @property
    def seq_length(self) -> int:
        return self.model.seq_length

    def without(self, *names: str) -> "PlanRequest":
        """The same with only these axes decided."""
        return dataclasses.replace(self, fixed={name: self.fixed[name] for name in names})

    def allows(self, layout: Candidate) -> bool:
        """Whether a layout keeps to what is decided; of switches, where there is something to switch."""
        there = {"sequence_parallel": layout.tp > 1, "overlap": layout.dp * layout.cp > 1}
        return all(getattr(layout, name) == value for name, value in self.fixed.items() if there.get(name, True))

    def splits_sequences(self, tp: int) -> bool:
        """Whether layouts of this TP size are sequence-parallel."""
        return tp > 1 and bool(self.fixed.get("sequence_parallel", True))

    def overlaps(self, ranks: int) -> bool:
        """Whether layouts with so many ranks to reduce gradients over, DP x CP, do so beside computation."""
        return ranks > 1 and bool(self.fixed.get("overlap", True))

    def can_shard(self, layout: Candidate) -> bool:
        """Whether pretrain_gpt.py splits gradients, and weights, of this layout (ZeRO-2, ZeRO-3)."""
        alone = layout.dp * layout.cp == 1  # no rank to split them over
        return not alone and layout.overlap and layout.precision != "fp16" and not self.cuda_graphs

    def choices(self, name: str, otherwise: list[int]) -> list[int]:
        """Values of an axis to try."""
        return [int(self.fixed[name])] if name in self.fixed else otherwise


@cache
def _shape(model: ModelConfig) -> GPTShape:
    return resolve(model, None)
