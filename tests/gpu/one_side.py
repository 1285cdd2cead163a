"""On a rank: training steps of one program's model, timed alike for each program: rates, memory, losses."""

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from models.costs.flops import flops_per_token, peak_flops
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from tests.gpu.measured_models import loaded
from tests.gpu.sides.job import Job
from tools.plan.calibrate.measure import wait

Side = Literal["triplane", "plain_pytorch", "megatron_core"]
"""A module of tests/gpu/sides, whose ``steps(job)`` yields a function: one update, and its loss."""


def measure(
    identity: Identity, text: str, side: Side, warmup_steps: int, steps: int, device: Literal["cpu", "cuda"] = "cuda"
) -> dict[str, Any]:
    """Of a recipe's text, data-parallel: the median of ``steps`` updates behind those that warm up.

    Every step trains on the same random samples, so a loss that does not fall tells a fault. Rates are a GPU's; bytes
    are the allocator's.
    """
    config = loaded(text)
    start = groups.start(
        config.layout(identity.world_size), identity, device=device, seed=config.train.seed,
        parallel=config.parallel,
    )  # fmt: skip
    began = time.perf_counter()
    with start as ranks:
        shape = resolve(config.model, None)
        stream = RandomTokens(config, shape.vocab_size, dp=ranks.layout.dp, dp_rank=ranks.at.dp, device=ranks.device)
        batch = stream.next(config.model.seq_length)
        job = Job(config=config, shape=shape, ranks=ranks, microbatches=tuple(one for one in batch if one is not None))
        with importlib.import_module(f"tests.gpu.sides.{side}").steps(job) as step:
            built_s = time.perf_counter() - began
            losses, times_s = timed(step, ranks.device, warmup_steps, steps)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device == "cuda" else (0, 0)
    step_s = statistics.median(times_s[warmup_steps:])
    tokens_per_s = config.train.global_batch_size * config.model.seq_length / step_s / identity.world_size
    flops = tokens_per_s * flops_per_token(shape, config.model.seq_length)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    published = peak_flops(name, config.precision.products or config.precision.dtype)
    return {
        "shape": config.model.shape, "layers": shape.num_layers, "gpus": identity.world_size, "losses": losses,
        "step_s": step_s, "times_s": times_s, "built_s": built_s, "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": flops / 1e12, "mfu": flops / published if published else None,
        "peak_bytes": peaks[0], "reserved_bytes": peaks[1], "transformer_engine": has_te(),
        "device": name,
    }  # fmt: skip


def timed(
    step: Callable[[], float], device: torch.device, warmup_steps: int, steps: int
) -> tuple[list[float], list[float]]:
    """Losses, means over the ranks, and seconds of each step, to the end of its last kernel. Peaks are of those that
    count."""
    losses, times_s = [], []
    for number in range(warmup_steps + steps):
        if number == warmup_steps and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        began = time.perf_counter()
        loss = step()
        wait(device)
        times_s.append(time.perf_counter() - began)
        mean = torch.tensor([loss], device=device)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, times_s


def has_te() -> bool:
    """Whether Megatron has found Transformer Engine in this process."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)
