"""The ``parallel`` and ``precision`` sections of a recipe."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from parallel.megatron_fields import megatron_field_problems, parse
from program.limits import too_small
from program.schema import structured

OWNED_DDP_FIELDS = frozenset(
    {
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "grad_reduce_in_fp32",
        "bucket_size",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "average_in_collective",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
    }
)

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
STRATEGIES: dict[str, Sharding] = {
    "no_shard": "no_shard", "NO_SHARD": "no_shard", "zero0": "no_shard",
    "optim": "optim", "zero1": "optim",
    "optim_grads": "optim_grads", "SHARD_GRAD_OP": "optim_grads", "zero2": "optim_grads",
    "optim_grads_params": "optim_grads_params", "FULL_SHARD": "optim_grads_params", "zero3": "optim_grads_params",
    "HYBRID_SHARD": "optim_grads_params",
}  # fmt: skip
"""Megatron's names, torch's, and DeepSpeed's stages -> Megatron's."""


StreamGroup = Literal[
    "tp", "cp", "pp", "dp", "dp_cp", "ep", "ep_tp", "ep_dp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp", "mp",
    "embd", "pos_embd",
]  # fmt: skip
"""Megatron's names of the groups that a run has; another one it would ignore."""

NCCL_FIELDS = {"high_priority_stream_groups": list[StreamGroup], "use_sharp": bool, "nccl_ub": bool}
"""Of ``ParallelConfig.megatron``, with their types: Triplane reads them, too."""
OF_GROUPS = ("high_priority_stream_groups", "use_sharp")
"""Those that are arguments of megatron-core's initialize_model_parallel."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParallelConfig:
    """How the ranks (GPUs) are divided. Data parallelism (DP) takes what TP x CP x PP leaves over."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (TP). Keep within one NVLink domain."""

    sequence_parallel: bool = False
    """Also split norms and dropout along the sequence over the TP ranks (arXiv:2205.05198). Needs TP > 1."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the stack of layers (PP)."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Layer chunks per pipeline rank (VPP): more chunks, smaller bubble, more sends. None: one chunk."""

    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage, where the embedding lives too. None: an equal share."""

    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage, where the output layer and the loss live too. None: an equal share."""

    pipeline_model_parallel_layout: str | None = None
    """Explicit stages in Megatron's letters, e.g. "Et|t*2|tmL": E embedding, t layer, m MTP, L loss, | next stage."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are divided evenly over the stages."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as one layer when layers are divided evenly over the stages."""

    context_parallel_size: int = 1
    """Ranks that share each sequence in attention (CP)."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture-of-experts layer (EP); taken from TP x CP x DP."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices (ETP). None: TP."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """How tokens reach their experts' ranks; flex is DeepEP (GPU only; model.megatron picks another backend)."""

    cp_comm_type: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """How Transformer Engine's attention exchanges keys and values over CP. Without it, and with packed documents
    (data.reset_attention_mask), they are all-gathered."""

    use_distributed_optimizer: bool = True
    """Split the optimizer's fp32 state over the DP ranks (ZeRO-1). data_parallel_sharding_strategy goes before it."""

    data_parallel_sharding_strategy: Literal[
        "no_shard", "optim", "optim_grads", "optim_grads_params",
        "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "zero0", "zero1", "zero2", "zero3",
    ] | None = None  # fmt: skip
    """What the DP x CP ranks split: nothing (no_shard), the optimizer's state (optim, ZeRO-1), gradients too
    (optim_grads, ZeRO-2), weights too (optim_grads_params, ZeRO-3); or torch's names, or DeepSpeed's stages. None: as
    use_distributed_optimizer says."""

    num_distributed_optimizer_instances: int = 1
    """Groups of DP x CP ranks that each hold all shards, with gradients summed over the groups (HSDP, HYBRID_SHARD).
    Needs optim_grads or optim_grads_params."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass runs. Needs overlap_grad_reduce."""

    ddp_bucket_size: int | None = None
    """Gradient elements per bucket of an overlapped reduction. None: Megatron's max(40M, 1M x DP)."""

    elastic: bool = False
    """Where the ranks that were started do not fit these sizes (a node is gone), take the nearest DP that does, else
    fewer copies of shards, another PP, then a smaller TP, and say so. Global batch and data order stay."""

    distributed_timeout_minutes: float = 10.0
    """Minutes until a collective that some rank never joined raises."""

    megatron: tuple[str, ...] = ()
    """More of mcore's DistributedDataParallelConfig, as "field=value" strings, such as "nccl_ub=True"; and of
    initialize_model_parallel: "use_sharp=True", "high_priority_stream_groups=['dp_cp', 'ep']"."""

    @property
    def nccl_ub(self) -> bool:
        """Weights and gradients lie in memory that NCCL has registered, so that DP's collectives take fewer SMs. Needs
        GPUs and a CUDA toolkit, with which Megatron compiles NCCL's allocator. Not yet run on a GPU."""
        return bool(parse(self.megatron).get("nccl_ub"))

    @property
    def use_sharp(self) -> bool:
        """The switches of InfiniBand sum the gradients of DP x CP (SHARP). Needs several nodes, and a cluster file that
        sets NCCL_COLLNET_ENABLE. Not yet run on a GPU."""
        return bool(parse(self.megatron).get("use_sharp"))

    @property
    def high_priority_stream_groups(self) -> tuple[StreamGroup, ...]:
        """Groups, such as "dp_cp" and "ep", whose collectives start before waiting kernels of other streams. Needs
        GPUs. Not yet run on a GPU."""
        return tuple(parse(self.megatron).get("high_priority_stream_groups", ()))

    @property
    def of_ddp(self) -> tuple[str, ...]:
        """The entries of ``megatron`` that DistributedDataParallelConfig takes."""
        return tuple(each for each in self.megatron if each.partition("=")[0].strip() not in OF_GROUPS)

    @property
    def sharding(self) -> Sharding:
        """What the data ranks split, in Megatron's names."""
        if self.data_parallel_sharding_strategy is not None:
            return STRATEGIES[self.data_parallel_sharding_strategy]
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def chunks(self) -> int:
        """Of the stack of layers: PP x VPP."""
        return self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)

    @property
    def fully_sharded(self) -> bool:
        """Gradients, and perhaps weights, are split: torch's fully_shard in place of Megatron's DDP."""
        return self.sharding in ("optim_grads", "optim_grads_params")

    def problems(self) -> list[str]:
        """What is wrong within this section alone; ``RunConfig.problems`` (training/config) has the rest."""
        found = too_small(
            self, "parallel.", 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "ddp_bucket_size",
            "num_distributed_optimizer_instances",
        )  # fmt: skip
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            found.append("parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1.")
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.sharding != "no_shard"):
            found.append(
                "parallel.overlap_param_gather needs parallel.overlap_grad_reduce and "
                "parallel.use_distributed_optimizer."
            )
        found += self._sharding_problems()
        if (self.virtual_pipeline_model_parallel_size or 1) > 1 and self.pipeline_model_parallel_size == 1:
            found.append(
                "parallel.virtual_pipeline_model_parallel_size needs parallel.pipeline_model_parallel_size > 1."
            )
        if self.distributed_timeout_minutes <= 0:
            found.append("parallel.distributed_timeout_minutes must be above 0.")
        found += megatron_field_problems("parallel.megatron", self.megatron, OWNED_DDP_FIELDS)
        return found + self._nccl_problems()

    def _nccl_problems(self) -> list[str]:
        """Values that megatron-core would take for others, or ignore."""
        given = parse(self.megatron)
        return [
            f"parallel.megatron: {name}: {problem.removeprefix(': ')}"
            for name, kind in NCCL_FIELDS.items()
            if name in given
            for problem in structured(given[name], kind)[1]
        ]

    def _sharding_problems(self) -> list[str]:
        """What goes with one strategy alone."""
        strategy, copies = self.data_parallel_sharding_strategy, self.num_distributed_optimizer_instances
        if strategy == "HYBRID_SHARD" and copies == 1:
            return [
                'parallel.data_parallel_sharding_strategy "HYBRID_SHARD" needs '
                "parallel.num_distributed_optimizer_instances > 1, the number of copies, found 1. Set it, or use "
                '"FULL_SHARD".'
            ]
        if not self.fully_sharded:
            if copies == 1:
                return []
            return [
                f"parallel.num_distributed_optimizer_instances {copies} needs "
                'parallel.data_parallel_sharding_strategy "optim_grads" or "optim_grads_params", found '
                f'"{self.sharding}".'
            ]
        of_ddp = {"ddp_bucket_size": self.ddp_bucket_size, "megatron": self.of_ddp}
        return [
            f"parallel.{name} is of Megatron's DDP, which parallel.data_parallel_sharding_strategy "
            f'"{strategy}" does without. Leave it out.'
            for name, value in of_ddp.items()
            if value
        ]


