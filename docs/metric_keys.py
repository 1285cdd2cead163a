"""What each key of metrics.jsonl means; tests/test_docs.py compares the keys with those that are written."""

KEYS: dict[str, tuple[str, str]] = {
    "iteration": ("", "the iteration that has just ended; after a resume, the later line of an iteration counts"),
    "loss": ("nats per token", "mean over the unmasked tokens of the global batch"),
    "validation_loss": (
        "nats per token",
        "on the validation split, every `train.eval_interval` iterations; a line of its own",
    ),
    "grad_norm": ("", "L2 norm of the whole model's gradient before clipping; absent where fp16 gradients overflowed"),
    "learning_rate": ("", "of this iteration"),
    "loss_scale": ("", "of fp16; absent where it is 1"),
    "skipped": ("updates", "updates since the last line that did not happen: overflow, NaN or Inf, a spike"),
    "consumed_samples": ("samples", "since the run began, over all starts"),
    "consumed_tokens": ("tokens", "consumed_samples x seq_length"),
    "epoch": ("", "how often the data has been read; with several sources one key for each, `epoch/NAME`"),
    "iteration_s": ("s", "mean duration of an iteration since the last line, without evaluation and saving"),
    "tokens_per_s": ("tokens/s", "unmasked tokens over time; the first 2 iterations of a start do not count"),
    "tokens_per_s_per_gpu": ("tokens/s", "the same, divided by the world size"),
    "mfu": ("", "model FLOPs over the card's dense peak; only where the peak is known"),
    "hfu": ("", "the same with the FLOPs of recomputed activations"),
    "eta_s": ("s", "median of recent iterations x the iterations that remain"),
    "memory_gib": ("GiB", "largest peak of torch's allocator over all ranks; GPUs only"),
    "memory_rank": ("", "the rank that holds it"),
    "data_wait_s": ("s", "how long the slowest rank waited for data since the last line"),
    "checkpoint_stall_s": ("s", "how long training stood still for saves since the last line"),
    "mtp_loss": ("nats per token", "for each depth of multi-token prediction, unweighted: a list"),
    "expert_load": ("", "for each block with experts, each expert's share of the assignments: a table of lists"),
    "expert_load_max": ("", "the fullest expert of all blocks; 1 is an even share"),
    "dropped_tokens": ("", "share of assignments that found their expert full"),
    "load_balancing_loss": ("", "mean over routers and microbatches, without its coefficient"),
    "z_loss": ("", "the same for the router's z-loss"),
    "fp8/shadow_loss_difference": (
        "",
        "of fp8, or fp4, from bf16, relative; the worst rank, with `precision.fp8_shadow_interval`",
    ),
    "fp8/shadow_grad_norm_difference": ("", "the same for the gradient norm of the worst layer"),
}
"""Key -> unit, meaning."""
