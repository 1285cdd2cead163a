"""Flags of Megatron-LM that become fields of a recipe, with Megatron-LM's defaults where ours may differ.

Defaults are those of Megatron-LM 0.19.2's argument parser; None: left out unless given, as with Megatron-LM itself.
"""

from models.kernels import FusionName

Default = int | float | str | None

FIELDS: dict[str, tuple[str, Default]] = {
    "tensor-model-parallel-size": ("parallel.tensor_model_parallel_size", 1),
    "pipeline-model-parallel-size": ("parallel.pipeline_model_parallel_size", 1),
    "context-parallel-size": ("parallel.context_parallel_size", 1),
    "expert-model-parallel-size": ("parallel.expert_model_parallel_size", 1),
    "expert-tensor-parallel-size": ("parallel.expert_tensor_parallel_size", None),
    "decoder-first-pipeline-num-layers": ("parallel.num_layers_in_first_pipeline_stage", None),
    "decoder-last-pipeline-num-layers": ("parallel.num_layers_in_last_pipeline_stage", None),
    "pipeline-model-parallel-layout": ("parallel.pipeline_model_parallel_layout", None),
    "ddp-bucket-size": ("parallel.ddp_bucket_size", None),
    "distributed-timeout-minutes": ("parallel.distributed_timeout_minutes", 10.0),
    "num-attention-heads": ("model.num_attention_heads", None),
    "normalization": ("model.normalization", "LayerNorm"),
    "rotary-base": ("model.rotary_base", 10000),
    "rotary-percent": ("model.rotary_percent", 1.0),
    "hidden-dropout": ("model.hidden_dropout", 0.1),
    "attention-dropout": ("model.attention_dropout", 0.1),
    "init-method-std": ("model.init_method_std", 0.02),
    "softmax-type": ("model.softmax_type", "vanilla"),
    "glu-linear-offset": ("model.glu_linear_offset", 0.0),
    "activation-func-clamp-value": ("model.activation_func_clamp_value", None),
    "fp8-format": ("precision.fp8", None),
    "fp4-format": ("precision.fp4", None),
    "num-layers-at-start-in-bf16": ("precision.num_layers_at_start_in_bf16", None),
    "num-layers-at-end-in-bf16": ("precision.num_layers_at_end_in_bf16", None),
    "loss-scale": ("precision.loss_scale", None),
    "initial-loss-scale": ("precision.initial_loss_scale", None),  # Megatron-LM's 2^32 only skips iterations here
    "min-loss-scale": ("precision.min_loss_scale", 1.0),
    "loss-scale-window": ("precision.loss_scale_window", 1000),
    "hysteresis": ("precision.hysteresis", 2),
    "lr": ("optimizer.lr", None),
    "min-lr": ("optimizer.min_lr", 0.0),
    "decoupled-lr": ("optimizer.decoupled_lr", None),
    "decoupled-min-lr": ("optimizer.decoupled_min_lr", None),
    "cpu-offloading-num-layers": ("train.cpu_offloading_num_layers", 0),
    "lr-warmup-init": ("optimizer.lr_warmup_init", None),
    "lr-decay-style": ("optimizer.lr_decay_style", "linear"),
    "lr-wsd-decay-style": ("optimizer.lr_wsd_decay_style", "exponential"),
    "weight-decay": ("optimizer.weight_decay", 0.01),
    "start-weight-decay": ("optimizer.start_weight_decay", None),
    "end-weight-decay": ("optimizer.end_weight_decay", None),
    "weight-decay-incr-style": ("optimizer.weight_decay_incr_style", "constant"),
    "adam-beta1": ("optimizer.adam_beta1", 0.9),
    "adam-beta2": ("optimizer.adam_beta2", 0.999),
    "adam-eps": ("optimizer.adam_eps", 1e-8),
    "clip-grad": ("optimizer.clip_grad", 1.0),
    "exp-avg-dtype": ("optimizer.exp_avg_dtype", "fp32"),
    "exp-avg-sq-dtype": ("optimizer.exp_avg_sq_dtype", "fp32"),
    "main-params-dtype": ("optimizer.main_params_dtype", "fp32"),
    "optimizer-offload-fraction": ("optimizer.optimizer_offload_fraction", 1.0),
    "micro-batch-size": ("train.micro_batch_size", None),
    "seed": ("train.seed", 1234),
    "exit-interval": ("train.exit_interval", None),
    "eval-interval": ("train.eval_interval", None),
    "eval-iters": ("train.eval_iters", 100),
    "log-interval": ("log.log_interval", 100),
    "check-weight-hash-across-dp-replicas-interval": ("fault.replica_check_interval", None),
}
"""One value of a flag, as it stands, is one field of the recipe."""

