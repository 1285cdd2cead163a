"""Flags of Megatron-LM that Triplane cannot follow: what they do and what to use instead -> flags.

Written as in ``flags``; a flag with the value behind its | is irrelevant.
"""

OTHER_MODEL: dict[str, str] = {
    "another architecture, which Triplane has no layers for": """
        encoder-pipeline-model-parallel-size=1 encoder-tensor-model-parallel-size=1 pipeline-model-parallel-split-rank=1
        decoder-num-layers=1 mtp-hybrid-override-pattern=1
        heterogeneous-layers-config-path=1 heterogeneous-layers-config-encoded-json=1
    """,
    "Megatron-LM makes a pattern of it, which its log has: give that one by --hybrid-layer-pattern": """
        hybrid-attention-ratio=1|0 hybrid-mlp-ratio=1|0
    """,
    "layers from Python code of your own: describe the model by flags, or change models/": """
        spec=*
    """,
    "it changes the computation, and Triplane's layers do not have it": """
        fp32-residual-connection apply-residual-connection-post-layernorm
        moe-latent-size=1 mtp-use-repeated-layer mtp-detach-heads moe-router-force-biased=1
        moe-expert-rank-capacity-factor=1 moe-router-quantile-balancing-ema=1|0 mtp-standalone
    """,
    "another training than on next tokens: instructions, preferences, distillation": """
        sft perform-rl-step logits-load-dir=1
    """,
    "the model is that of the checkpoint, whatever flags say: leave it out, and give the model by flags": """
        use-checkpoint-args
    """,
    "its YAML file takes the place of all flags: translate that file": """
        yaml-cfg=1
    """,
    "another model than a GPT": """
        vision-pretraining retro-add-retriever
    """,
    "settings of layers that Triplane does not have": """
        mamba-training-ssm-states-dtype=1 dsa-indexer-n-heads=1 dsa-indexer-head-dim=1 dsa-indexer-topk=1
        dsa-indexer-topk-freq=1 dsa-indexer-skip-topk-offset=1 dsa-indexer-loss-coeff=1 dsa-indexer-use-sparse-loss
        dsa-kernel-backend=1 dsa-indexer-rope-interleaved dsa-indexer-k-norm-epsilon=1 dsa-indexer-k-norm-fp32
        no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu disable-dsa-indexer-rotate-activation
        disable-dsa-indexer-scoring-relu mrope-section=+
        relative-attention-num-buckets=1 relative-attention-max-distance=1 sft-tokenizer-prompt-format=1
    """,
    "how weights are drawn; Triplane draws them from a normal distribution with init_method_std": """
        embedding-init-method-std=1 init-method-xavier-uniform data-parallel-random-init
    """,
    "settings of another optimizer than AdamW and Muon": """
        sgd-momentum=1 lion-beta1=1 lion-beta2=1
    """,
    "which weights decay: Triplane's norms and biases do not, all others do": """
        apply-wd-to-qk-layernorm no-weight-decay-cond-type=1
    """,
    "weights that are trained otherwise than the others": """
        freeze-all-layers head-lr-mult=1|1
    """,
    "another order of samples, or another source: Triplane has one seeded order": """
        dataloader-type=1|single
    """,
    "further ids beside the tokenizer's, for other models than a GPT": """
        vocab-extra-ids=1|0
    """,
    "data files of their own for each split: Triplane divides data.paths by data.split": """
        train-data-path=* valid-data-path=* test-data-path=* per-split-data-args-path=1
    """,
    "a source of data that Triplane does not read; set data.paths": """
        phase-transition-iterations=1
    """,
    "keeps documents of a sample apart: say --reset-attention-mask --reset-position-ids instead": """
        dataloader-inter-document-masking
    """,
    "special ids of a tokenizer beyond those in its model file": """
        tokenizer-special-tokens=+ tiktoken-special-tokens=+ null-tokenizer-eod-id=1
    """,
    "another start of training: upcycling, distillation, fine-tuning on instructions, reinforcement learning": """
        moe-use-upcycling moe-upcycling-granularity=1 logits-save-top-k=1 logits-save-top-p=1 logits-save-top-p-min-k=1
        logits-save-dir=1 logits-save-dtype=1 logits-load-decode-threads=1
        logits-load-prefetch-factor=1 logits-load-msc-prefetch-depth=1 logits-load-kd-loss-alpha=1
        logits-load-ignore-errors rl-prompts-per-eval=1
        rl-generation-lag=1 rl-submission-granularity=1 rl-consumption-granularity=1 rl-default-temperature=1
        rl-default-top-p=1 rl-default-top-k=1 rl-offload-optimizer-during-inference rl-kv-cache-management-mode=1
        rl-persist-cuda-graphs rl-partial-rollouts rl-inference-logprobs-is-correction
        rl-importance-sampling-truncation-coef=1 rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin=1
        rl-sequence-packing-algo=1 rl-training-cuda-graphs rl-inference-tensor-model-parallel-size=1
        rl-inference-pipeline-model-parallel-size=1 rl-inference-expert-model-parallel-size=1
        rl-inference-expert-tensor-model-parallel-size=1 rl-inference-model-unified-memory-level=1
        rl-offload-inference-model-weights-when-idle rl-verify-model-weights-swap rl-skip-bos-token rl-profile
        rl-profile-dir=1 rl-inference-parsers=* rl-num-parallel-generations=1 rl-num-parallel-generation-batches=1
        rl-generation-batch-size=1 rl-parallel-generation-tasks=1 rl-offload-kv-cache-during-training
        rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-calculate-intra-group-similarity
        rl-sequence-packing-bin-size=1 rl-max-inflight-requests=1 rl-durable-rollout-bank rl-rollout-bank-dir=1
        rl-rollout-bank-max-bytes=1 no-rl-persist-cuda-graphs no-rl-partial-rollouts
        no-rl-inference-logprobs-is-correction no-rl-use-sequence-packing no-rl-training-cuda-graphs
        no-rl-offload-inference-model-weights-when-idle no-rl-verify-model-weights-swap no-rl-skip-bos-token
        grpo-prompts-per-step=1 grpo-group-size=1 grpo-iterations=1 grpo-clamp-eps-lower=1 grpo-clamp-eps-upper=1
        grpo-kl-beta=1 grpo-entropy-term-weight=1 grpo-filter-groups-with-same-reward grpo-default-temperature=1
        grpo-default-top-p=1 langrl-env-config=1 langrl-inference-server-type=1
        langrl-inference-server-conversation-template=1 langrl-external-server refit-method=1 moe-enable-routing-replay
    """,
    "deprecated by Megatron-LM itself: --micro-batch-size, --lr-warmup-fraction and others take their places": """
        batch-size=1 warmup=1 moe-token-dropping kitchen-config-file=1 kitchen-recipe-number=1
    """,
    "nothing is trained, only evaluated": """
        skip-train
    """,
    "which checkpoint training starts from: name that one in checkpoint.load": """
        ckpt-step=1 override-ckpt-iteration=1
    """,
}
"""Without them the model, the data or the schedule is another: refused unless --allow_partial."""

