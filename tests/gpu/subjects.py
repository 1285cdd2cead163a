"""The subjects: what is run for each, in processes of its own, and when it counts as passed."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.machine import MULTI_RANK_NCCL, GpuMachine
from tools.benchmark.circumstances import ROOT

SPEC_BOUNDS = {
    "fp32": {"logits": 1e-4, "gradient": 1e-3},
    "bf16": {"logits": 3e-2, "gradient": 4e-2},
}
"""Largest differences between the two specs, relative to a tensor's largest element. On a CPU our bf16 is 1.1e-2
(logits) and 1.4e-2 (gradient) away from our fp32; two models that round differently, about twice that."""

FP8_BOUND = 0.02
"""Largest difference of an fp8 loss from the bf16 loss of the same step, relative."""

LAYOUT_BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4}
"""As in tools.parity, a digit looser for gradients: GPU kernels sum in an order that depends on the shape."""

FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Real fp32 products from every library: Transformer Engine would otherwise use TF32 (10 bits)."""

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
LAYOUTS = {
    8: ["tp2sppp2dp2", "tp2pp2vpp2dp2"],
    4: ["tp2sppp2", "tp2spdp2overlap", "pp2dp2overlap"],
    2: ["tp2sp", "pp2", "dp2overlap"],
}
"""Ranks -> layouts that use all of them."""


class UnrunError(Exception):
    """The subject cannot be tried on this machine; the message says what is missing."""


@dataclass(kw_only=True)
class SubjectOutcome:
    """What a subject found. It has passed when there are no problems."""

    lines: list[str]
    numbers: dict[str, Any]
    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class Attempt:
    """Layouts to try on so many ranks."""

    ranks: int
    shared: bool
    """Several ranks to a GPU."""


def ranks_of(
    measurement: str,
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    limit_s: float = 600,
    **arguments: object,
) -> list[Any]:
    """What every rank of a measurement (a module of this package) found; each has new processes.

    Raises RuntimeError with the end of the output where a rank failed or ``limit_s`` seconds were not enough.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="triplane-gpu-") as folder:
        task = Path(folder, "task.json")
        task.write_text(json.dumps({"measurement": measurement, "world_size": world_size, "arguments": arguments}))
        run([sys.executable, "-m", "tests.gpu.rank", str(task)], environ or {}, limit_s)
        notes = [Path(folder, f"{rank}.pt") for rank in range(world_size)]
        return [torch.load(note, map_location="cpu", weights_only=False) for note in notes]


def run(command: list[str], environ: Mapping[str, str], limit_s: float) -> str:
    """The command's output. Raises RuntimeError, with its end, where it fails or outlasts the limit."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, **environ), stdout=output, stderr=output)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()
            code = None
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        raise RuntimeError(f"exit code {code}: {text[-1500:].strip()}")
    if code is None:
        raise RuntimeError(f"stopped after {limit_s:.0f} s: {text[-1500:].strip()}")
    return text


# ---- Transformer Engine's modules against ours


def specs(machine: GpuMachine) -> SubjectOutcome:
    """Logits and every gradient of both on the same weights: several architectures in fp32, one in bf16."""
    if not machine.has_te:
        raise UnrunError("transformer-engine is not installed (pip install --no-build-isolation -e '.[te]')")
    (found,) = ranks_of("specs", environ=FP32)
    outcome = SubjectOutcome(lines=[], numbers=found)
    for dtype, bounds in SPEC_BOUNDS.items():
        for model, row in found[dtype].items():
            what = f"{dtype}, {model}"
            gradient = f"worst gradient {row['gradient']:.1e} ({row['worst']})"
            outcome.lines.append(f"{what}: logits {row['logits']:.1e}, {gradient}")
            outcome.problems += beyond(row, bounds, what)
    return outcome


def beyond(found: Mapping[str, float], bounds: Mapping[str, float], what: str) -> list[str]:
    """One line for each number above its bound, NaN included."""
    return [
        f"{what}: {name} differs by {found[name]:.1e}, more than {bound:.0e}"
        for name, bound in bounds.items()
        if not found[name] <= bound
    ]


# ---- fp8 against bf16


def fp8(machine: GpuMachine) -> SubjectOutcome:
    """Losses of 20 steps from the same weights on the same tokens."""
    if not machine.has_te or not machine.has_fp8:
        missing = "fp8 tensor cores (compute capability 8.9 or higher)" if machine.has_te else "transformer-engine"
        raise UnrunError(f"{missing} missing")
    (plain,) = ranks_of("losses", dtype="bf16")
    (hybrid,) = ranks_of("losses", dtype="bf16", fp8="hybrid")
    return judge_fp8(plain["loss"], hybrid["loss"])


