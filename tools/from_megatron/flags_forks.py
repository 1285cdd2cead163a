"""Flags of forks and older versions of Megatron-LM: Megatron-DeepSpeed, MindSpeed, Pai-Megatron-Patch, bigscience.

Written as in ``flags``. A flag that stands nowhere may change what is trained, and is refused as not understood.
"""

IRRELEVANT_OF_FORKS: dict[str, str] = {
    "a fork's choice of kernel or launch: the same function, other rounding at most": """
        use-fused-swiglu use-fused-rmsnorm use-fused-rotary-pos-emb use-fused-ring-attention-update
        use-fused-moe-token-permute-and-unpermute use-fusion-attn-v2 shape-order=1 gemm-gradient-accumulation-fusion
        mla-fa-without-pad use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder use-te
        npu-deterministic ai-framework=1 no-query-key-layer-scaling
        abort-on-unmet-fused-kernel-constraints hccl-op-mode=1
    """,
    "how a fork communicates or overlaps it; results do not depend on it": """
        context-parallel-algo=1 use-cp-send-recv-overlap ulysses-degree-in-cp=1 use-ulysses-allgather-kv
        cp-window-size=1 kv-head-repeat-before-uly-alltoall moe-permutation-async-comm moe-alltoall-overlap-comm
        moe-allgather-overlap-comm use-ascend-mc2 use-ascend-coc coc-fused-kernel coc-parallel-num=1
        disable-gloo-group hccl-group-buffer-adaptive enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs
        enable-backward-overlap-ag-with-matmul DDP-impl=1 no-shared-storage no-pipeline-parallel
        variable-seq-lengths use-multiparameter-pipeline-model-parallel create-moe-param-group
    """,
    "text is tokenised beforehand or on first use; training reads ids": """
        tokenizer-not-use-fast handler-name=1 dataset-impl=1
    """,
    "read by conversions of checkpoints only": """
        model-type-hf=1 hf-cfg-dir=1 mg-save-dir=1 load-model-type=1 save-model-type=1
    """,
    "logs and diagnostics of a fork, which change nothing that is trained": """
        log-level=1 log-level-replica=1 codecarbon-dir=1 profile-level=1
        profile-with-cpu profile-with-stack profile-with-memory profile-record-shapes profile-save-path=1
        profile-backward op-cal-tflops kill-switch-path=1 trigger-path=1 enable-high-availability enable-hbmfault-repair
    """,
}

UNSUPPORTED_OF_FORKS: dict[str, str] = {
    "a fork's way to be faster or smaller; what is trained is the same without it": """
        reuse-fp32-param swap-attention swap-modules=1 swap-optimizer swap-optimizer-times=1
        recompute-activation-function recompute-activation-function-num-layers=1 recompute-norm
        recompute-norm-num-layers=1 recompute-in-advance recompute-in-bubble enable-recompute-layers-per-pp-rank
        recompute-mla-up-proj moe-zero-memory=1 moe-zero-memory-num-layers=1 mla-mm-split mla-up-proj-tp-overlap
        mla-swap-core-attn-out mtp-mem-efficient-logits loss-compute-mode=1 loss-chunk-size=1 moe-fb-overlap
        schedules-method=1 moe-tp-extend-ep tp-2d tp-x=1 tp-y=1 num-layer-list=1 pp-partition-method=1
        activations-checkpoint-method=1 activations-checkpoint-num-layers=1 deepspeed-activation-checkpointing
        partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer
        cpu-optimizer cpu_torch_adam enable-zbh1-pipeline
    """,
    "DeepSpeed's; what shards here is parallel.use_distributed_optimizer and its like": """
        deepspeed zero-stage=1 zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size=1
        zero-allgather-bucket-size=1 ds-sequence-parallel-size=1 ds-sequence-parallel-fpdt
        ds-sequence-parallel-fpdt-chunk-size=1 ds-sequence-parallel-fpdt-offloading universal-checkpoint
    """,
}

