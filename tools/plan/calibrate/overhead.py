"""What the real program's steps take on this CPU beside what their sizes explain: kernels' calls, Python, logging.

On a CPU this is most of a small model's step. It is measured with the smallest model, in one process, and put into two
constants that the planner has already: seconds of a kernel's call, and of a step.
"""

import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.costs.candidate import Candidate
from models.costs.sizes import sizes
from models.resolve import resolve
from parallel import output
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import Layout
from parallel.lean_imports import lean
from tools.clusters import Cluster
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import Constants
from tools.plan.cost.hardware import machine
from tools.plan.cost.step import step_times
from tools.plan.search.pricing import program
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig

SEQ_LENGTH = 64
LAYERS = (2, 6)
MICROBATCHES = (1, 4)
STEPS = 7


def measured(cluster: Cluster, constants: Constants) -> Constants:
    """``constants`` with launch_s and fixed_s of this machine. Nothing of torch may be computed here afterwards."""
    with tempfile.TemporaryDirectory() as logs, output.own_output(Path(logs), Identity(), every_rank=False):
        seconds = steps_s()  # torch and Megatron load here, and not quietly
    return explained(seconds, cluster, constants)


def explained(seconds: dict[tuple[int, int], float], cluster: Cluster, constants: Constants) -> Constants:
    """``constants`` with the launch_s and fixed_s, neither below 0, under which steps cost ``seconds``.

    A price is linear in both, so least squares of the relative errors give them. On a busy machine the products that
    were measured before can explain a step alone: a constant is then 0.

    seconds: by layers and microbatches.
    """
    none = dataclasses.replace(constants, launch_s=0.0, fixed_s=0.0)
    bare = np.array([_priced(*at, cluster, none) for at in seconds])
    calls = np.array([_priced(*at, cluster, dataclasses.replace(none, launch_s=1.0)) for at in seconds]) - bare
    found = np.array(list(seconds.values()))
    slopes = np.stack([calls, np.ones_like(calls)], axis=1) / found[:, None]
    left = (found - bare) / found
    launch_s, fixed_s = np.linalg.lstsq(slopes, left, rcond=None)[0]
    if launch_s < 0 or fixed_s < 0:  # the other one again, alone
        alone = np.maximum(0.0, slopes.T @ left / (slopes**2).sum(axis=0))
        launch_s, fixed_s = (0.0, alone[1]) if launch_s < 0 else (alone[0], 0.0)
    return dataclasses.replace(none, launch_s=float(launch_s), fixed_s=float(fixed_s))


def _priced(layers: int, microbatches: int, cluster: Cluster, constants: Constants) -> float:
    config = _config(layers, microbatches)
    model, layout = sizes(resolve(config.model, None), SEQ_LENGTH), Candidate(precision="fp32")
    layout = dataclasses.replace(layout, microbatches=microbatches)
    case = PricedCase(model=model, layout=layout, machine=machine(cluster, "fp32"), software=program(cluster))
    return float(step_times(PricedColumns([case]), constants).total[0])


def _config(layers: int, microbatches: int) -> RunConfig:
    return RunConfig(
        device="cpu",
        model=ModelConfig(shape="debug", num_layers=layers, seq_length=SEQ_LENGTH),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(global_batch_size=microbatches, micro_batch_size=1),
    )


def steps_s() -> dict[tuple[int, int], float]:
    """Seconds of the real program's ``train_step`` by layers and microbatches, the median of some.

    Taken in turns, so that whatever else runs here slows all of them alike.
    """
    with lean("cpu"):
        from parallel import groups
        from training.parts.model import build_parts

    with groups.pretend(Layout(), Identity()) as ranks:
        parts = {}
        for layers in LAYERS:
            config = _config(layers, 1)
            parts[layers] = build_parts(config, resolve(config.model, None), ranks)
        found: dict[tuple[int, int], list[float]] = {at: [] for at in itertools.product(LAYERS, MICROBATCHES)}
        for _ in range(STEPS + 1):
            for (layers, microbatches), times in found.items():
                times.append(_step_s(parts[layers], microbatches))
    return {at: statistics.median(times[1:]) for at, times in found.items()}


def _step_s(parts: Any, microbatches: int) -> float:
    import torch

    from data.loader import Batch
    from training.config.lr_schedule import ScheduledRates
    from training.step import StepRequests, train_step

    tokens = torch.randint(256, (1, SEQ_LENGTH))
    batch = Batch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(1, SEQ_LENGTH), position_ids=torch.arange(SEQ_LENGTH)[None],
        starts=None,
    )  # fmt: skip
    start = time.perf_counter()
    train_step(parts, [batch] * microbatches, ScheduledRates(1e-4, 0.1), StepRequests())
    return time.perf_counter() - start