EXPERT_FIELDS: dict[str, tuple[str, Default]] = {
    "moe-layer-freq": ("model.moe_layer_freq", "1"),
    "moe-ffn-hidden-size": ("model.moe_ffn_hidden_size", 0),
    "moe-shared-expert-intermediate-size": ("model.moe_shared_expert_intermediate_size", 0),
    "moe-router-topk": ("model.moe_router_topk", 2),
    "moe-router-score-function": ("model.moe_router_score_function", "softmax"),
    "moe-router-num-groups": ("model.moe_router_num_groups", 0),
    "moe-router-group-topk": ("model.moe_router_group_topk", 0),
    "moe-router-topk-scaling-factor": ("model.moe_router_topk_scaling_factor", 1.0),
    "moe-router-bias-update-rate": ("model.moe_router_bias_update_rate", 1e-3),
    "moe-z-loss-coeff": ("model.moe_z_loss_coeff", 0.0),
    "moe-expert-capacity-factor": ("model.moe_expert_capacity_factor", 0.0),
    "moe-token-drop-policy": ("model.moe_token_drop_policy", "probs"),
    "moe-token-dispatcher-type": ("parallel.moe_token_dispatcher_type", "allgather"),
}
"""Fields that mean something with --num-experts only."""

MAMBA_FIELDS: dict[str, tuple[str, Default]] = {
    "mamba-state-dim": ("model.mamba_state_dim", 128),
    "mamba-head-dim": ("model.mamba_head_dim", 64),
    "mamba-num-groups": ("model.mamba_num_groups", 8),
    "mamba-num-heads": ("model.mamba_num_heads", None),
}
"""Fields that mean something with --hybrid-layer-pattern only."""

LINEAR_FIELDS: dict[str, tuple[str, Default]] = {
    "linear-key-head-dim": ("model.linear_key_head_dim", 128),
    "linear-value-head-dim": ("model.linear_value_head_dim", 128),
    "linear-num-key-heads": ("model.linear_num_key_heads", 16),
    "linear-num-value-heads": ("model.linear_num_value_heads", 32),
}
"""Fields that mean something with --experimental-attention-variant gated_delta_net only."""

MUON_FIELDS: dict[str, tuple[str, Default]] = {
    "muon-momentum": ("optimizer.muon_momentum", 0.95),
    "muon-num-ns-steps": ("optimizer.muon_num_ns_steps", 5),
    "muon-scale-mode": ("optimizer.muon_scale_mode", "spectral"),
    "muon-extra-scale-factor": ("optimizer.muon_extra_scale_factor", 1.0),
    "muon-coefficient-type": ("optimizer.muon_coefficient_type", "quintic"),
    "muon-fp32-matmul-prec": ("optimizer.muon_fp32_matmul_prec", "medium"),
}
"""Fields that mean something with --optimizer muon only."""
MUON_FLAGS = (
    *MUON_FIELDS, "muon-no-split-qkv", "muon-nesterov", "muon-use-nesterov", "muon-tp-mode", "muon-scalar-optimizer",
    "muon-use-syrk",
)  # fmt: skip

QK_CLIP_FIELDS: dict[str, tuple[str, Default]] = {
    "qk-clip-alpha": ("optimizer.qk_clip_alpha", 0.5),
    "qk-clip-threshold": ("optimizer.qk_clip_threshold", 100.0),
}
"""Fields that mean something with --qk-clip only."""

FIM_FIELDS: dict[str, tuple[str, Default]] = {
    "fim-rate": ("data.fim_rate", 0.5),
    "fim-spm-rate": ("data.fim_spm_rate", 0.5),
    "fim-prefix-token": ("data.fim_prefix_token", "<fim_prefix>"),
    "fim-middle-token": ("data.fim_middle_token", "<fim_middle>"),
    "fim-suffix-token": ("data.fim_suffix_token", "<fim_suffix>"),
    "fim-pad-token": ("data.fim_pad_token", "<fim_pad>"),
    "fim-split-sample": ("data.fim_split_sample", None),
    "fim-fragment-rate": ("data.fim_fragment_rate", None),
    "fim-no-prefix": ("data.fim_no_prefix", None),
}
"""Fields that mean something with --fim-data only."""

MUP_FIELDS: dict[str, tuple[str, Default]] = {
    "mup-base-hidden-size": ("model.mup_base_hidden_size", None),
    "mup-embedding-mult": ("model.mup_embedding_mult", 1.0),
    "mup-output-mult": ("model.mup_output_mult", 1.0),
    "mup-base-head-dim": ("model.mup_base_head_dim", None),
    "mup-attn-scale-power": ("model.mup_attn_scale_power", 1.0),
}
"""Fields that mean something with --use-mup only."""