def judge_fp8(plain: list[float], hybrid: list[float]) -> SubjectOutcome:
    """Both losses must fall, and stay together within ``FP8_BOUND``."""
    from tools.parity.compare import furthest

    difference = furthest(hybrid, plain)
    ends = f"bf16 {plain[0]:.3f} -> {plain[-1]:.3f}, fp8 {hybrid[0]:.3f} -> {hybrid[-1]:.3f}"
    outcome = SubjectOutcome(
        lines=[f"{ends}, apart {difference:.1e}"],
        numbers={"bf16": plain, "fp8": hybrid, "difference": difference},
        problems=beyond({"loss": difference}, {"loss": FP8_BOUND}, "fp8 against bf16"),
    )
    for name, losses in (("bf16", plain), ("fp8", hybrid)):
        if not losses[-1] < losses[0]:
            outcome.problems.append(f"{name}: the loss does not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return outcome


# ---- tests marked gpu


def tests(_: GpuMachine) -> SubjectOutcome:
    """pytest -m gpu."""
    text = run([sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu"], {}, 1200)
    return SubjectOutcome(lines=[text.strip().splitlines()[-1]], numbers={"summary": text.strip().splitlines()[-1]})


# ---- layouts


def attempts(gpus: int, nccl: tuple[int, ...]) -> Iterator[Attempt]:
    """Numbers of ranks to try, best first: TP2 x PP2 x DP2 on 8 GPUs, on shared GPUs, else what fits."""
    if gpus < 8 and nccl >= MULTI_RANK_NCCL:
        yield Attempt(ranks=8, shared=True)
    for ranks in LAYOUTS:
        if ranks <= gpus:
            yield Attempt(ranks=ranks, shared=False)
            return


def layouts(machine: GpuMachine) -> SubjectOutcome:
    """The first attempt whose ranks start, against one rank: loss, gradient norm, gradients of step 1."""
    outcome = SubjectOutcome(lines=[], numbers={})
    for attempt in attempts(len(machine.gpus), machine.nccl):
        try:
            return try_layouts(attempt, outcome)
        except RuntimeError as error:
            if not attempt.shared:
                raise
            outcome.lines.append(f"several ranks on one GPU did not work: {str(error).splitlines()[-1]}")
            outcome.numbers = {"shared_gpu_failed": str(error)}
    said = "; ".join(outcome.lines) or f"NCCL {machine.nccl_name} puts no two ranks on one GPU (2.30 does)"
    raise UnrunError(f"{len(machine.gpus)} GPU is too few for TP, PP or DP: {said}")


def try_layouts(attempt: Attempt, outcome: SubjectOutcome) -> SubjectOutcome:
    """Every layout of an attempt. Raises RuntimeError where ranks fail."""
    from tests.gpu.observe import configuration
    from tools.parity.compare import Observed, assemble, furthest, worst_gradient

    environ = FP32 | (SHARED_GPU if attempt.shared else {})

    def observe(layout: str) -> Observed:
        config, world_size = configuration(layout)
        limit_s = 240 if attempt.shared else 600
        return assemble(ranks_of("observe", world_size, environ, limit_s, layout=layout), config, world_size, Path())

    reference = observe("tp1")
    for layout in LAYOUTS[attempt.ranks]:
        seen = observe(layout)
        gradient, worst, missing = worst_gradient(seen.gradients, reference.gradients)
        row = {
            "loss": furthest(seen.loss, reference.loss),
            "grad_norm": furthest(seen.grad_norm, reference.grad_norm),
            "gradient": gradient,
        }
        outcome.numbers[layout] = row | {"worst": worst, "ranks": attempt.ranks, "shared_gpu": attempt.shared}
        where = "ranks sharing GPUs" if attempt.shared else "GPUs"
        numbers = ", ".join(f"{name} {value:.1e}" for name, value in row.items())
        outcome.lines.append(f"{layout} on {attempt.ranks} {where}: {numbers} (worst {worst})")
        outcome.problems += beyond(row, LAYOUT_BOUNDS, layout) + [f"{layout}: {problem}" for problem in missing]
    return outcome


# ---- throughput


def throughput(machine: GpuMachine) -> SubjectOutcome:
    """Each row of the table, data-parallel over all GPUs; a row that fails (memory, say) is a problem."""
    from tests.gpu.throughput import ROWS

    outcome = SubjectOutcome(
        lines=[f"{'':16} {'tokens/s/GPU':>12} {'TFLOPS/GPU':>10} {'MFU':>6} {'peak GiB':>8}"], numbers={}
    )
    for row, (_, precision, _) in ROWS.items():
        if precision.fp8 and not (machine.has_te and machine.has_fp8):
            continue
        try:
            found = ranks_of("throughput", len(machine.gpus), row=row)[0]
        except RuntimeError as error:
            outcome.problems.append(f"{row}: {str(error).splitlines()[-1]}")
            continue
        outcome.numbers[row] = found
        mfu = "?" if found["mfu"] is None else f"{found['mfu']:.1%}"
        rates = f"{found['tokens_per_s_per_gpu']:12,.0f} {found['model_tflops_per_gpu']:10.1f}"
        outcome.lines.append(f"{row:16} {rates} {mfu:>6} {found['peak_memory_gib']:8.1f}")
    return outcome


SUBJECTS: dict[str, Callable[[GpuMachine], SubjectOutcome]] = {
    "specs": specs, "fp8": fp8, "tests": tests, "layouts": layouts, "throughput": throughput,
}  # fmt: skip


def guarded(subject: str, machine: GpuMachine) -> tuple[str, SubjectOutcome]:
    """A subject's verdict (passed, failed, unrun) and outcome, whatever happens in it."""
    try:
        outcome = SUBJECTS[subject](machine)
    except UnrunError as error:
        return "unrun", SubjectOutcome(lines=[str(error)], numbers={})
    except Exception as error:  # one subject must not stop the others
        return "failed", SubjectOutcome(lines=[], numbers={}, problems=[f"{type(error).__name__}: {error}"])
    return ("failed" if outcome.problems else "passed"), outcome


def record(verdict: str, outcome: SubjectOutcome) -> dict[str, Any]:
    """For the JSON."""
    return {"verdict": verdict} | dataclasses.asdict(outcome)