OTHER_MODEL_OF_FORKS: dict[str, str] = {
    "DeepSpeed's file may set clipping, precision, batch and a curriculum: say those by flags, and leave it out": """
        deepspeed_config=1
    """,
    "lengths in tokens: give --train-samples, --lr-decay-samples, --lr-warmup-samples, each tokens / --seq-length": """
        train-tokens=1 lr-decay-tokens=1 lr-warmup-tokens=1
    """,
    "layers that are left empty: take them out of --num-layers, and out of lists of layers": """
        noop-layers=1
    """,
    "another mask than the causal one": """
        attention-mask-type=1|causal cp-attention-mask-type=1|causal
    """,
    "another optimizer than AdamW: optimizer.optimizer takes a class of yours": """
        optimizer-selection=1|fused_adamw
    """,
    "rows beside the tokenizer's ids: give --padded-vocab-size, the rows in all": """
        extra-vocab-size=1
    """,
    "DeepSpeed's experts, whose gate and losses are others than Megatron-LM's": """
        moe-loss-coeff=1 moe-train-capacity-factor=1 moe-eval-capacity-factor=1 moe-min-capacity=1 mlp-type=1|standard
        disable-moe-token-dropping moe-expert-parallel-size=1 topk=1 use-tutel
    """,
    "another training than on next tokens: instructions, preferences, distillation, adapters": """
        stage=1 is-instruction-dataset is-pairwise-dataset prompt-type=1 neat-pack dpo-loss-type=1 lora-r=1
        lora-alpha=1 lora-target-modules=+ lora-load=1 lora-fusion kd load-teacher=1 loss-on-targets-only
    """,
    "weights of a Hugging Face folder are loaded first: python -m tools.convert import makes a checkpoint of them": """
        enable-hf2mg-convert
    """,
    "lists of data with weights and ranges in a fork's own form: give --data-path": """
        data-file-list=1 train-weighted-split-paths=+ valid-weighted-split-paths=+ test-weighted-split-paths=+
        train-weighted-split-paths-path=1 valid-weighted-split-paths-path=1 test-weighted-split-paths-path=1
    """,
}

RENAMED: dict[str, str] = {
    "rotary-position-embeddings-theta": "rotary-base",
    "tokenizer-name-or-path": "tokenizer-model",
    "pad-vocab-size-to": "padded-vocab-size",
    "moe-intermediate-size": "moe-ffn-hidden-size",
    "n-group": "moe-router-num-groups",
    "topk-group": "moe-router-group-topk",
    "routed-scaling-factor": "moe-router-topk-scaling-factor",
}
"""One value, which Megatron-LM has under another name."""

RESPELLED: dict[str, str] = {
    "num-key-value-heads=1": "`--group-query-attention --num-query-groups`",
    "fp8-hybrid": "`--fp8-format hybrid`",
    "fp8-e4m3": "`--fp8-format e4m3`",
    "multi-head-latent-attention": "`--multi-latent-attention`",
    "n-shared-experts=1": "`--moe-shared-expert-intermediate-size`, that many times `--moe-ffn-hidden-size`",
    "first-k-dense-replace=1": "`--moe-layer-freq`, a list that begins with so many zeros",
}
"""What Megatron-LM says by other flags, as people may read it; ``spellings`` makes them."""

FIELDS_OF_FORKS: dict[str, tuple[str, None]] = {
    "attn-logit-softcapping": ("model.attn_logit_softcapping", None),
    "output-logit-softcapping": ("model.final_logit_softcapping", None),
    "final-logit-softcapping": ("model.final_logit_softcapping", None),
}
"""One value, which is one field of the recipe and no flag of Megatron-LM's."""

RULES_OF_FORKS = "xielu"
"""What the rules read that Megatron-LM has no flag for."""

OTHER_MODELS: dict[str, str] = {
    r"alibi": "biases of attention by distance (ALiBi), which Triplane's layers do not have.",
    r"ademamix": "settings of the optimizer AdEMAMix; optimizer.optimizer takes a class of yours.",
    r"(^|-)(lion|sophia|shampoo|soap|muon|adafactor|schedule-?free)(-|$)":
        "another optimizer than AdamW: optimizer.optimizer takes a class of yours.",
    r"goldfish": "the goldfish loss, which leaves tokens out of the loss.",
    r"(^|-)(mamba|rwkv|retnet|hyena|gated-delta|linear-attention|mamba2|kda|moba|nsa)(-|$)":
        "layers of another architecture.",
    r"(^|-)(vision|image|images|pixel|tile|tiles|tiling|video|audio|speech|multimodal|language-model-type)(-|$)":
        "inputs beside text.",
    r"(^|-)(z-?loss|label-smoothing)(-|$)":
        "another loss than cross entropy on next tokens: train.loss takes a function of yours.",
}  # fmt: skip
"""Flags of forks that make another model, or train it otherwise: a pattern of their names -> what they mean."""

HARMLESS: dict[str, str] = {
    r"^(wandb|swanlab|mlflow|clearml|comet|tensorboard)-|-to-(tensorboard|wandb)$":
        "logs of a fork, which change nothing that is trained",
}  # fmt: skip
"""The same of flags that change nothing."""
