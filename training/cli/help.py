"""``--help`` and ``--help_all``: every field with its docstring and the recipe's value."""

import contextlib
import dataclasses
import typing
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from models.shape_fields import declared
from program import printing
from program.flags import field_docs
from training.config.recipe import STAGES, sections
from training.config.run_config import RunConfig

RARE = {
    "parallel": "expert_tensor_parallel_size moe_token_dispatcher_type cp_comm_type ddp_bucket_size "
    "distributed_timeout_minutes pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split "
    "use_distributed_optimizer num_distributed_optimizer_instances",
    "kernels": "off attention_backend tp_comm_overlap cuda_graph_impl",
    "model": "name " + " ".join(name for name, about in declared() if about.use != "common"),
    "precision": "fp8_recipe fp4_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "
    "fp8_param_gather fp8_shadow loss_scale initial_loss_scale "
    "min_loss_scale loss_scale_window hysteresis",
    "data": "cache_dir bucket_cache_gb builtin_vocab_size jsonl_key csv_column eod_token blend_file samples_to_skip "
    "order megatron_train_samples require_manifest allow_data_change stream_count stream_shuffle on_bad_document "
    "max_document_mb max_expansion reset_attention_mask reset_position_ids eod_mask_loss packing transform "
    "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
    "fim_suffix_token fim_pad_token",
    "optimizer": "adam_eps start_weight_decay end_weight_decay weight_decay_incr_style weight_decay_incr_samples "
    "lr_warmup_samples lr_warmup_fraction lr_warmup_init lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples "
    "lr_wsd_decay_style optimizer use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype main_params_dtype "
    "optimizer_cpu_offload optimizer_offload_fraction muon_momentum muon_nesterov muon_num_ns_steps "
    "muon_coefficient_type muon_scale_mode muon_extra_scale_factor muon_split_qkv muon_split_fused "
    "muon_fp32_matmul_prec lr_decay_power decoupled_lr decoupled_min_lr "
    "qk_clip qk_clip_threshold qk_clip_alpha",
    "train": "iterations_to_skip rampup_batch_size step_batch_size_schedule ema_decay average_last averages_on_host "
    "manual_gc_interval sample_prompts sample_interval callbacks loss deterministic_mode "
    "detect_anomaly cross_entropy_chunk_tokens cpu_offloading_num_layers compile "
    "offload_modules",
    "eval": "task_folder interval limit num_fewshot full_pass by_source",
    "checkpoint": "no_load_optim no_load_rng override_opt_param_scheduler save_retain_interval "
    "use_checkpoint_opt_param_scheduler verify bucket_keep",
    "log": "wandb_project wandb_name mlflow mlflow_experiment prometheus names "
    "log_params_norm log_num_zeros_in_grad layer_stats_interval ranks report",
    "fault": "step_timeout_s start_timeout_s failures_per_gpu_hour replica_check_interval watch_interval",
    "profile": "enable_profiling step_start step_end profile_freq ranks use_pytorch_profiler nvtx_ranges "
    "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack record_memory_history "
    "timeline_interval",
}
"""Fields that ``--help`` leaves to ``--help_all``: nearly every run leaves them as they are."""


def show(default: RunConfig, prog: str, everything: bool) -> None:
    """Print the help. everything: with the rare fields."""
    hidden = frozenset[str]() if everything else rare()
    with printing.for_a_reader(), contextlib.suppress(SystemExit):  # tyro's; leaving is the caller's decision
        tyro.cli(
            RunConfig,
            prog=prog,
            args=["--help"],
            default=default,
            description=_description(len(hidden)),
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
            registry=_registry(hidden),
        )


def rare() -> frozenset[str]:
    """The dotted names of RARE."""
    return frozenset(f"{section}.{name}" for section, fields in RARE.items() for name in fields.split())


def _description(hidden: int) -> str:
    paragraphs = [
        "Pretrain a GPT on megatron-core, with tensor, pipeline and data parallelism.",
        "Flags override the recipe, whose values are the defaults shown here.",
        "None unsets a value; lists take several values; a boolean is --flag, --flag true, --flag false or --no-flag.",
    ]
    if hidden:
        paragraphs.append(f"--help_all shows {hidden} more flags, which nearly every run leaves as they are.")
    return "\n\n".join(paragraphs)


def _registry(hidden: frozenset[str]) -> ConstructorRegistry:
    """How tyro sees our dataclasses: as they are, with what is hidden from the help marked so."""
    registry = ConstructorRegistry()
    prefixes = {kind: f"{name}." for name, kind in sections().items()} | {RunConfig: ""}

    @registry.struct_rule
    def _section(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type not in prefixes:
            return None
        prefix, texts = prefixes[info.type], field_docs(info.type)
        fields = tuple(
            StructFieldSpec(
                name=name,
                type=_marked(kind, f"{prefix}{name}", f"{prefix}{name}" in hidden),
                default=getattr(info.default, name),
                helptext=texts.get(name),
            )
            for name, kind in typing.get_type_hints(info.type).items()
            if prefix or name not in STAGES
        )
        return StructConstructorSpec(instantiate=info.type, fields=fields)

    return registry


def _marked(kind: Any, name: str, hidden: bool) -> Any:
    """A field's type for tyro: hidden or not, and with an empty default said in words."""
    if dataclasses.is_dataclass(kind):
        return kind
    from_shape = name.startswith("model.") and name != "model.vocab_size"
    unset = "(default: the shape's)" if from_shape else ""
    hint = tyro.conf.arg(help_behavior_hint=lambda text: {"None": unset, "": ""}.get(text, f"(default: {text})"))
    return Annotated[kind, hint, tyro.conf.Suppress] if hidden else Annotated[kind, hint]
