"""Fields of Megatron-Bridge's configuration: which flags of Megatron-LM they are, and which change nothing."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program.untrusted import read_text
from tools.from_megatron.flags import Flag, known

_RENAMED = {
    "num_moe_experts": "num-experts", "layernorm_epsilon": "norm-epsilon", "fp8": "fp8-format", "fp4": "fp4-format",
    "seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor", "rope_scaling": "use-rope-scaling",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "path_to_cache": "data-cache-path", "bucket_size": "ddp-bucket-size", "nccl_ub": "use-nccl-ub",
    "average_in_collective": "ddp-average-in-collective", "use_te_rng_tracker": "te-rng-tracker",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p", "num_buckets": "ddp-num-buckets",
    "fully_parallel_save": "ckpt-fully-parallel-save", "fully_parallel_load": "ckpt-fully-parallel-load",
    "overlap_p2p_comm_warmup_flush": "overlap-p2p-communication-warmup-flush", "fp8_param": "fp8-param-gather",
    "fp4_param": "fp4-param-gather", "original_max_position_embeddings": "yarn-original-max-position-embeddings",
    "beta_fast": "yarn-beta-fast", "beta_slow": "yarn-beta-slow", "inter_document_masking":
    "dataloader-inter-document-masking", "reduce_scatter_with_fp32_accumulation":
    "ddp-reduce-scatter-with-fp32-accumulation", "pad_buckets_for_high_nccl_busbw":
    "ddp-pad-buckets-for-high-nccl-busbw",
}  # fmt: skip
OWN_FIELDS = {
    "softmax_scale": "model.softmax_scale",
    "attn_logit_softcapping": "model.attn_logit_softcapping",
    "final_logit_softcapping": "model.final_logit_softcapping",
}
"""Fields of the model that the recipe has and Megatron-LM has no flag for."""
UNLESS = {
    "add_bias_linear": "disable-bias-linear", "masked_softmax_fusion": "no-masked-softmax-fusion",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "bias_dropout_fusion": "no-bias-dropout-fusion", "apply_rope_fusion": "no-rope-fusion",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion", "persist_layer_norm": "no-persist-layer-norm",
    "load_optim": "no-load-optim", "load_rng": "no-load-rng", "save_optim": "no-save-optim", "save_rng": "no-save-rng",
    "fp8_wgrad": "no-fp8-wgrad", "mmap_bin_files": "no-mmap-bin-files",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
}  # fmt: skip
"""Fields whose flag says that they are false."""
NOT_TRAINED = frozenset(
    "model language_model checkpoint ddp dist logger validation comm_overlap profiling model_parallel".split()
)
"""Sections whose fields change how it runs, and not what is trained; of the model's, ``is_of_the_model`` says which."""
_NEUTRAL = frozenset(
    # derived from others, or set by the program
    "lr_warmup_steps lr_decay_steps wd_incr_steps wsd_decay_steps data_parallel_size sequence_parallel_size"
    " token_dtype_code split_matrix mock rank timers user_comm_overlap_cfg hf_model_id hf_model_revision"
    " extra_checkpoint_metadata generation_config builder mtp_enabled tokenizer hf_source_path random_seed"
    # how it runs
    " perform_initialization params_dtype pipeline_dtype autocast_dtype enable_autocast barrier_with_L1_time"
    " batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs variable_seq_lengths parallel_output"
    " scatter_embedding_sequence_parallel cuda_graph_use_single_mempool cuda_graph_retain_backward_graph"
    " disable_parameter_transpose_cache inference_sampling_seed use_inference_optimized_layers tp_only_amax_red"
    " check_for_nan_in_grad check_optimizer_step_success skip_sync_grad_norm_across_mp create_attention_mask"
    " skip_getting_attention_mask_from_dataset data_sharding pin_memory persistent_workers prefetch_factor"
    " storage_writers_per_rank async_write_results_mp_mode strict_fsdp_dtensor_load hf_tokenizer_kwargs"
    " sp_tokenizer_kwargs use_tokenizer_vocab_size external_gpu_device_mapping use_decentralized_pg"
    " enable_megatron_core_experimental log_progress mlflow_log_artifacts chat_template_path"
    " fsdp_all_gather_in_start_param_sync store_param_remainders muon_split_qkv soap_shampoo_beta"
    " soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2"
    " adaptive_muon_eps pin_cpu_grads pin_cpu_params use_transformer_engine_full_layer_spec"
    "".split()
)
"""They change nothing that is trained, whatever they are."""
_FUNCTIONS = frozenset(
    "init_method_normal scaled_init_method_normal normal_ default_layer_spec transformer_engine_layer_spec"
    " transformer_engine_full_layer_spec local_layer_spec get_gpt_layer_with_transformer_engine_spec"
    " get_gpt_layer_local_spec get_gpt_decoder_block_spec get_gpt_decoder_layer_specs".split()
)
"""What init_method and transformer_layer_spec are without being changed."""
_FASTER = (
    "tp_comm", "cpu_offloading", "memory_efficient_layer_norm", "fused_single_qkv_rope", "use_kitchen",
    "hetereogenous_dist_checkpoint", "fp8_dot_product_attention", "fp8_multi_head_attention", "quant_recipe",
    "activation_func_fp8_input_store", "num_microbatches_with_partial_activation_checkpoints", "dense_grouped_gemm",
)  # fmt: skip
"""Beginnings of fields of the model that make it faster, or round otherwise."""


def flag_of(name: str) -> Flag | None:
    """The flag that a field is."""
    return known().get(_RENAMED.get(name, name.replace("_", "-")))


def negative(name: str) -> str | None:
    """The flag that says that a field is false."""
    return next(
        (flag for before in ("no", "disable") if (flag := f"{before}-{name.replace('_', '-')}") in known()), None
    )


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field that no flag means is without effect: unset, megatron-core's default, or one of how it runs."""
    if name in defaults():
        if defaults()[name] == value:
            return True
    elif value in (False, "", 0) or value in ([], {}):
        return True
    return name in _NEUTRAL or name.endswith("_func") or target_of(value).rpartition(".")[2] in _FUNCTIONS


def is_of_the_model(name: str) -> bool:
    """Whether a field of the model's section may make another model."""
    return not name.startswith(_FASTER)


def target_of(value: Any) -> str:
    """What ``{_target_: a.b, ...}`` names; else nothing."""
    return str(value.get("_target_", "")) if isinstance(value, dict) else ""


def shown(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, dict):
        text = target_of(value) or "{" + ", ".join(map(str, value)) + "}"
    else:
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def defaults() -> dict[str, Any]:
    """Defaults of megatron-core's configurations, read from their sources: they are not imported."""
    found: dict[str, Any] = {}
    for path in _sources():
        for node in ast.walk(ast.parse(read_text(path))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                try:
                    found.setdefault(node.target.id, ast.literal_eval(_default(node.value)))
                except ValueError:
                    continue
    return found


def _default(value: ast.expr) -> ast.expr:
    """Of ``field(default=...)``, the default."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return next((each.value for each in keywords if each.arg == "default"), value)


def _sources() -> Iterator[Path]:
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        core = Path(folder) / "core"
        names = (
            "model_parallel_config.py", "transformer/transformer_config.py", "optimizer/optimizer_config.py",
            "distributed/distributed_data_parallel_config.py", "datasets/gpt_dataset.py",
            "datasets/blended_megatron_dataset_config.py",
        )  # fmt: skip
        yield from (core / name for name in names if (core / name).exists())
