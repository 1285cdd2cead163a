"""Flags of Megatron-LM that change nothing that Triplane would do otherwise: reason -> flags.

Written as in ``flags``.
"""

IRRELEVANT: dict[str, str] = {
    "a choice of kernel or launch: the same function, other rounding at most": """
        no-masked-softmax-fusion no-bias-dropout-fusion no-persist-layer-norm use-flash-attn
        flash-attention-version=1 disable-jit-fuser
        use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm use-fused-weighted-squared-relu
        transformer-impl=1 no-clone-scatter-output-in-embedding
        disable-clone-scatter-output-in-embedding mla-down-proj-fusion use-grouped-gemm-for-shared-expert
        use-grouped-gemm-for-dense-mlp moe-use-legacy-grouped-gemm mlp-chunks-for-training=1 flash-decode onnx-safe=1
    """,
    "megatron-core computes it: --hidden-size over --mup-base-hidden-size": """
        mup-width-mult=1
    """,
    "Triplane's fused cross entropy is Transformer Engine's; Megatron-LM's native one rounds its gradient to bf16": """
        cross-entropy-fusion-impl=1
    """,
    "Triplane divides by the tokens of the whole batch anyway, which is the same where none is masked": """
        calculate-per-token-loss
    """,
    "attention's softmax is always fp32 within its kernel": """
        attention-softmax-in-fp32
    """,
    "keeps unfused fp16 attention from overflowing; it divides and multiplies by the same number": """
        apply-query-key-layer-scaling
    """,
    "Triplane always does so where weights in mxfp8 are gathered": """
        reuse-grad-buf-for-mxfp8-param-ag
    """,
    "Triplane's router is always fp32": """
        moe-router-dtype=1|fp32
    """,
    "Triplane always uses megatron-core's models, and its one MLP layout": """
        use-mcore-models use-legacy-static-engine legacy-tokenizer
    """,
    "every run saves and stops on SIGTERM, SIGINT, SIGHUP and SIGUSR2": """
        exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training
    """,
    "loading of data is Triplane's own: token files are memory-mapped, read by index and cached by content": """
        data-cache-path=1 no-mmap-bin-files num-workers=1 num-dataset-builder-threads=1
        no-create-attention-mask-in-dataloader mid-level-dataset-surplus=1 dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap object-storage-cache-path=1 s3-cache-path=1 mmap-warmup data-impl=1
        renormalize-blend-weights per-dataset-sequences-path=1
    """,
    "text is tokenised beforehand or on first use; training reads ids": """
        tiktoken-pattern=1 tiktoken-num-special-tokens=1 tokenizer-hf-no-use-fast tokenizer-hf-use-fast
        tokenizer-hf-no-include-special-tokens tokenizer-hf-include-special-tokens trust-remote-code chat-template=1
        no-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        tokenizer-sentencepiece-legacy null-tokenizer-pad-id=1 allow-ambiguous-pad-tokens
    """,
    "files of a tokenizer, which is reported with --tokenizer-type": """
        tokenizer-metadata=1
    """,
    "how ranks find each other is the launcher's business here": """
        distributed-backend=1 local-rank=1 local_rank=1 lazy-mpu-init disable-gloo-process-groups
        nccl-communicator-config-path=1
        distributed-timeout-seconds-after-init=1 tp-comm-bootstrap-backend=1
    """,
    "how communication is overlapped or batched; results do not depend on it": """
        no-overlap-p2p-communication no-align-param-gather no-align-grad-reduce disable-align-grad-reduce
        delay-param-gather no-delay-grad-reduce no-scatter-gather-tensors-in-pipeline
        no-async-tensor-model-parallel-allreduce ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective
        no-gradient-reduce-div-fusion use-ring-exchange-p2p disable-symmetric-registration
        create-all-gather-group
    """,
    "profiling and diagnostics, which change nothing that is trained": """
        pytorch-profiler-collect-chakra gpu-sniff-test-interval=1 train-sync-interval=1 dump-param-to-param-group-map=1
        config-logger-dir=1 run-workload-inspector-server result-rejected-tracker-filename=1 flight-recorder-dump-path=1
        flight-recorder-trace-buffer-size=1 no-flight-recorder-dump-on-timeout disable-flight-recorder-dump-on-timeout
        flight-recorder-include-stack-trace no-flight-recorder-include-only-active
        disable-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-extra-dump-on-exec error-injection-type=1
        moe-routing-trace-path=1
        moe-routing-trace-max-training-iters=1 moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
        moe-routing-trace-dump-weights save-activations-interval=1 save-tokens-per-expert-interval=1
        save-wgrads-interval=1 save-dgrads-interval=1
    """,
    "memory snapshots lie in RUN_DIR/profile": """
        memory-snapshot-path=1
    """,
    "Triplane always watches for stragglers, spikes and non-finite values (section fault)": """
        log-straggler straggler-ctrlr-port=1 straggler-minmax-count=1 disable-straggler-on-startup rerun-mode=1
        check-for-spiky-loss check-for-large-grads no-check-for-nan-in-loss-and-grad
    """,
    "Triplane logs what it logs: loss, norms, rates, memory, expert load, always": """
        log-throughput log-progress timing-log-level=1 timing-log-option=1 tensorboard-log-interval=1
        tensorboard-queue-size=1 log-timers-to-tensorboard no-log-loss-scale-to-tensorboard
        disable-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
        log-memory-interval=1 log-device-memory-used log-max-attention-logit
        no-barrier-with-level-1-timing log-world-size-to-tensorboard wandb-save-dir=1 logging-level=1 log-energy
        log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard moe-per-layer-logging no-one-logger
        enable-one-logger one-logger-project=1 one-logger-run-name=1 one-logger-async one-logger-entity=1
        app-tag-run-name=1 app-tag-run-version=1 otel-enabled otel-service-name=1 otel-span-groups=1
    """,
    "memory housekeeping; results do not depend on it": """
        no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level=1
        te-rng-tracker inference-rng-tracker use-cpu-initialization init-model-with-meta-device no-initialization
    """,
    "Triplane's checkpoints have one format, written and read in parallel by all ranks": """
        ckpt-format=1 ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo=1 ckpt-fully-parallel-save-process-group=1
        ckpt-fully-parallel-load-process-group=1 ckpt-assume-constant-structure no-ckpt-load-validate-sharding-integrity
        disable-ckpt-load-validate-sharding-integrity dist-ckpt-strictness=1 dist-ckpt-format=1 use-dist-ckpt
        dist-ckpt-workers=1 dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
        distrib-optim-fully-reshardable-mem-efficient auto-detect-ckpt-format no-strict-fsdp-dtensor-load
        disable-strict-fsdp-dtensor-load no-stream-ckpt-dequant disable-stream-ckpt-dequant verify-integrity
        ckpt-drop-redundant-extra-state async-save async-strategy=1 use-persistent-ckpt-worker async-ckpt-cpu-priority=1
        async-ckpt-io-priority=1 async-ckpt-use-cpu-shm no-use-tokenizer-model-from-checkpoint-args
        disable-use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint
    """,
    "read by inference only": """
        max-tokens-to-oom=1 inference-batch-times-seqlen-threshold=1 inference-max-requests=1 inference-max-seq-length=1
        inference-max-batch-size=1 inference-dynamic-batching cache-mla-latents nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill=1 symmetric-ar-type=1 moe-pad-experts-for-cuda-graph-inference batch-invariant-mode
        decode-only-cuda-graphs enable-chunked-prefill disable-chunked-prefill num-speculative-tokens=1
        use-same-sampling-seed-across-dp-ranks mamba-inference-conv-states-dtype=1 mamba-inference-ssm-states-dtype=1
        inference-cuda-graph-scope=1 inference-fuse-tp-communication inference-disable-triton-nvls-kernels
        inference-grouped-gemm-backend=1 inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type=1
        inference-dynamic-batching-buffer-size-gb=1 inference-dynamic-batching-paused-buffer-size-gb=1
        inference-dynamic-batching-mamba-memory-ratio=1 inference-dynamic-batching-block-size=1
        inference-dynamic-batching-max-requests=1 inference-dynamic-batching-max-tokens=1
        inference-dynamic-batching-num-cuda-graphs=1 inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-track-generated-token-events inference-cuda-graph-all-prefills
        inference-cuda-graph-max-tokens=1 inference-dynamic-batching-unified-memory-level=1
        inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-eviction-policy=1
        inference-dynamic-batching-prefix-caching-coordinator-policy=1
        inference-dynamic-batching-prefix-caching-routing-alpha=1 inference-dynamic-batching-prefix-caching-mamba-gb=1
        inference-dynamic-batching-cuda-graph-mixed-prefill-count=1
        inference-dynamic-batching-cuda-graph-sizing-distribution=1 inference-dynamic-batching-sampling-backend=1
        inference-dynamic-batching-async-sched-mode=1 inference-dynamic-batching-logprobs-mode=1
        inference-logging-step-interval=1 inference-text-gen-server-logging inference-wandb-logging
        inference-coordinator-port=1 inference-use-synchronous-zmq-collectives inference-disable-ep-consensus
        inference-shards=1 inference-dynamic-batching-cuda-graph-max-tokens=1
        inference-dynamic-batching-buffer-guaranteed-fraction=1 inference-dynamic-batching-buffer-overflow-factor=1
        inference-dynamic-batching-max-requests-override=1 inference-dynamic-batching-max-tokens-override=1
        inference-dynamic-batching-chunk-size=1 no-inference-disable-ep-consensus
        no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
        no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
    """,
    "how a running job recovers from faults, not what it trains": """
        inprocess-restart inprocess-max-iterations=1 inprocess-monitor-thread-interval=1
        inprocess-monitor-process-interval=1 inprocess-progress-watchdog-interval=1 inprocess-heartbeat-interval=1
        inprocess-soft-timeout=1 inprocess-hard-timeout=1 inprocess-heartbeat-timeout=1 inprocess-barrier-timeout=1
        inprocess-completion-timeout=1 inprocess-last-call-wait=1 inprocess-termination-grace-time=1
        inprocess-granularity=1 inprocess-active-world-size=1 inprocess-empty-cuda-cache enable-ft-package
        calc-ft-timeouts ft-num-warmup-iters=1 adlr-autoresume adlr-autoresume-interval=1
    """,
    "read by BERT, T5, retrieval and vision programs only, or by GPT only with others of these": """
        bert-no-binary-head mask-prob=1 short-seq-prob=1 sample-rate=1 decoder-seq-length=1 img-h=1 img-w=1 img-dim=1
        num-channels=1 patch-dim=1 num-classes=1
    """,
    "--hybrid-layer-pattern says it": """
        is-hybrid-model
    """,
    "a choice of kernel for Mamba layers": """
        disable-mamba-mem-eff-path
    """,
    "is what Triplane does": """
        yarn-correction-range-round-to-int
    """,
}
