"""What cannot be combined, though each part is sound by itself and divides over the ranks."""

from collections.abc import Mapping, Sequence
from typing import Literal

from models.kernels import KernelsConfig
from models.owned_fields import RECOMPUTED_BY_TRANSFORMER_ENGINE
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from training.config.optimizer_config import OptimizerConfig


def mtp_problems(shape: GPTShape, documents_apart: bool) -> list[str]:
    """Multi-token prediction with packed documents, or with blocks that attend differently."""
    if not shape.mtp_num_layers:
        return []
    found = []
    if documents_apart:
        found.append(
            "model.mtp_num_layers cannot be combined with data.reset_attention_mask: its targets would reach into the "
            "next document. Set one of them to its default (0, false)."
        )
    for field, blocks in (("window_attn_skip_freq", shape.window_blocks), ("no_rope_freq", shape.no_rope_blocks)):
        if blocks[0] != blocks[-1]:
            found.append(
                f"model.mtp_num_layers {shape.mtp_num_layers}: an MTP depth attends as the first block does "
                f"(megatron-core counts its layers from 1), but model.{field} lets the first and the last block "
                "differ. Make them equal, or set model.mtp_num_layers = 0."
            )
    return found


def mup_problems(shape: GPTShape, optimizer: str) -> list[str]:
    """muP with an optimizer whose updates may have any size."""
    if not shape.use_mup or optimizer in ("adam", "muon"):
        return []
    return [
        f'model.use_mup scales the learning rates of "adam" and "muon", found optimizer.optimizer "{optimizer}". Use '
        "one of them, or set model.use_mup = false."
    ]


