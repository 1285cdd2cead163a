"""Fields of megatron-core's TransformerConfig that model.megatron does not take."""

from models.shape_fields import MEGATRON_NAMES, declared

RECOMPUTED_BY_TRANSFORMER_ENGINE = frozenset({"moe_act", "layernorm", "mla_up_proj"})
"""Modules of train.recompute "selective" that megatron-core recomputes in Transformer Engine's modules only."""
UNSUPPORTED = {
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "CUDA graphs are kernels.cuda_graph_impl"),
    **dict.fromkeys(
        ("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
        "HybridModel ignores it; train.cpu_offloading_num_layers offloads activations",
    ),
    "delay_offload_until_cuda_graph": "train.offload_modules cannot be with CUDA graphs",
    **dict.fromkeys(
        ("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
        "QK-clip, which logs the largest logit too, is optimizer.qk_clip",
    ),
    "masked_softmax_fusion": "it is of megatron-core's own attention, which no model here is made of",
}
"""Fields of mcore's that would fail late, or change nothing."""

OWNED = frozenset(f"""
    {" ".join(MEGATRON_NAMES.values())} {" ".join(name for name, _ in declared())}
    activation_func gated_linear_unit
    init_method output_layer_init_method embedding_init_method embedding_init_method_std perform_initialization
    use_cpu_initialization is_hybrid_model rope_type linear_conv_kernel_dim experimental_attention_variant
    mtp_use_repeated_layer mtp_hybrid_override_pattern moe_router_topk_limited_devices moe_router_dtype
    moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion moe_router_fusion moe_shared_expert_overlap
    bias_activation_fusion apply_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
    gradient_accumulation_fusion attention_backend deterministic_mode tp_comm_overlap
    cuda_graph_impl cuda_graph_modules cuda_graph_scope
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel cp_comm_type
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs variable_seq_lengths
    params_dtype pipeline_dtype bf16 fp16 fp8 fp8_recipe fp8_param fp4 fp4_recipe autocast_dtype enable_autocast
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
    fine_grained_activation_offloading offload_modules
    calculate_per_token_loss finalize_model_grads_func
    grad_scale_func moe_grad_scale_func grad_sync_func no_sync_func param_sync_func
""".split())  # fmt: skip
"""Fields of mcore's TransformerConfig that Triplane's own fields set, whose change our own initial weights, schedule
or checkpoints would not follow, or that would be silently wrong: integer frequencies count sublayers, the
native fused cross entropy rounds its gradient to bf16."""