LATENT_FIELDS: dict[str, tuple[str, Default]] = {
    "q-lora-rank": ("model.q_lora_rank", 0),
    "kv-lora-rank": ("model.kv_lora_rank", 32),
    "qk-head-dim": ("model.qk_head_dim", 128),
    "qk-pos-emb-head-dim": ("model.qk_pos_emb_head_dim", 64),
    "v-head-dim": ("model.v_head_dim", 128),
    "mscale": ("model.mscale", 1.0),
    "mscale-all-dim": ("model.mscale_all_dim", 0.0),
}
"""Fields that mean something with --multi-latent-attention only."""

PREDICTION_FIELDS: dict[str, tuple[str, Default]] = {"mtp-loss-scaling-factor": ("model.mtp_loss_scaling_factor", 0.1)}
"""Fields that mean something with --mtp-num-layers only."""

SWITCHES: dict[str, tuple[str, bool]] = {
    "account-for-embedding-in-pipeline-split": ("parallel.account_for_embedding_in_pipeline_split", True),
    "account-for-loss-in-pipeline-split": ("parallel.account_for_loss_in_pipeline_split", True),
    "use-distributed-optimizer": ("parallel.use_distributed_optimizer", True),
    "overlap-grad-reduce": ("parallel.overlap_grad_reduce", True),
    "overlap-param-gather": ("parallel.overlap_param_gather", True),
    "tp-comm-overlap": ("kernels.tp_comm_overlap", True),
    "disable-bias-linear": ("model.add_bias_linear", False),
    "add-qkv-bias": ("model.add_qkv_bias", True),
    "qk-layernorm": ("model.qk_layernorm", True),
    "qk-l2-norm": ("model.qk_l2_norm", True),
    "attention-output-gate": ("model.attention_output_gate", True),
    "apply-layernorm-1p": ("model.layernorm_zero_centered_gamma", True),
    "no-yarn-correction-range-round-to-int": ("model.yarn_correction_range_round_to_int", False),
    "rotary-interleaved": ("model.rotary_interleaved", True),
    "untie-embeddings-and-output-weights": ("model.untie_embeddings_and_output_weights", True),
    "multi-latent-attention": ("model.multi_latent_attention", True),
    "eod-mask-loss": ("data.eod_mask_loss", True),
    "first-last-layers-bf16": ("precision.first_last_layers_bf16", True),
    "use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer", True),
    "optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload", True),
    "log-params-norm": ("log.log_params_norm", True),
    "log-num-zeros-in-grad": ("log.log_num_zeros_in_grad", True),
    "deterministic-mode": ("train.deterministic_mode", True),
}
"""A flag without a value sets a field to this, and its absence to the contrary."""

EXPERT_SWITCHES: dict[str, tuple[str, bool]] = {
    "moe-router-pre-softmax": ("model.moe_router_pre_softmax", True),
    "moe-router-enable-expert-bias": ("model.moe_router_enable_expert_bias", True),
    "moe-apply-probs-on-input": ("model.moe_apply_probs_on_input", True),
    "moe-shared-expert-gate": ("model.moe_shared_expert_gate", True),
    "moe-pad-expert-input-to-capacity": ("model.moe_pad_expert_input_to_capacity", True),
}
"""Switches that mean something with --num-experts only."""

KERNELS_OFF: dict[str, FusionName] = {
    "no-bias-swiglu-fusion": "bias_activation_fusion",
    "no-rope-fusion": "apply_rope_fusion",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
}
"""A switch puts a fusion into kernels.off."""

KERNELS_ON: dict[str, FusionName] = {
    "cross-entropy-loss-fusion": "cross_entropy_loss_fusion",
    "moe-grouped-gemm": "moe_grouped_gemm",
    "moe-permute-fusion": "moe_permute_fusion",
    "moe-router-fusion": "moe_router_fusion",
    "moe-shared-expert-overlap": "moe_shared_expert_overlap",
}
"""A switch asks for what Triplane does wherever it can run; left out of kernels.off."""

