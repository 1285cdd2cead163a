"""What Megatron-LM restores of a run besides tensors: its arguments, and its scheduler's state.

Megatron-LM core_r0.19.0, megatron/training/checkpointing.py (load_checkpoint, check_checkpoint_args,
load_args_from_checkpoint) and megatron/core/optimizer_param_scheduler.py (state_dict, load_state_dict).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.costs.flops import flops_per_token
from models.shape_fields import declared
from models.shapes import GPTShape
from models.sublayers import hybrid_layer_pattern, num_sublayers
from parallel.stages import layers_per_chunk
from tools.reshard.megatron.known import JOB
from tools.reshard.options import ReshardOptions
from training.checkpoint.schedule_entry import ENTRY as SCHEDULE
from training.checkpoint.schedule_entry import entry_of, schedule_problems
from training.checkpoint.state import JSON, State
from training.config.lr_schedule import Schedule
from training.config.run_config import RunConfig
from training.config.schedules import learning_schedule
from training.progress import Progress

ARGS, SCHEDULER = "megatron_args", "megatron_opt_param_scheduler"
"""Entries of our state that keep what a Megatron checkpoint said."""

_SHAPE = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization",
    "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "attention_dropout", "hidden_dropout",
    "norm_epsilon", "make_vocab_size_divisible_by",
)  # fmt: skip
"""Fields of a model that have Megatron-LM's names and values."""

_WHERE_SET = (
    "softmax_type", "activation_func_clamp_value", "glu_linear_offset", "qk_l2_norm", "moe_shared_expert_gate",
    "moe_apply_probs_on_input",
)  # fmt: skip
"""Likewise; said only where they are not what every other model has."""

_OF_EXPERTS = (
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
)  # fmt: skip

_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

_OF_OPTIMIZER = (
    "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init",
    "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style",
    "weight_decay", "weight_decay_incr_style", "decoupled_lr", "decoupled_min_lr",
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
)  # fmt: skip


_OF_SCHEDULER = {
    "max_lr": "lr", "min_lr": "min_lr", "lr_warmup_steps": "warmup_samples", "lr_decay_style": "lr_decay_style",
    "lr_decay_steps": "decay_samples", "start_wd": "start_weight_decay", "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style", "wd_incr_steps": "weight_decay_samples",
}  # fmt: skip
"""What Megatron-LM's scheduler saves, and our schedule's field."""