UNSUPPORTED: dict[str, str] = {
    "deprecated by Megatron-LM itself, which refuses it; use its replacement": """
        model-parallel-size=1 checkpoint-activations checkpoint-num-layers=1 distribute-checkpointed-activations
        moe-extended-tp use-checkpoint-lr-scheduler standalone-embedding-stage use-legacy-models
    """,
    "another rounding than Triplane's, or fewer bits": """
        fp16-lm-cross-entropy output-logit-dtype=1|fp32 disable-bf16-reduced-precision-matmul
    """,
    "the format in which gradients are added up: set precision.grad_reduce_in_fp32 = false for bf16": """
        main-grads-dtype=1|fp32
    """,
    "how the optimizer runs: in a CUDA graph, or torch's on a GPU, or with memory that is not pinned": """
        optimizer-cuda-graph use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
    """,
    "another group than the data ranks for SHARP, or another library than NCCL between stages": """
        sharp-enabled-group=1|dp pipeline-model-parallel-comm-backend=1|nccl
    """,
    "a batch size that is lowered to what the ranks divide: give one that they do": """
        decrease-batch-size-if-needed
    """,
    "settings of Megatron-FSDP that torch's fully_shard, which Triplane shards with, does not have": """
        outer-dp-sharding-strategy=1 fsdp-manual-registration fsdp-double-buffer suggested-communication-unit-size=1
        keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp enable-full-sharding-in-hsdp
        megatron-fsdp-main-params-dtype=1 megatron-fsdp-main-grads-dtype=1 megatron-fsdp-grad-comm-dtype=1
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer megatron-fsdp-version=1
        fsdp-db-use-persist-buf-on-alloc-fail
    """,
    'other CUDA graphs than Triplane has: kernels.cuda_graph_impl = "local" makes them of attention and dense MLPs': """
        external-cuda-graph cuda-graph-scope=+ cuda-graph-modules=+
    """,
    "a way to be faster or smaller that Triplane does not have; the model is the same without it": """
        tp-comm-overlap-cfg=1 no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag
        no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-bulk-wgrad
        disable-tp-comm-bulk-dgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
        disable-tp-comm-split-rs tp-comm-overlap-rs-dgrad delay-wgrad-compute overlap-moe-expert-parallel-comm
        overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release defer-embedding-wgrad-compute
        wgrad-deferral-limit=1|0 overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        distribute-saved-activations moe-layer-recompute
        cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph
        fine-grained-offloading-max-inflight-offloads=1 moe-paged-stash
        moe-paged-stash-page-size=1 moe-paged-stash-buffer-size-factor-cuda=1 moe-paged-stash-buffer-size-factor-cpu=1
        high-priority-a2a-comm-stream moe-shared-expert-glu-interleave-size=1
        moe-mlp-glu-interleave-size=1 moe-single-grouped-weight moe-single-grouped-bias
        moe-hybridep-pad-uneven-dispatch-inputs moe-hybridep-num-sms=1 moe-hybridep-num-blocks-permute=1
        moe-hybridep-num-blocks-unpermute=1 moe-hybridep-num-sms-preprocessing=1 moe-ncclep-static-shape
        moe-ncclep-zero-copy moe-permute-fusion-into-hybridep moe-flex-dispatcher-num-sms=1 ddp-num-buckets=1
        no-use-layer-wise-param-layout gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub
        gtp-expert-remat-nccl-ub tensor-parallel-num-weight-shards=1 expert-tensor-parallel-num-weight-shards=1
        max-seqlen-per-dp-cp-rank=1 ddp-reduce-scatter-with-fp32-accumulation
        ddp-param-name-patterns-for-fp32-local-accumulation=+
    """,
    "a number format that Triplane does not offer": """
        fp8-output-proj fp8-quantizer-factory=1 fp4-quantizer-factory=1
        te-precision-config-file=1 use-kitchen-attention kitchen-attention-backend=1
    """,
    "keeps weights in fp4 and gathers them so: Triplane keeps 16-bit ones; leave it out, products stay in fp4": """
        fp4-param-gather
    """,
    "a way to divide the ranks that Triplane does not have": """
        hierarchical-context-parallel-sizes=+ hybrid-context-parallel use-tp-pp-dp-mapping fake-process-group
    """,
    "evaluation is as large as training's batches, from the first eval_interval on, during training": """
        start-eval-at-iter=1 eval-global-batch-size=1 eval-micro-batch-size=1 test-mode
    """,
    "name held-out files in eval.validation_sets; eval.full_pass measures all of each": """
        full-validation multiple-validation-sets validation-set-names=+
    """,
    "stops after a number of minutes: let the scheduler end the job, and start it again": """
        exit-duration-in-mins=1
    """,
    "which signal saves and stops: SIGTERM, SIGINT, SIGHUP and SIGUSR2 always do, others never": """
        exit-signal=1|SIGTERM
    """,
    "which checkpoints are written, kept or read: see checkpoint.save_interval, .keep and .load": """
        save-params-interval=1 non-persistent-save-interval=1 non-persistent-ckpt-type=1
        non-persistent-global-ckpt-dir=1 non-persistent-local-ckpt-dir=1 non-persistent-local-ckpt-algo=1
        ckpt-convert-format=1 ckpt-convert-save=1 ckpt-convert-update-legacy-dist-opt-format
        no-save-optim no-save-rng load-main-params-from-ckpt replication replication-jump=1 replication-factor=1
        enable-msc disable-msc load-model-opt-format
    """,
    "the layout is read from the checkpoint: give it by flags": """
        use-mp-args-from-checkpoint-args
    """,
    "for another program than GPT pretraining": """
        ict-head-size=1 biencoder-projection-dim=1 biencoder-shared-query-context-model ict-load=1 bert-load=1
        titles-data-path=1 query-in-block-prob=1 use-one-sent-docs evidence-data-path=1
        retriever-report-topk-accuracies=+ retriever-score-scaling retriever-seq-length=1 block-data-path=1
        embedding-path=1 indexer-batch-size=1 indexer-log-interval=1 classes-fraction=1 data-per-class-fraction=1
        no-data-sharding vision-pretraining-type=1 vision-backbone-type=1 swin-backbone-type=1
        mask-type=1 mask-factor=1 iter-per-epoch=1 dino-local-img-size=1 dino-local-crops-number=1
        dino-head-hidden-size=1 dino-bottleneck-size=1 dino-freeze-last-layer=1 dino-norm-last-layer
        dino-warmup-teacher-temp=1 dino-teacher-temp=1 dino-warmup-teacher-temp-epochs=1 retro-project-dir=1
        retro-cyclic-train-iters=1 retro-encoder-layers=1 retro-encoder-hidden-dropout=1
        retro-encoder-attention-dropout=1 retro-num-neighbors=1 retro-num-retrieved-chunks=1 retro-attention-gate=1
        retro-no-verify-neighbor-count retro-workdir=1 retro-return-doc-ids output-bert-embeddings bert-embedder-type=1
    """,
    "faults put into a run": """
        error-injection-rate=1|0 fault-injector-ranks=1 fault-injector-num-ranks=1 fault-injector-fault-types=1
        fault-injector-fault-probabilities=1 fault-injector-fault-delay=1 fault-injector-delay-start-iteration=1
        fault-injector-mtti-seconds=1 fault-injector-offset-seconds=1 fault-injector-seed=1
    """,
    "features that Megatron-LM calls unstable: leave it out, and what needed it is listed by itself": """
        enable-experimental
    """,
    "logs under another W&B account: set WANDB_ENTITY in the environment": """
        wandb-entity=1
    """,
}
