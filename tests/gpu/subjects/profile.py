"""What a step's time goes to on the GPU: kinds of kernels, the longest of them, waits of the host, idle gaps."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.gpu import measured_models
from tests.gpu.kernel_kinds import IDLE
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.throughput import ROWS
from training.config.recipe import dump
from training.config.run_config import RunConfig

PROFILED = ("bf16", "fp8")
"""Throughput's rows of the same names, with as many layers."""
SHOWN = 8
"""Kernels among the lines; twenty are among the numbers."""
ROW_S = 20.0


def profile(run: SubjectRun) -> None:
    """One step of each, data-parallel over all GPUs; what rank 0's does."""
    run.numbers.setdefault("rows", {})
    for name in PROFILED:
        run.part(name, partial(one_row, run, name), least_s=ROW_S)


def one_row(run: SubjectRun, name: str) -> None:
    """Its numbers, and lines. Raises UnrunError where the card has no fp8."""
    if name == "fp8" and not (run.machine.has_te and run.machine.has_fp8):
        raise UnrunError("Transformer Engine and fp8 tensor cores are not both here")
    gpus, config = len(run.machine.gpus), config_of(run, name)
    found = run.measured("step_profile", gpus, text=dump(config), warmup_steps=run.sizes.warmup_steps)[0]
    run.numbers["rows"][name] = found
    run.say(*lines(name, found))
    if found["kernels"]:
        first = list(found["kinds"].items())[:3]
        parts = ", ".join(f"{kind} {share(spent, found)}" for kind, spent in first)
        run.headline += f"{'; ' if run.headline else ''}{name} {found['window_s']:.3f} s: {parts}"
    else:
        run.say(f"{name}: the trace has no kernels: CUPTI could record none")


def config_of(run: SubjectRun, name: str) -> RunConfig:
    """Throughput's own recipe, where it has run before."""
    rows = run.earlier.get("throughput", {}).get("numbers", {}).get("rows", {})
    if name in rows:
        return measured_models.loaded(rows[name]["recipe"])
    return measured_models.of_role(run.machine, run.sizes, "dense", run.sizes.most_layers, ROWS[name])


def lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{name}: {found['layers']} layers, {found['window_s']:.4g} s under the profiler"
    yield f"  kinds: {', '.join(f'{kind} {share(spent, found)}' for kind, spent in found['kinds'].items())}"
    yield f"  passes, by CUDA events: {', '.join(f'{kind} {spent:.4g} s' for kind, spent in found['passes'].items())}"
    gaps = found["gaps"]
    yield (
        f"  {IDLE}: {gaps['count']} gaps, {share(gaps['total_s'], found)}, the longest {gaps['longest_s'] * 1e3:.3g} "
        f"ms; the host waits {share(found['host_wait_s'], found)}"
    )
    for row in found["kernels"][:SHOWN]:
        yield f"  {share(row['total_s'], found):>6} {row['calls']:5} x {row['name'][:90]}"


def share(spent: float, found: dict[str, Any]) -> str:
    """Of the traced step."""
    return f"{spent / found['window_s']:.1%}"
