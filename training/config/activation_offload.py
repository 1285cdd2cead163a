"""What train.offload_modules needs, and cannot be with."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from models.kernels import KernelsConfig
from models.shapes import GPTShape
from models.sublayers import OffloadModule
from parallel.config import PrecisionConfig
from parallel.megatron_fields import parse
from training.config.train_config import TrainConfig

FIELD = "train.offload_modules"
SHARE = "activation_offload_fraction"
NUMBERS = {
    "min_offloaded_tensor_size": ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    "delta_offload_bytes_across_pp_ranks": (
        "a whole number, 0 or more",
        lambda value: type(value) is int and value >= 0,
    ),
    SHARE: ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
}
"""Entries of model.megatron by which megatron-core chooses of these inputs: what each may be."""
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
    if not train.offload_modules:
        return []
    if device == "cpu":
        return [
            f'{FIELD} needs a GPU and Transformer Engine, found device = "cpu". Leave it out; '
            "train.cpu_offloading_num_layers works on a CPU, too."
        ]
    found = {
        "train.cpu_offloading_num_layers: it offloads the same activations": train.cpu_offloading_num_layers > 0,
        'train.recompute = "auto": it was not compared with it yet': train.recompute_budget is not None,
        'train.recompute = "full": a module that runs again would be offloaded again': (
            train.recompute_granularity == "full"
        ),
        f"{train.changes_batch}: the first iteration decides how many microbatches are offloaded": (
            train.changes_batch is not None
        ),
        'train.recompute = "selective:moe" and offload_modules "expert_fc1" or "moe_act", which are parts of it': (
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
    problems = [f"{FIELD} cannot be with {what}. Leave one of them out." for what, there in found.items() if there]
    return problems + _missing_modules(shape, kernels, train)


def offload_number_problems(entries: Sequence[str]) -> list[str]:
    """Of model.megatron's entries: megatron-core checks these with assertions, once a model is built."""
    given = parse(entries)
    return [
        f"model.megatron: {name} must be {what}, found {given[name]}."
        for name, (what, fits) in NUMBERS.items()
        if name in given and not fits(given[name])
    ]


def offloaded_share(entries: Sequence[str]) -> float:
    """Of what could be offloaded: each microbatch's later groups stay on the GPU."""
    value = parse(entries).get(SHARE, 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def offloadable(
    shape: GPTShape, precision: PrecisionConfig, kernels: KernelsConfig, train: TrainConfig
) -> tuple[OffloadModule, ...]:
    """Modules that may be named for this model, whatever else forbids to offload any."""

    def may_be_named(module: OffloadModule) -> bool:
        alone = dataclasses.replace(train, offload_modules=(module,))
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
