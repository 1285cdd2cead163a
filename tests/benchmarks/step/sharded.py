"""Weights in shards (ZeRO-3) against ZeRO-1: CPU seconds of a step, and host memory of a rank.

Two ranks of each take their turns, a few steps a round, so that what slows the machine down slows both sides down.
Memory is that of four ranks of a model of 103 million parameters, building it and in its first steps.
"""

import ctypes
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from models.costs.parameters import num_parameters
from models.resolve import resolve
from parallel import groups, local_ranks
from parallel.launch import Identity
from program.untrusted import read_json, read_text
from tests.benchmarks.step.one_rank import WARMUP_STEPS, RandomTokens, configuration, cpu_seconds
from training import train
from training.config.run_config import RunConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

Strategy = Literal["optim", "optim_grads_params"]
SIDES: tuple[Strategy, Strategy] = ("optim", "optim_grads_params")
GOAL = 1.25
ROUNDS = 5
STEPS, MEMORY_STEPS = 4, 2
RANKS, MEMORY_RANKS = 2, 4
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt (malloc.h)."""
MIB = 2**20


def measure() -> dict[str, Any]:
    """Medians over all steps of both ranks, their ratio, and MiB of the fullest rank."""
    seconds: dict[Strategy, list[float]] = {side: [] for side in SIDES}
    for turn in range(ROUNDS):
        for side in SIDES if turn % 2 else reversed(SIDES):
            for rank in _on_ranks(RANKS, _config(configuration(), side, RANKS), STEPS, memory=False):
                seconds[side] += rank["step_cpu_s"]
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    large = configuration(12, 768, 12, 2048, vocab_size=11776, seq_length=256)
    memory = {}
    for side in SIDES:
        ranks = _on_ranks(MEMORY_RANKS, _config(large, side, MEMORY_RANKS), MEMORY_STEPS, memory=True)
        memory[side] = {name: max(rank[name] for rank in ranks) for name in ("building_mib", "built_mib", "step_mib")}
    return {
        "zero3_cpu_s": medians["optim_grads_params"], "zero1_cpu_s": medians["optim"],
        "ratio_cpu": medians["optim_grads_params"] / medians["optim"], "goal": GOAL, "memory": memory,
        "parameters_mib": ranks[0]["parameters_mib"], "unit_mib": ranks[0]["unit_mib"], "memory_ranks": MEMORY_RANKS,
    }  # fmt: skip


def _config(config: RunConfig, side: Strategy, ranks: int) -> RunConfig:
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, data_parallel_sharding_strategy=side),
        train=dataclasses.replace(config.train, global_batch_size=ranks),
    )


def _on_ranks(count: int, config: RunConfig, steps: int, *, memory: bool) -> list[dict[str, Any]]:
    """Each rank's figures. Raises RuntimeError with the traceback of a rank that failed."""
    with tempfile.TemporaryDirectory(prefix="triplane-benchmark-") as folder:

        def rank(identity: Identity) -> int:
            Path(folder, f"{identity.rank}").write_text(json.dumps(_measured(identity, config, steps, memory)))
            return 0

        _, failure = local_ranks.fork_ranks(count, rank)
        if failure is not None:
            raise RuntimeError(failure.text)
        return [read_json(Path(folder, f"{rank}")) for rank in range(count)]


def _measured(identity: Identity, config: RunConfig, steps: int, memory: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    if memory:  # what is freed is given back, so that what is held is seen; it costs page faults
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    shape, layout = resolve(config.model, None), config.layout(identity.world_size)
    with groups.start(layout, identity, device="cpu", seed=config.train.seed, parallel=config.parallel) as ranks:
        before = _resident("VmRSS")
        parts = build_parts(config, shape, ranks)
        building, built = _resident("VmHWM") - before, _resident("VmRSS") - before
        stream, progress = RandomTokens(config, shape.vocab_size, dp=layout.dp, dp_rank=ranks.at.dp), Progress()
        seconds = []
        for _ in range(WARMUP_STEPS + steps):
            began = cpu_seconds()
            progress, _ = train.one_step(parts, stream, progress, StepRequests())
            seconds.append(cpu_seconds() - began)
        return {
            "step_cpu_s": seconds[WARMUP_STEPS:],
            "building_mib": building,
            "built_mib": built,
            "step_mib": _resident("VmHWM") - before,
            "parameters_mib": 4 * num_parameters(shape, padded_vocab=True) / MIB,
            "unit_mib": 4 * shape.padded_vocab_size * shape.hidden_size / MIB,
        }


def _resident(name: str) -> float:
    """MiB: VmRSS of now, VmHWM at most since the process began."""
    line = next(line for line in read_text(Path("/proc/self/status")).splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