def qk_clip_problems(
    shape: GPTShape, optimizer: OptimizerConfig, kernels: KernelsConfig, megatron: Mapping[str, object]
) -> list[str]:
    """Where optimizer.qk_clip would scale nothing, or to no effect, or gets no logits. megatron: model.megatron
    by field."""
    if not optimizer.qk_clip:
        return []
    fp8 = any(megatron.get(name) for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"))
    found = {
        "a model without attention": not shape.has_attention,
        "model.qk_layernorm: norms of queries and keys undo the scaling": (
            shape.qk_layernorm and not shape.multi_latent_attention
        ),
        "model.qk_l2_norm: norms of queries and keys undo the scaling": shape.qk_l2_norm,
        "model.clip_qkv: queries and keys are no longer in proportion to their weights": shape.clip_qkv > 0,
        "model.attn_logit_softcapping, which bounds logits already": shape.attn_logit_softcapping > 0,
        'kernels.cuda_graph_impl = "local", which collects no logits': kernels.graphs,
        'kernels.attention_backend = "flash", which returns no logits': kernels.attention_backend == "flash",
        "attention in fp8 (model.megatron), which returns no logits": fp8,
        "model.megatron: apply_query_key_layer_scaling, which returns logits over the layer's number": bool(
            megatron.get("apply_query_key_layer_scaling")
        ),
        "optimizer.use_precision_aware_optimizer, whose weights are kept in parts": (
            optimizer.use_precision_aware_optimizer
        ),
        "optimizer.optimizer_cpu_offload, whose weights are on the host": optimizer.optimizer_cpu_offload,
    }
    return _cannot("optimizer.qk_clip", found, "Leave one of them out.")


def _cannot(field: str, found: Mapping[str, bool], fix: str) -> list[str]:
    """found: what it cannot be with, and whether that is there."""
    return [f"{field} cannot be with {what}. {fix}" for what, there in found.items() if there]


def dispatcher_problems(parallel: ParallelConfig, device: Literal["auto", "cpu", "cuda"]) -> list[str]:
    """A dispatcher whose kernels the device lacks, or that has nowhere to send tokens."""
    field = 'parallel.moe_token_dispatcher_type "flex"'
    if parallel.moe_token_dispatcher_type != "flex":
        return []
    if device == "cpu":
        return [f'{field} needs GPUs, found device = "cpu". Use "alltoall" or "allgather".']
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if parallel.expert_model_parallel_size * etp == 1:
        return [
            f"{field} needs parallel.expert_model_parallel_size x expert_tensor_parallel_size above 1, found 1. Use "
            '"alltoall".'
        ]
    return []


def buffer_problems(shape: GPTShape, parallel: ParallelConfig) -> list[str]:
    """All ranks meet once for each buffer that megatron-core registers with NCCL: a stage without experts has fewer."""
    if parallel.nccl_ub and parallel.pipeline_model_parallel_size > 1 and shape.num_moe_experts:
        return [
            "parallel.megatron: nccl_ub cannot be with experts and pipeline_model_parallel_size > 1: it would hang."
        ]
    return []


def offload_problems(layers: int, precision: PrecisionConfig, graphed: bool) -> list[str]:
    """What train.cpu_offloading_num_layers cannot be with."""
    found = {
        f"precision.{precision.products}: Transformer Engine keeps weights beside activations, as plain tensors": (
            precision.products is not None
        ),
        "kernels.cuda_graph_impl: a graph's memory is fixed": graphed,
    }
    return _cannot("train.cpu_offloading_num_layers", found, "Set it to 0.") if layers else []


def compile_problems(precision: PrecisionConfig, graphed: bool) -> list[str]:
    """What train.compile cannot be with."""
    found = {
        f"precision.{precision.products}: Transformer Engine's products in it were not compiled yet": (
            precision.products is not None
        ),
        "kernels.cuda_graph_impl: a graph captures kernels as they are written": graphed,
    }
    return _cannot("train.compile", found, "Set it to false.")


def graph_problems(
    shape: GPTShape, parallel: ParallelConfig, precision: PrecisionConfig, *,
    by_document: bool, recomputes: bool, ramp: str | None, userbuffers: bool,
) -> list[str]:  # fmt: skip
    """What kernels.cuda_graph_impl cannot be with: what changes from one microbatch to the next, and what has not been
    captured and compared yet."""
    found = {
        "data.reset_attention_mask or reset_position_ids: documents start elsewhere in each sample": by_document,
        "model.mtp_num_layers: Megatron captures no depth of multi-token prediction": shape.mtp_num_layers > 0,
        "model.multi_latent_attention: it was not captured yet": shape.multi_latent_attention,
        "model.parallel_residual: attention hands its input on, beside what a graph returns": shape.parallel_residual,
        "model.window_size: sliding windows were not captured yet": any(shape.window_blocks),
        'precision.dtype = "fp16": it was not captured yet': precision.dtype == "fp16",
        "nccl_ub in parallel.megatron: its buffers were not captured yet": parallel.nccl_ub,
        "train.recompute: what is recomputed was not captured yet": recomputes,
        f"precision.{precision.products}: its products were not captured yet": precision.products is not None,
        "parallel.context_parallel_size > 1: its exchanges were not captured yet": parallel.context_parallel_size > 1,
        "kernels.tp_comm_overlap: its buffers were not captured yet": userbuffers,
        f"{ramp} in a pipeline, where each microbatch has a graph of its own": ramp is not None
        and parallel.pipeline_model_parallel_size > 1,
    }
    return _cannot('kernels.cuda_graph_impl = "local"', found, 'Use "none".')


def sharding_problems(
    parallel: ParallelConfig, precision: PrecisionConfig, *, graphs: bool, userbuffers: bool
) -> list[str]:
    """What parallel.data_parallel_sharding_strategy cannot be with, where it leaves DDP to torch's fully_shard."""
    if not parallel.fully_sharded:
        return []
    found = {
        'precision.dtype = "fp16"': (
            "fully_shard's fp32 shards have no loss scale. Use bf16",
            precision.dtype == "fp16",
        ),
        "precision.fp8_shadow": (
            "its window needs the whole gradients of one microbatch. Leave it out",
            precision.fp8_shadow is not None,
        ),
        'kernels.cuda_graph_impl = "local"': ('a graph keeps the addresses of weights, which move. Use "none"', graphs),
        "kernels.tp_comm_overlap": ("its buffers were not compared with it yet. Leave it out", userbuffers),
    }
    return [
        f'parallel.data_parallel_sharding_strategy "{parallel.data_parallel_sharding_strategy}" cannot be with {what}: '
        f'{why}, or use the strategy "optim".'
        for what, (why, there) in found.items()
        if there
    ]


def exchange_problems(shape: GPTShape, parallel: ParallelConfig, device: Literal["auto", "cpu", "cuda"]) -> list[str]:
    """What Transformer Engine's attention cannot exchange over context ranks (its attn_forward_func_with_cp)."""
    kind, cp = parallel.cp_comm_type, parallel.context_parallel_size
    if cp == 1 or device == "cpu":
        return []
    if any(shape.window_blocks) and kind == "p2p":
        what, way = f"sliding windows (model.window_size {shape.window_size})", '"all_gather" or "a2a"'
    elif shape.multi_latent_attention and kind != "p2p":
        what, way = "latent attention (model.multi_latent_attention)", '"p2p"'
    else:
        return []
    return [
        f'parallel.cp_comm_type "{kind}" cannot exchange {what} over context ranks: Transformer Engine refuses it. '
        f"Use {way}."
    ]


def block_recompute_problems(shape: GPTShape, method: str | None) -> list[str]:
    """megatron-core's method "block" recomputes each sublayer by itself; "uniform" the two of a block as one."""
    if method != "block" or not shape.parallel_residual:
        return []
    return [
        'train.recompute "full:block" cannot be with model.parallel_residual: it recomputes an MLP without the '
        'attention before it, whose input that MLP reads. Use "full:uniform".'
    ]


def recompute_problems(
    shape: GPTShape, modules: Sequence[str], device: Literal["auto", "cpu", "cuda"] = "auto"
) -> list[str]:
    """Recomputation of parts that the model does not have, that only Transformer Engine's modules recompute, or whose
    backward pass never ends: an MLP returns its bias, and where it is recomputed by megatron-core 0.19.2
    (tensor_parallel/random.py:656), that parameter becomes an output of the function that uses it."""
    experts, shared = shape.num_moe_experts > 0, shape.moe_shared_expert_intermediate_size > 0
    parts = {
        "mla_up_proj": ("model.multi_latent_attention", shape.multi_latent_attention),
        "moe": ("model.num_moe_experts", experts),
        "moe_act": ("model.num_moe_experts", experts),
        "shared_experts": ("model.moe_shared_expert_intermediate_size", shared),
    }
    found = []
    for module in modules:
        needs, there = parts.get(module, ("", True))
        if not there:
            found.append(f'train.recompute "selective:{module}" needs a model with {needs}, found none. Leave it out.')
        elif module == "mlp" and shape.fc_bias:
            found.append(
                'train.recompute "selective:mlp": megatron-core recomputes no MLP with biases (model.add_bias_linear, '
                "model.mlp_bias): its backward pass would never end. Leave it out, or recompute in full."
            )
        elif device == "cpu" and module in RECOMPUTED_BY_TRANSFORMER_ENGINE:
            found.append(
                f'train.recompute "selective:{module}" needs Transformer Engine, which needs GPUs; found device = '
                '"cpu". Leave it out.'
            )
    return found


def param_gather_problems(parallel: ParallelConfig, precision: PrecisionConfig) -> list[str]:
    """What precision.fp8_param_gather needs of the optimizer, and mxfp8 cannot do with it.

    Transformer Engine 2.19 keeps two copies of an mxfp8 weight and lets neither lie in the buffer that is gathered
    (replace_raw_data), so megatron-core gathers 16 bits in the gradients' memory. Overlapped, gradients are there at
    all moments but the start of a step: evaluation, a window of fp8_shadow and a checkpoint would gather them
    as weights.
    """
    if not precision.fp8_param_gather:
        return []
    if parallel.sharding == "no_shard":
        return [
            "precision.fp8_param_gather needs parallel.use_distributed_optimizer = true, found false: it alone makes "
            "weights in fp8 from fp32 ones."
        ]
    if parallel.fully_sharded:
        return [
            "precision.fp8_param_gather needs the distributed optimizer "
            '(parallel.data_parallel_sharding_strategy "optim"), found '
            f'"{parallel.data_parallel_sharding_strategy}", whose weights are gathered in 16 bits.'
        ]
    if precision.fp8_recipe == "mxfp8" and parallel.overlap_param_gather:
        return [
            'precision.fp8_param_gather with precision.fp8_recipe = "mxfp8" gathers weights in the gradients\' memory, '
            "which parallel.overlap_param_gather would use for both at once. Set it to false, or leave "
            "precision.fp8_param_gather out."
        ]
    return []


def scale_problems(shape: GPTShape, precision: PrecisionConfig, recompute_granularity: str | None) -> list[str]:
    """megatron-core 0.19.2 recomputes a depth of multi-token prediction within another recomputation: Transformer
    Engine 2.19 then keeps its "delayed" scales twice for each microbatch, takes them back once, and recomputes with
    those of earlier steps, silently, from memory that grows."""
    if precision.fp8 is None or precision.fp8_recipe != "delayed":
        return []
    if not shape.mtp_num_layers or recompute_granularity != "full":
        return []
    return [
        'precision.fp8_recipe = "delayed" with model.mtp_num_layers and train.recompute = "full" '
        'recomputes with wrong scales. Take fp8_recipe = "tensorwise", or train.recompute = "selective".'
    ]