def arguments(
    config: RunConfig, shape: GPTShape, progress: Progress, options: ReshardOptions, rows: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of ``args``. rows: of the vocabulary. known: what a Megatron checkpoint said, which stays but for
    what is now otherwise.

    Left out, for they are the loading run's own affair: add_position_embedding (the deprecated
    --no-position-embedding of a model that has none anyway) and paths.
    """
    trained = {
        "seq_length": config.model.seq_length,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "train_iters": config.train.train_iters,
        "seed": config.train.seed,
        "fp16": config.precision.dtype == "fp16",
        "bf16": config.precision.dtype == "bf16",
        "tokenizer_type": _tokenizer_type(config.data.tokenizer),
        **{name: getattr(config.optimizer, name) for name in _OF_OPTIMIZER},
    }
    return {
        **trained,
        **known,
        **_model(shape),
        **_depth(shape, options),
        "padded_vocab_size": rows,
        **_job(options),
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_samples,
        "skipped_train_samples": int(known.get("skipped_train_samples") or 0),
        "consumed_valid_samples": int(known.get("consumed_valid_samples") or 0),
        "no_save_optim": options.drop_optimizer,
        "no_save_rng": True,
    }


def problems(shape: GPTShape) -> list[str]:
    """What of a model Megatron-LM has no argument for: it would load these weights into another model."""
    usual = {field.name: field.default for field in dataclasses.fields(GPTShape)}
    names = [name for name, about in declared() if not about.megatron_lm and getattr(shape, name) != usual[name]]
    found = [f"model.{name} = {getattr(shape, name)!r}" for name in names]
    if shape.num_moe_experts and shape.moe_router_enable_expert_bias and shape.moe_router_score_function == "softmax":
        found.append("model.moe_router_enable_expert_bias with softmax scores")
    if not float(shape.rotary_base).is_integer():
        found.append(f"model.rotary_base = {shape.rotary_base!r}, no whole number")
    if shape.qk_l2_norm and any(shape.no_rope_blocks):
        found.append("model.qk_l2_norm in blocks with RoPE only")
    return found


def _model(shape: GPTShape) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(shape, name) for name in _SHAPE} | {"rotary_base": int(shape.rotary_base)}
    usual = {field.name: field.default for field in dataclasses.fields(GPTShape)}
    found |= {name: value for name in _WHERE_SET if (value := getattr(shape, name)) != usual[name]}
    found |= {
        "group_query_attention": shape.num_query_groups != shape.num_attention_heads,
        "use_rotary_position_embeddings": shape.position_embedding_type == "rope",
        "swiglu": shape.activation == "swiglu",
        "squared_relu": shape.activation == "squared_relu",
        **({"quick_geglu": True} if shape.activation == "quick_geglu" else {}),
        "multi_latent_attention": shape.multi_latent_attention,
        "mtp_num_layers": shape.mtp_num_layers or None,
        "num_experts": shape.num_moe_experts or None,
    }
    if shape.num_moe_experts:
        found |= {name: getattr(shape, name) for name in _OF_EXPERTS}
        found["moe_layer_freq"] = [int(is_moe) for is_moe in shape.moe_blocks]
        found["moe_ffn_hidden_size"] = shape.expert_ffn_hidden_size
        found["moe_shared_expert_intermediate_size"] = shape.moe_shared_expert_intermediate_size or None
    if shape.multi_latent_attention:
        found |= {name: getattr(shape, name) for name in _OF_LATENTS}
        found["q_lora_rank"] = shape.q_lora_rank or None
    return found


def _depth(shape: GPTShape, options: ReshardOptions) -> dict[str, Any]:
    """Megatron-LM takes a checkpoint for HybridModel's where, and only where, it has a pattern of layers; it counts
    two layers for each block then."""
    if options.keys != "per_layer":
        return {"num_layers": shape.num_layers, "hybrid_layer_pattern": None}
    pattern = hybrid_layer_pattern(shape, layers_per_chunk(options.job.parallel, shape.num_layers))
    return {"num_layers": num_sublayers(shape), "hybrid_layer_pattern": pattern}


def _job(options: ReshardOptions) -> dict[str, Any]:
    layout, job = options.job.layout, options.job
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": job.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "data_parallel_size": layout.dp,
        "world_size": layout.world_size,
        "transformer_impl": job.transformer_impl,
        "moe_grouped_gemm": job.moe_grouped_gemm,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": job.optimizer_format == "fully_reshardable",
        "ckpt_format": "torch_dist",
        JOB: dataclasses.asdict(job),
    }


def _tokenizer_type(tokenizer: str) -> str:
    """Megatron-LM compares it in runs with --vocab-file."""
    if tokenizer == "byte":
        return "NullTokenizer"
    return "SentencePieceTokenizer" if tokenizer.endswith(".model") else "HuggingFaceTokenizer"


def with_schedule(state: State, config: RunConfig) -> State:
    """The state with the schedule that Megatron-LM would go on with, as our own checkpoints keep it.

    Of WSD's last part its scheduler saves nothing: that is the recipe's. Without numbers that can be one, none is kept.
    """
    said = state.entries.get(SCHEDULER)
    recipe = learning_schedule(config.optimizer, config.train, config.model.seq_length)
    if not isinstance(said, dict):
        return state
    theirs = {ours: said.get(name) for name, ours in _OF_SCHEDULER.items()}
    consumed, steps = state.progress.consumed_samples, said.get("num_steps")
    if isinstance(steps, int) and 0 <= steps <= consumed:
        theirs["waited_samples"] = consumed - steps  # of updates that it skipped
    kept: dict[str, JSON] = {SCHEDULE: entry_of(recipe) | theirs}
    return state if schedule_problems(kept) else dataclasses.replace(state, entries={**state.entries, **kept})


def scheduler(
    config: RunConfig, progress: Progress, known: Mapping[str, Any] | None, kept: Schedule | None
) -> dict[str, Any]:
    """``opt_param_scheduler``: lengths in samples, which Megatron-LM compares with those of its own command line
    unless --use-checkpoint-opt-param-scheduler or --override-opt-param-scheduler is given.

    known: what a Megatron checkpoint said, if anything. kept: the schedule of our own; None: of the configuration.
    """
    if kept is None and known:
        return {**known, "num_steps": progress.consumed_samples}
    curve = kept or learning_schedule(config.optimizer, config.train, config.model.seq_length)
    entry = entry_of(curve)
    ours = {theirs: entry[name] for theirs, name in _OF_SCHEDULER.items()}
    # Megatron has no curve that begins later: its count begins with ours
    return {**(known or {}), **ours, "num_steps": curve.samples_on(progress.consumed_samples)}


def operations(config: RunConfig, shape: GPTShape, progress: Progress) -> float:
    """Floating-point operations so far, by our own count: Megatron-LM goes on counting from there."""
    return flops_per_token(shape, config.model.seq_length) * config.model.seq_length * progress.consumed_samples
