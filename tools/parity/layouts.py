"""Layouts by short names (``tp2pp2dp2``), and a recipe's architecture shrunk to laptop size."""

import dataclasses
import re
from typing import Any

from models.frequencies import parse_freq
from models.kernels import KernelsConfig
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.config import ParallelConfig
from parallel.layout import replica_size, smallest_world
from program.errors import UserError
from training.config.checkpoint_config import CheckpointConfig
from training.config.run_config import RunConfig

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "bucket": "ddp_bucket_size",
    "hsdp": "num_distributed_optimizer_instances",
}
SWITCHES: dict[str, dict[str, object]] = {
    "sp": {"sequence_parallel": True},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "zero0": {"use_distributed_optimizer": False},
    "zero2": {"data_parallel_sharding_strategy": "optim_grads"},
    "zero3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "account": {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")},
}
WORD = re.compile(rf"({'|'.join(SWITCHES)})|(hsdp|vpp|etp|ep|tp|pp|cp|dp|mbs|first|last|bucket)(\d+)|\[([^\]]+)\]")


def with_layout(config: RunConfig, name: str) -> tuple[RunConfig, int]:
    """The configuration on layout ``name``, and its world size.

    A name is made of tpN, ppN, vppN, cpN, dpN, epN, etpN, mbsN (micro-batch), firstN and lastN (layers of the first
    and last stage), bucketN (elements), sp (sequence parallel), overlap (of both gradient reduce and parameter gather),
    zero0 (no distributed optimizer), zero2 and zero3 (gradients, and weights, in shards), hsdpN (copies of the shards),
    allgather (experts' dispatcher), account (embedding and loss count as layers) and
    [Et|tt|tL] (pipeline_model_parallel_layout). Without dpN there is one replica, or as many as the experts need.
    Raises UserError for anything else.
    """
    if WORD.sub("", name):
        raise UserError(
            f'layout "{name}": cannot read "{WORD.sub("", name)}". Write it like tp2sp, pp2vpp2 or tp2pp2dp2overlap.'
        )
    changes: dict[str, object] = {}
    dp, micro_batch_size = None, config.train.micro_batch_size
    for switch, size_name, number, stages in WORD.findall(name):
        if size_name == "dp":
            dp = int(number)
        elif size_name == "mbs":
            micro_batch_size = int(number)
        elif size_name:
            changes[SIZES[size_name]] = int(number)
        elif switch:
            changes |= SWITCHES[switch]
        else:
            changes["pipeline_model_parallel_layout"] = stages
    parallel = ParallelConfig(**changes)  # type: ignore[arg-type]
    changed = dataclasses.replace(
        config, parallel=parallel, train=dataclasses.replace(config.train, micro_batch_size=micro_batch_size)
    )
    return changed, replica_size(parallel) * dp if dp else smallest_world(parallel)


def shrink(config: RunConfig, num_layers: int = 4, train_iters: int = 4) -> RunConfig:
    """The recipe's architecture (norms, biases, activation, positions, ties, experts, latents) at width 64, in fp32.

    Vocabulary 257 is no multiple of 128, so padding is exercised; dropout is off, since its draws depend on the layout.
    """
    shape = resolve(config.model, None)
    grouped = shape.num_query_groups < shape.num_attention_heads
    wide_heads = shape.query_size != shape.hidden_size and not shape.multi_latent_attention
    model = dataclasses.replace(
        config.model,
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2 if grouped else 4,
        kv_channels=32 if wide_heads else 16,
        ffn_hidden_size=176,
        seq_length=64,
        vocab_size=None,  # type: ignore[arg-type]  # the tokenizer's
        hidden_dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=max(64, min(shape.max_position_embeddings, 512)),
        **_small_positions(shape, num_layers),
        **_small_latents(shape),
        **_small_experts(shape, num_layers),
        mtp_num_layers=min(shape.mtp_num_layers, 2),
    )
    return dataclasses.replace(
        config,
        model=model,
        run_dir=None,
        nproc=None,
        device="cpu",
        parallel=ParallelConfig(),
        kernels=KernelsConfig(),
        precision=dataclasses.replace(config.precision.without_products(), dtype="fp32", loss_scale=None),
        data=dataclasses.replace(config.data, paths=(), tokenizer="byte"),
        optimizer=dataclasses.replace(
            config.optimizer.plain_state(), lr=3e-3, min_lr=0.0, lr_warmup_iters=0, lr_decay_iters=None
        ),
        train=dataclasses.replace(
            config.train.without_modules_offloaded(),
            train_iters=train_iters,
            exit_interval=None,
            global_batch_size=8,
            micro_batch_size=1,
            rampup_batch_size=None,
            step_batch_size_schedule=None,
            eval_interval=None,
        ),
        checkpoint=CheckpointConfig(),
    )


def _small_positions(shape: GPTShape, num_layers: int) -> dict[str, Any]:
    """Windows and stretched positions that a sequence of 64 tokens reaches beyond."""
    changes: dict[str, Any] = {
        "window_attn_skip_freq": _cut(shape.window_attn_skip_freq, num_layers),
        "no_rope_freq": _cut(shape.no_rope_freq, num_layers),
    }
    if shape.window_size[0] >= 0:
        changes["window_size"] = (min(shape.window_size[0], 10), shape.window_size[1])
    if shape.attention_chunk_size:
        changes["attention_chunk_size"] = min(shape.attention_chunk_size, 12)
    if shape.attn_scale:
        changes["floor_scale"] = min(shape.floor_scale, 8)
    if shape.rope_scaling in ("llama3", "yarn"):
        changes["rope_original_max_position_embeddings"] = 32
    return changes


def _small_latents(shape: GPTShape) -> dict[str, Any]:
    if not shape.multi_latent_attention:
        return {}
    return {
        "q_lora_rank": 32 if shape.q_lora_rank else 0,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    }


def _small_experts(shape: GPTShape, num_layers: int) -> dict[str, Any]:
    """Four experts, or eight in two groups; of a dense-first pattern, one dense block."""
    if not shape.num_moe_experts:
        return {}
    if num_layers == 1 and not shape.moe_blocks[0]:
        raise UserError("--num_layers 1 would leave only the dense block of this mixture of experts. Use 2 or more.")
    groups = 2 if shape.moe_router_num_groups else 0
    return {
        "num_moe_experts": 8 if groups else 4,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": 1 if groups else 0,
        "moe_router_topk": min(shape.moe_router_topk, 2),
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 64 if shape.moe_shared_expert_intermediate_size else 0,
        "moe_layer_freq": _cut(shape.moe_layer_freq, num_layers)
        if shape.moe_blocks[0]
        else f"[0]+[1]*{num_layers - 1}",
    }


def _cut(freq: str, num_layers: int) -> str:
    """A frequency for the first ``num_layers`` blocks; a plain number stays."""
    value = parse_freq(freq)
    if isinstance(value, int):
        return freq
    return str([value[number % len(value)] for number in range(num_layers)])