SHADOW_BOUND = 0.25
"""Largest relative difference of fp8 or fp4 from bf16 that is usual: sound layers of the debug model are within 9 %, a
layer whose scale is wrong at 100 % (docs/precision.md)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shadow:
    """``PrecisionConfig.fp8_shadow``."""

    interval: int
    """Iterations from one window to the next."""
    bound: float
    """Largest relative difference of a window without a warning."""
    stop: bool
    """Where it is larger, stop."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PrecisionConfig:
    """In which number formats the model computes."""

    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    """Of parameters and activations. fp16 and bf16 keep fp32 main weights and moments in the optimizer."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Transformer Engine's fp8 for matrix products (Hopper or newer, with dtype bf16). None: off."""

    fp8_recipe: Literal["auto", "delayed", "tensorwise", "mxfp8", "blockwise"] = "auto"
    """How Transformer Engine scales fp8 tensors; mxfp8 needs Blackwell and fp8 = "e4m3". auto: mxfp8 where both are
    there, else tensorwise."""

    fp4: Literal["e2m1"] | None = None
    """Transformer Engine's fp4 for matrix products (Blackwell or newer, with dtype bf16), instead of fp8. None: off."""

    fp4_recipe: Literal["nvfp4"] = "nvfp4"
    """How Transformer Engine scales fp4 tensors: nvfp4 has an 8-bit scale for 16 values and an fp32 one a tensor."""

    first_last_layers_bf16: bool = False
    """Compute the first and last layers in bf16 under fp8 or fp4; not with the fp8_recipe delayed."""

    num_layers_at_start_in_bf16: int = 1
    """First layers in bf16, with first_last_layers_bf16."""

    num_layers_at_end_in_bf16: int = 1
    """Last layers in bf16, with first_last_layers_bf16; depths of multi-token prediction stay in fp8, and under fp4 are
    in bf16 in any case."""

    fp8_param_gather: bool = False
    """Keep and gather the weights that are multiplied in fp8 in fp8, not in 16 bits: needs
    parallel.use_distributed_optimizer. With mxfp8 they are gathered in bf16, in the gradients' buffer."""

    fp8_shadow: str | None = None
    """"warn:500": every 500 iterations a microbatch also runs in bf16, and loss and each layer's gradient norm are
    compared with fp8's or fp4's. "stop:500" stops where they differ by more than 25 %, instead of a warning;
    "stop:500:0.1" by more than 10 %. None: off."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 (Megatron's accumulate_allreduce_grads_in_fp32)."""

    loss_scale: float | None = None
    """Fixed fp16 loss scale. None: dynamic."""

    initial_loss_scale: float = 65536.0
    """Where dynamic fp16 loss scaling starts. From Megatron's 2^32 the first iterations would be skipped, one for each
    halving."""

    min_loss_scale: float = 1.0
    """Dynamic fp16 loss scaling never goes below this."""

    loss_scale_window: int = 1000
    """Good iterations in a row before dynamic fp16 loss scaling doubles."""

    hysteresis: int = 2
    """Overflowing iterations in a row that dynamic fp16 loss scaling accepts before it halves."""

    @property
    def products(self) -> Literal["fp8", "fp4"] | None:
        """The format of matrix products in fewer bits than dtype's. None: they are in dtype."""
        return "fp8" if self.fp8 is not None else "fp4" if self.fp4 is not None else None

    @property
    def recipe(self) -> str:
        """Transformer Engine's, of ``products``."""
        return self.fp4_recipe if self.products == "fp4" else self.fp8_recipe

    def without_products(self) -> "PrecisionConfig":
        """With products in dtype, and without what only those in fp8 and fp4 have."""
        return replace(self, fp8=None, fp4=None, fp8_param_gather=False, first_last_layers_bf16=False, fp8_shadow=None)

    @property
    def shadow(self) -> "Shadow | None":
        """What fp8_shadow says; None where it is off, or says nothing that is known."""
        found = re.fullmatch(r"(warn|stop):(\d{1,12})(?::(\d{1,9}(?:\.\d+)?))?", self.fp8_shadow or "")
        if found is None:
            return None
        action, interval, bound = found.groups()
        return Shadow(interval=int(interval), bound=float(bound or SHADOW_BOUND), stop=action == "stop")

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        for name in ("fp8", "fp4"):
            if getattr(self, name) is not None and self.dtype != "bf16":
                found.append(f'precision.{name} needs precision.dtype = "bf16", found "{self.dtype}".')
        if self.fp8 is not None and self.fp4 is not None:
            found.append(
                f'precision.fp8 = "{self.fp8}" and precision.fp4 = "{self.fp4}" exclude each other: a product is in '
                "one of them. Leave one out."
            )
        if self.fp8 == "hybrid" and self.fp8_recipe == "mxfp8":
            found.append(
                'precision.fp8_recipe = "mxfp8" needs precision.fp8 = "e4m3", found "hybrid": with gradients in e5m2, '
                "which has two bits of mantissa, training diverges."
            )
        if self.first_last_layers_bf16 and self.products is None:
            found.append(
                "precision.first_last_layers_bf16 needs precision.fp8 or precision.fp4; without them all layers are in "
                "bf16."
            )
        if self.first_last_layers_bf16 and self.fp8 is not None and self.fp8_recipe == "delayed":
            found.append(
                'precision.first_last_layers_bf16 needs another precision.fp8_recipe than "delayed", whose scales are '
                "updated once for all layers."
            )
        if self.fp8_param_gather and self.fp8 is None:
            found.append("precision.fp8_param_gather needs precision.fp8: it keeps those weights in fp8.")
        if self.fp8_shadow is not None and self.products is None:
            found.append("precision.fp8_shadow needs precision.fp8 or precision.fp4: it compares them with bf16.")
        if self.fp8_shadow is not None and (self.shadow is None or not self.shadow.interval or not self.shadow.bound):
            found.append(
                'precision.fp8_shadow: expected "warn" or "stop", iterations and perhaps a bound above 0, such as '
                f'"warn:500" or "stop:500:0.25", found "{self.fp8_shadow}".'
            )
        found += too_small(self, "precision.", 0, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        if self.loss_scale is not None and self.dtype != "fp16":
            found.append(f'precision.loss_scale is for precision.dtype = "fp16", found "{self.dtype}".')
        scale = "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
        return found + too_small(self, "precision.", None, *scale)
