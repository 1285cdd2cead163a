"""On a rank: one step of a recipe's model under torch.profiler, behind warm-up, and one by CUDA events alone."""

import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from tests.gpu import kernel_kinds
from tests.gpu.measured_models import loaded
from tools.plan.calibrate.measure import wait
from training.config.small_sections import ProfileConfig
from training.parts.model import build_parts, overlap_of_tp
from training.profile.callback import TorchTrace
from training.profile.chrome_trace import ANNOTATIONS, TraceEvent, read_trace
from training.profile.range_names import iteration_of
from training.profile.ranges import StepRanges
from training.profile.summary import summarize
from training.profile.timeline import Measured, StepClock
from training.progress import Progress
from training.step import StepRequests
from training.train import one_step


def measure(
    identity: Identity, text: str, warmup_steps: int, device: Literal["cpu", "cuda"] = "cuda"
) -> dict[str, Any]:
    """Of rank 0's GPU, seconds: ``kinds`` of kernels and ``idle`` add up to ``window_s``, the traced step;
    ``passes`` is of another step, which CUDA events alone measured. The trace is not kept: it has hundreds of MB."""
    config = loaded(text)
    shape = resolve(config.model, None)
    start = groups.start(
        config.layout(identity.world_size), identity, device=device, seed=1,
        parallel=config.parallel,
    )  # fmt: skip
    with start as ranks, overlap_of_tp(config, shape, ranks), tempfile.TemporaryDirectory() as folder:
        parts = build_parts(config, shape, ranks)
        dp = ranks.layout.dp
        stream = RandomTokens(config, shape.vocab_size, dp=dp, dp_rank=ranks.at.dp, device=ranks.device)
        progress, ranges, path = Progress(), StepRanges(parts.chunks), Path(folder, "trace.json")

        def step() -> None:
            nonlocal progress
            progress, _ = one_step(parts, stream, progress, StepRequests())
            wait(ranks.device)

        for _ in range(warmup_steps):
            step()
        clock = StepClock(parts.chunks, ranks.device)
        ranges.add(clock)
        step()
        ranges.remove(clock)
        trace = TorchTrace(ProfileConfig(), ranges, ranks)
        trace.prepare()
        step()  # CUPTI's first one is slow
        trace.begin()
        trace.begin_iteration(progress.iteration + 1)
        step()
        trace.end_iteration()
        trace.end(path)
        if ranks.rank:
            return {}
        return found_in(read_trace(path), clock.read(), device) | {"layers": shape.num_layers}


def found_in(events: list[TraceEvent], measured: Measured | None, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """As JSON."""
    summary = summarize(events, 0, device)
    (step,) = (one for one in events if one.category == ANNOTATIONS and iteration_of(one.name) is not None)
    window = step.begin_s, step.end_s
    return {
        "window_s": summary.window_s,
        "kinds": kernel_kinds.shares(events, window),
        "gaps": kernel_kinds.gaps(events, window),
        "kernels": [dataclasses.asdict(row) for row in summary.kernels],
        "host_waits": [dataclasses.asdict(row) for row in summary.host_waits],
        "host_wait_s": summary.host_wait_s,
        "phases": {row.name: row.total_s for row in summary.phases},
        "passes": passes(measured),
    }


def passes(measured: Measured | None) -> dict[str, float]:
    """Forward, backward, reduction and update, all microbatches together; and the whole step."""
    found = defaultdict[str, float](float)
    for span in measured.spans if measured else ():
        found[span.kind] += span.end_s - span.begin_s
    return dict(found) | ({"step": measured.step_s} if measured else {})
