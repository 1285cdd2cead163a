"""On a rank: steps of a recipe on random tokens: losses, seconds, and bytes, predicted and measured."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from models.costs.flops import flops_per_token, peak_flops
from models.costs.predict import of_stage
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from tests.gpu.measured_models import loaded
from tools.plan.calibrate.measure import wait
from training.memory.measured import (
    CardPeak,
    Counted,
    MeasuredBytes,
    ProcessPeak,
    counted,
    modules_of,
    on_the_host,
    staying,
)
from training.memory.planned import as_case
from training.parts.model import build_parts, overlap_of_tp
from training.progress import Progress
from training.step import RankParts, StepRequests, StepResult
from training.train import one_step


def measure(
    identity: Identity, text: str, warmup_steps: int, steps: int, device: Literal["cpu", "cuda"] = "cuda"
) -> dict[str, Any]:
    """Of a recipe's text: medians over ``steps`` updates after those that warm up; losses of all of them.

    Rates are a GPU's. Bytes are this rank's: ``measured`` has the allocator's peak, ``predicted`` the same tensors.
    """
    config = loaded(text)
    shape = resolve(config.model, None)
    layout = config.layout(identity.world_size)
    start = groups.start(
        layout, identity, device=device, seed=1, parallel=config.parallel,
        graphs=config.kernels.graphs,
    )  # fmt: skip
    with start as ranks, overlap_of_tp(config, shape, ranks):
        parts = build_parts(config, shape, ranks)
        stream = RandomTokens(config, shape.vocab_size, dp=layout.dp, dp_rank=ranks.at.dp, device=ranks.device)
        taken = take(warmup_steps + steps, parts, stream)
        found = taken.held._replace(host=on_the_host(parts.optimizer, ranks.device))
        expected = of_stage(as_case(config, identity.world_size, shape, modules_of(ranks)), shape, ranks.at.pp)
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    times_s = taken.times_s[warmup_steps:]
    step_s = statistics.median(times_s)
    tokens_per_s = taken.results[-1].tokens / step_s / identity.world_size
    flops = tokens_per_s * flops_per_token(shape, config.model.seq_length)
    published = peak_flops(name, config.precision.products or config.precision.dtype)
    return {
        "shape": config.model.shape,
        "layers": shape.num_layers,
        "gpus": identity.world_size,
        "losses": [result.loss for result in taken.results],
        "step_s": step_s,
        "slowest_step_s": max(times_s),
        "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": flops / 1e12,
        "mfu": flops / published if published else None,
        "measured": found._asdict() | {"total": found.total},
        "predicted": {name: getattr(expected, name) for name in (*Counted._fields, "activations", "tensors", "host")},
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class Taken:
    """Steps that were taken."""

    times_s: list[float]
    """Of each, to the end of the device's work."""
    results: list[StepResult]
    held: MeasuredBytes
    """At the peak of all."""


def take(count: int, parts: RankParts, stream: RandomTokens) -> Taken:
    """So many updates of a run."""
    progress, times_s, results, ranks = Progress(), [], [], parts.ranks
    peak = CardPeak(ranks.device) if ranks.device.type == "cuda" else ProcessPeak()
    for number in range(count):
        peak.before_step(number)
        began = time.perf_counter()
        progress, result = one_step(parts, stream, progress, StepRequests())
        wait(ranks.device)
        times_s.append(time.perf_counter() - began)
        peak.after_step(number)
        results.append(result)
    states = counted(parts.chunks, parts.optimizer)
    held = MeasuredBytes(*map(float, states), *peak.read(states.total, staying(parts.chunks, states)))
    return Taken(times_s=times_s, results=results, held=held)
