"""On a rank: tokens per second, MFU and peak memory of a published shape."""

import dataclasses
import statistics
import time
from typing import Any, Literal

import torch

from models.config import ModelConfig
from models.flops import flops_per_token, peak_flops
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from tools.benchmark.step.one_rank import RandomTokens
from training.config.run_config import OptimizerConfig, RunConfig, TrainConfig
from training.progress import Progress
from training.step import StepRequests
from training.train import build_parts, one_step

WARMUP_STEPS, STEPS, MICROBATCHES = 3, 10, 4

SMALL = ModelConfig(
    shape="llama32_1b", num_layers=12, hidden_size=768, ffn_hidden_size=2048, num_attention_heads=12,
    num_query_groups=4, vocab_size=32768,
)  # fmt: skip
"""About 120 M parameters, Llama-like."""

ROWS: dict[str, tuple[ModelConfig, PrecisionConfig, int]] = {
    "small bf16": (SMALL, PrecisionConfig(), 4),
    "llama3_1b bf16": (ModelConfig(shape="llama3_1b"), PrecisionConfig(), 1),
    "llama3_1b fp8": (ModelConfig(shape="llama3_1b"), PrecisionConfig(fp8="hybrid"), 1),
}
"""Row -> model, precision, micro-batch size; each at 4,096 tokens, data-parallel over all GPUs."""


def configuration(row: str, world_size: int, **changes: Any) -> RunConfig:
    """A row as a run; ``changes`` go to its model."""
    model, precision, micro_batch_size = ROWS[row]
    train = TrainConfig(
        global_batch_size=MICROBATCHES * micro_batch_size * world_size, micro_batch_size=micro_batch_size
    )
    overlap = world_size > 1
    return RunConfig(
        model=dataclasses.replace(model, **({"seq_length": 4096} | changes)),
        precision=precision,
        parallel=ParallelConfig(overlap_grad_reduce=overlap, overlap_param_gather=overlap),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
        train=train,
    )


def measure(
    identity: Identity,
    row: str,
    device: Literal["cpu", "cuda"] = "cuda",
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The row's numbers: medians over ``STEPS`` updates of ``MICROBATCHES`` microbatches each."""
    config = configuration(row, identity.world_size, **(changes or {}))
    shape = resolve(config.model, None)
    layout = config.layout(identity.world_size)
    times_s = []
    with groups.start(layout, identity, device=device, seed=1, timeout_minutes=5) as ranks:
        chunks, optim = build_parts(config, shape, ranks)
        stream = RandomTokens(config, shape.vocab_size, dp=layout.dp, dp_rank=ranks.at.dp, device=ranks.device)
        progress = Progress()
        for _ in range(WARMUP_STEPS + STEPS):
            began = time.perf_counter()
            progress, result = one_step(config, chunks, optim, stream, ranks, progress, StepRequests())
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - began)
        memory_bytes = torch.cuda.max_memory_allocated()
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    step_s = statistics.median(times_s[WARMUP_STEPS:])
    tokens_per_s = result.tokens / step_s / identity.world_size
    model_flops, precision = flops_per_token(shape, config.model.seq_length), config.precision
    peak = peak_flops(name, "fp8" if precision.fp8 else precision.dtype)
    return {
        "gpus": identity.world_size,
        "step_s": step_s,
        "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": tokens_per_s * model_flops / 1e12,
        "mfu": tokens_per_s * model_flops / peak if peak else None,
        "peak_memory_gib": memory_bytes / 2**30,
    }
