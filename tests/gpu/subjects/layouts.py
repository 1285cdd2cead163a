"""TP, PP and DP against one rank: on as many GPUs as there are, or with several ranks to a card."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.machine import MULTI_RANK_NCCL, GpuMachine
from tests.gpu.subject_run import SubjectRun, UnrunError
from tests.gpu.subjects.modules import FP32, beyond

LAYOUT_BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4}
"""As in tools.parity, a digit looser for gradients: GPU kernels sum in an order that depends on the shape."""

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
LAYOUTS = {
    8: ["tp2sppp2dp2", "tp2pp2vpp2dp2"],
    4: ["tp2sppp2", "tp2spdp2overlap", "pp2dp2overlap"],
    2: ["tp2sp", "pp2", "dp2overlap"],
}
"""Ranks -> layouts that use all of them."""
SHARE_OF_TIME = 0.5
"""Of the time then, for the attempt with several ranks to a card, which may hang."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attempt:
    """Layouts to try on so many ranks."""

    ranks: int
    shared: bool
    """Several ranks to a GPU."""


def attempts(gpus: int, nccl: tuple[int, ...]) -> Iterator[Attempt]:
    """Numbers of ranks to try, best first: TP2 x PP2 x DP2 on 8 GPUs, on shared GPUs, else what fits."""
    if gpus < 8 and nccl >= MULTI_RANK_NCCL:
        yield Attempt(ranks=8, shared=True)
    for ranks in LAYOUTS:
        if ranks <= gpus:
            yield Attempt(ranks=ranks, shared=False)
            return


def shared_gpu(machine: GpuMachine, ranks: int) -> dict[str, str] | None:
    """Of the environment, for so many ranks; None: neither are there as many GPUs, nor can NCCL share one."""
    if ranks <= len(machine.gpus):
        return {}
    return SHARED_GPU if machine.nccl >= MULTI_RANK_NCCL else None


def layouts(run: SubjectRun) -> None:
    """The first attempt whose ranks start, against one rank: loss, gradient norm, gradients of step 1."""
    for attempt in attempts(len(run.machine.gpus), run.machine.nccl):
        try:
            return try_layouts(attempt, run)
        except RuntimeError as error:
            if not attempt.shared:
                raise
            run.say(f"several ranks on one GPU did not work: {str(error).splitlines()[-1]}")
            run.note("shared_gpu_failed", str(error))
    said = "; ".join(run.lines) or f"NCCL {run.machine.nccl_name} puts no two ranks on one GPU (2.30 does)"
    raise UnrunError(f"{len(run.machine.gpus)} GPU is too few for TP, PP or DP: {said}")


def try_layouts(attempt: Attempt, run: SubjectRun) -> None:
    """Every layout of an attempt. Raises RuntimeError where ranks fail."""
    from tests.gpu import processes
    from tests.gpu.observe import configuration
    from tools.parity.compare import Observed, assemble, furthest, worst_gradient

    environ = FP32 | (SHARED_GPU if attempt.shared else {})

    def observe(layout: str) -> Observed:
        config, world_size = configuration(layout)
        limit_s = min(240, run.left_s * SHARE_OF_TIME) if attempt.shared else min(600, run.left_s)
        found = processes.ranks_of("observe", world_size, environ, limit_s, layout=layout)
        return assemble(found, config, world_size, Path())

    reference = observe("tp1")
    for layout in LAYOUTS[attempt.ranks]:
        seen = observe(layout)
        gradient, worst, missing = worst_gradient(seen.gradients, reference.gradients)
        row = {
            "loss": furthest(seen.loss, reference.loss),
            "grad_norm": furthest(seen.grad_norm, reference.grad_norm),
            "gradient": gradient,
        }
        run.note(layout, row | {"worst": worst, "ranks": attempt.ranks, "shared_gpu": attempt.shared})
        where = "ranks sharing GPUs" if attempt.shared else "GPUs"
        numbers = ", ".join(f"{name} {value:.1e}" for name, value in row.items())
        run.say(f"{layout} on {attempt.ranks} {where}: {numbers} (worst {worst})")
        run.problem(*beyond(row, LAYOUT_BOUNDS, layout), *(f"{layout}: {problem}" for problem in missing))
