"""On a rank: how long training stands still for a checkpoint in the background, and how long a bare copy takes."""

import time
from pathlib import Path
from typing import Any, Literal

import torch

from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from tests.gpu.measured_models import loaded
from tools.plan.calibrate.measure import middle_s, wait
from training.checkpoint import Contents
from training.checkpoint.callback import SaveCallback
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests
from training.train import one_step

SAVES, STEPS_BETWEEN = 3, 3
BUFFER_BYTES = 2**28


def measure(identity: Identity, text: str, folder: str, device: Literal["cpu", "cuda"] = "cuda") -> dict[str, Any]:
    """Medians are for the caller: seconds of every plain step, of every step with a save before it, and of its stall.

    folder: on the disk that checkpoints go to, the same on all ranks.
    """
    config = loaded(text)
    shape, layout = resolve(config.model, None), config.layout(identity.world_size)
    with groups.start(layout, identity, device=device, seed=1) as ranks:
        parts = build_parts(config, shape, ranks)
        stream = RandomTokens(config, shape.vocab_size, dp=layout.dp, dp_rank=ranks.at.dp, device=ranks.device)
        saves = SaveCallback(Path(folder), Contents(keep=1), parts)
        progress = Progress()

        def step() -> float:
            nonlocal progress
            began = time.perf_counter()
            update = saves.before_update
            progress, result = one_step(parts, stream, progress, StepRequests(), before_update=update)
            wait(ranks.device)
            saves.after_step(progress, result)
            return time.perf_counter() - began

        step()  # moments exist from here on
        saves.start(progress)
        found: dict[str, Any] = {"own_bytes": saves.own_bytes, "plain_s": [], "saving_s": [], "stall_s": []}
        found["background"] = saves.writer is not None and not saves.waits
        for _ in range(SAVES):
            found["plain_s"] += [step() for _ in range(STEPS_BETWEEN)]
            began = time.perf_counter()
            saves(progress)
            step()
            found["saving_s"].append(time.perf_counter() - began)
            found["stall_s"].append(saves.stall_s)
            saves._hear(600.0)
        found["pinned"] = saves.writer is not None and saves.writer.is_pinned
        saves.stop(progress, "done")
        found["copy_gb_per_s"] = copy_gb_per_s(ranks.device)
    return found


def copy_gb_per_s(device: torch.device) -> float:
    """Of a plain copy to pinned memory."""
    source = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return BUFFER_BYTES / middle_s(lambda: target.copy_(source, non_blocking=True), device) / 1e9