MEGATRON_FIELDS: dict[str, dict[str, str]] = {
    "model.megatron": {
        "min-offloaded-tensor-size=1": "min_offloaded_tensor_size",
        "activation-offload-fraction=1": "activation_offload_fraction",
        "delta-offload-bytes-across-pp-ranks=1": "delta_offload_bytes_across_pp_ranks",
        "cuda-graph-warmup-steps=1": "cuda_graph_warmup_steps",
        "fp8-margin=1": "fp8_margin",
        "fp8-interval=1": "fp8_interval",
        "fp8-amax-history-len=1": "fp8_amax_history_len",
        "fp8-amax-compute-algo=1": "fp8_amax_compute_algo",
        "no-fp8-wgrad": "fp8_wgrad=False",
        "disable-fp8-wgrad": "fp8_wgrad=False",
        "microbatch-group-size-per-virtual-pipeline-stage=1": "microbatch_group_size_per_vp_stage",
        "moe-input-jitter-eps=1": "moe_input_jitter_eps",
        "moe-router-force-load-balancing": "moe_router_force_load_balancing=True",
        "moe-enable-deepep": "moe_enable_deepep=True",
        "moe-flex-dispatcher-backend=1": "moe_flex_dispatcher_backend",
        "moe-deepep-num-sms=1": "moe_deepep_num_sms",
        "moe-router-padding-for-fp8": "moe_router_padding_for_fp8=True",
        "moe-router-padding-for-quantization": "moe_router_padding_for_quantization=True",
    },
    "parallel.megatron": {"use-nccl-ub": "nccl_ub=True", "use-sharp": "use_sharp=True"},
    "optimizer.megatron": {"overlap-cpu-optimizer-d2h-h2d": "overlap_cpu_optimizer_d2h_h2d=True"},
}
"""What megatron-core takes by this name, by the list that hands it through; left out unless given."""

RULES = """
    num-layers=1 encoder-num-layers=1 hidden-size=1 ffn-hidden-size=1 kv-channels=1 seq-length=1 encoder-seq-length=1
    group-query-attention num-query-groups=1 max-position-embeddings=1 norm-epsilon=1 layernorm-epsilon=1
    swiglu squared-relu quick-geglu openai-gelu no-bias-gelu-fusion
    position-embedding-type=1 no-position-embedding use-rotary-position-embeddings rotary-seq-len-interpolation-factor=1
    use-rope-scaling rope-scaling-factor=1 rotary-scaling-factor=1 rope-type=1 no-rope-freq=1
    yarn-original-max-position-embeddings=1 yarn-beta-fast=1 yarn-beta-slow=1
    window-size=1 window-attn-skip-freq=1
    hybrid-layer-pattern=1 hybrid-override-pattern=1 experimental-attention-variant=1
    linear-attention-freq=1 linear-conv-kernel-dim=1 use-mup qk-clip
    num-experts=1 moe-router-load-balancing-type=+ moe-aux-loss-coeff=+ mtp-num-layers=1
    vocab-size=1 padded-vocab-size=1 make-vocab-size-divisible-by=1 no-pad-vocab-size disable-pad-vocab-size
    vocab-file=1 merge-file=1
    sequence-parallel num-layers-per-virtual-pipeline-stage=1 num-virtual-stages-per-pipeline-rank=1 cp-comm-type=+
    high-priority-stream-groups=+ use-megatron-fsdp use-custom-fsdp use-torch-fsdp2
    torch-fsdp2-no-reshard-after-forward data-parallel-sharding-strategy=1 num-distributed-optimizer-instances=1
    bf16 fp16 fp8-recipe=1 fp8-param-gather fp4-recipe=1 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32
    train-iters=1 train-samples=1 global-batch-size=1 rampup-batch-size=3 step-batch-size-schedule=1
    lr-decay-iters=1 lr-decay-samples=1 lr-warmup-iters=1 lr-warmup-samples=1 lr-warmup-fraction=1
    lr-wsd-decay-iters=1 lr-wsd-decay-samples=1 iterations-to-skip=+
    optimizer=1 muon-no-split-qkv muon-nesterov muon-use-nesterov muon-tp-mode=1 muon-scalar-optimizer=1 muon-use-syrk
    recompute-activations recompute-granularity=1 recompute-method=1 recompute-num-layers=1 recompute-modules=+
    fine-grained-activation-offloading offload-modules=+ manual-gc manual-gc-interval=1
    attention-backend=1 enable-cuda-graph cuda-graph-impl=1
    data-path=* data-args-path=1 mock-data split=1 tokenizer-type=1 tokenizer-model=1
    reset-position-ids reset-attention-mask fim-data fim-eod-token=1
    save=1 load=1 pretrained-checkpoint=1 save-interval=1 persistent-save-interval=1 finetune no-load-optim no-load-rng
    save-retain-interval=1
    override-opt_param-scheduler override-opt-param-scheduler
    use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler
    tensorboard-dir=1 wandb-project=1 wandb-exp-name=1
    profile profile-step-start=1 profile-step-end=1 profile-ranks=+ use-pytorch-profiler
    pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack record-shapes nvtx-ranges record-memory-history
"""
"""Flags that ``rules_*`` read, since several together, or a default of Megatron-LM's, make a field."""
