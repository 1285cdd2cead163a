"""The Megatron-LM job that is to load what ``--format megatron`` writes, in Megatron-LM's words."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from parallel.config import ParallelConfig
from parallel.layout import Layout, layout_of, replica_size, world_problems
from parallel.stages import stage_problems

TransformerImpl = Literal["transformer_engine", "local"]
OptimizerForm = Literal["fully_reshardable", "dp_reshardable"]


@dataclass(kw_only=True, frozen=True)
class MegatronJob:
    """All for --format megatron alone. The sizes are of the job that loads it."""

    optimizer_format: OptimizerForm = "fully_reshardable"
    """dp_reshardable: the flat memory of each TP x PP x EP rank, which Megatron-LM writes without
    --dist-ckpt-optim-fully-reshardable; it fits the sizes given here, with any DP. fully_reshardable fits all sizes."""
    tensor_model_parallel_size: int = 1
    """TP."""
    pipeline_model_parallel_size: int = 1
    """PP."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks on each pipeline rank (VPP); None: one."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Blocks of the first stage (--decoder-first-pipeline-num-layers); None: as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Blocks of the last stage (--decoder-last-pipeline-num-layers); None: as many as the others."""
    pipeline_model_parallel_layout: str | None = None
    """Stages in Megatron's letters, such as "Et|t*2|tL"."""
    context_parallel_size: int = 1
    """CP."""
    expert_model_parallel_size: int = 1
    """EP. Where experts have ranks of their own (EP above 1, or ETP other than TP), Megatron's optimizer is two, and
    so is its state."""
    expert_tensor_parallel_size: int | None = None
    """ETP; None: TP."""
    data_parallel_size: int | None = None
    """DP; None: the smallest that fits the experts. With dp_reshardable it decides where buckets end, if
    --overlap_grad_reduce and no --ddp_bucket_size are given."""
    overlap_grad_reduce: bool = False
    """With dp_reshardable: the job has --overlap-grad-reduce, so the first stage's memory is in buckets."""
    ddp_bucket_size: int | None = None
    """With dp_reshardable and --overlap_grad_reduce: elements of a bucket; None: Megatron's max(40M, 1M x DP x CP)."""
    transformer_impl: TransformerImpl = "transformer_engine"
    """With dp_reshardable: whose modules the job's model is made of, which orders its memory."""
    moe_grouped_gemm: bool = False
    """With dp_reshardable: the job has --moe-grouped-gemm, so its memory has all experts' first matrices before all
    their second ones."""

    @property
    def parallel(self) -> ParallelConfig:
        """As our own configuration says it."""
        names = {field.name for field in dataclasses.fields(ParallelConfig)}
        return ParallelConfig(**{name: value for name, value in dataclasses.asdict(self).items() if name in names})

    @property
    def world_size(self) -> int:
        """Ranks: TP x PP x CP x DP."""
        replica = replica_size(self.parallel)
        if self.data_parallel_size is not None:
            return replica * self.data_parallel_size
        fitting = (size * replica for size in range(1, 1 + self.expert_model_parallel_size * (self.etp or 1)))
        return next((size for size in fitting if not world_problems(self.parallel, size)), replica)

    @property
    def etp(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def layout(self) -> Layout:
        """Call ``problems`` before."""
        return layout_of(self.parallel, self.world_size)

    @property
    def has_experts_apart(self) -> bool:
        """Whether experts have ranks, buffers and an optimizer of their own (group_params_for_buffers of
        megatron-core 0.19.2's param_and_grad_buffer.py)."""
        return self.expert_model_parallel_size > 1 or self.etp != self.tensor_model_parallel_size

    def problems(self, num_layers: int, mtp_num_layers: int) -> list[str]:
        """What does not fit, in the words of our own configuration's sections, of which these fields have the names."""
        found = [text for text in self.parallel.problems() if "overlap" not in text]
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            found.append(f"--data_parallel_size {self.data_parallel_size}: expected 1 or more.")
        if not found:
            found += world_problems(self.parallel, self.world_size)
            found += stage_problems(self.parallel, num_layers, mtp_num_layers)
        return found
