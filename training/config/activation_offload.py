"""What train.fine_grained_activation_offloading needs, and cannot be with."""

import dataclasses
from typing import Literal, get_args

from models.kernels import KernelsConfig
from models.shapes import GPTShape
from models.sublayers import OffloadModule
from parallel.config import PrecisionConfig
from training.config.train_config import TrainConfig

FIELD = "train.fine_grained_activation_offloading"
CORE_ATTENTION = (
    'offload_modules "core_attn" in attention without rotary embeddings: queries, keys and values may be one tensor, '
    "in whose layout Transformer Engine would read the copies"
)
"""Its fused attention notes that they are interleaved ("sbh3d"), and what comes back is not."""


def fine_grained_problems(
    shape: GPTShape,
    precision: PrecisionConfig,
    kernels: KernelsConfig,
    train: TrainConfig,
    device: Literal["auto", "cpu", "cuda"],
) -> list[str]:
    """Of a device without Transformer Engine, of what was not compared with it, and of modules that are not there."""
    if not train.fine_grained_activation_offloading:
        return []
    if device == "cpu":
        return [
            f'{FIELD} needs a GPU and Transformer Engine, found device = "cpu". Set it to false; '
            "train.cpu_offloading_num_layers works on a CPU, too."
        ]
    found = {
        "train.cpu_offloading_num_layers: it offloads the same activations": train.cpu_offloading_num_layers > 0,
        "train.recompute: it was not compared with it yet": train.recompute is not None,
        'train.recompute_granularity = "full": a module that runs again would be offloaded again': (
            train.recompute_granularity == "full"
        ),
        "train.rampup_batch_size: the first iteration decides how many microbatches are offloaded": (
            train.rampup_batch_size is not None
        ),
        'train.recompute_modules "moe" and offload_modules "expert_fc1" or "moe_act", which are parts of it': (
            train.recompute_granularity == "selective"
            and "moe" in train.recompute_modules
            and bool({"expert_fc1", "moe_act"} & set(train.offload_modules))
        ),
        "train.compile: torch.compile does not see when a group of tensors begins and ends": train.compile,
        "precision.fp8_shadow: its window has other microbatches than a step": precision.fp8_shadow is not None,
        "precision.fp8_param_gather: weights in fp8 were not compared with it yet": precision.fp8_param_gather,
        'offload_modules "expert_fc1" and precision.fp8_recipe = "delayed": Transformer Engine keeps no such input': (
            precision.fp8 is not None and precision.fp8_recipe == "delayed" and "expert_fc1" in train.offload_modules
        ),
        "kernels.cuda_graph_impl: a graph's memory is fixed": kernels.graphs,
        "kernels.tp_comm_overlap: its buffers were not compared with it yet": kernels.tp_comm_overlap,
    }
    rotated = shape.position_embedding_type == "rope" and not any(shape.no_rope_blocks)
    if "core_attn" in train.offload_modules and shape.has_attention and not (rotated or shape.multi_latent_attention):
        found[CORE_ATTENTION] = True
    problems = [
        f"{FIELD} cannot be with {what}. Set the first to false, or leave the second out."
        for what, there in found.items()
        if there
    ]
    return problems + _missing_modules(shape, kernels, train)


def offloadable(
    shape: GPTShape, precision: PrecisionConfig, kernels: KernelsConfig, train: TrainConfig
) -> tuple[OffloadModule, ...]:
    """Modules that may be named for this model, whatever else forbids to offload any."""

    def may_be_named(module: OffloadModule) -> bool:
        alone = dataclasses.replace(train, fine_grained_activation_offloading=True, offload_modules=(module,))
        problems = fine_grained_problems(shape, precision, kernels, alone, "cuda")
        return not any(f'"{module}"' in problem for problem in problems)

    found = [module for module in get_args(OffloadModule) if may_be_named(module)]
    return tuple(module for module in found if module != "attn_proj" or "core_attn" in found)


def _missing_modules(shape: GPTShape, kernels: KernelsConfig, train: TrainConfig) -> list[str]:
    """Parts that the model does not have, or that offload nothing: megatron-core would say nothing."""
    experts = shape.num_moe_experts > 0
    grouped = experts and "moe_grouped_gemm" not in kernels.off
    latent = shape.multi_latent_attention
    needs = {
        "attn_norm": ("latent attention (elsewhere the norm is a part of qkv_linear)", latent),
        **dict.fromkeys(("qkv_linear", "core_attn", "attn_proj"), ("attention", shape.has_attention)),
        "mlp_norm": ("experts (elsewhere the norm is a part of the MLP's first linear layer)", experts),
        **dict.fromkeys(("expert_fc1", "moe_act"), ("experts (moe_grouped_gemm not in kernels.off)", grouped)),
    }
    return [
        f'train.offload_modules "{module}" needs a model with {needs[module][0]}, found none. Leave it out.'
        for module in train.offload_modules
        if not needs[module][1]
    ]
