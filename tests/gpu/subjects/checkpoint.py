"""How long training stands still for a checkpoint, against a bare copy of as many bytes to pinned memory."""

import statistics
import tempfile
from typing import Any

from models.costs.parameters import num_parameters
from program import host_memory
from tests.benchmarks.circumstances import ROOT
from tests.gpu import measured_models
from tests.gpu.subject_run import SubjectRun, UnrunError
from training.config.recipe import dump
from training.config.run_config import RunConfig

SAVED_BYTES = 12
"""Of a parameter: an fp32 weight and two fp32 moments."""
HOST_SHARE = 0.25
"""Of the free host memory, for all ranks' copies."""


def checkpoint(run: SubjectRun) -> None:
    """Saves in the background between steps, on all GPUs; the slowest rank counts. Files go into build/ meanwhile."""
    config = that_fits_the_host(run)
    scratch = ROOT / "build"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prove-gpu-", dir=scratch, ignore_cleanup_errors=True) as folder:
        ranks = run.measured("stall", len(run.machine.gpus), text=dump(config), folder=folder)
    row = stalls(ranks)
    run.numbers = row
    size = f"{row['own_bytes'] / 2**30:.3g} GiB a rank"
    run.say(f"{size}; a copy to pinned memory: {row['copy_gb_per_s']:.3g} GB/s, {row['limit_s']:.3g} s at best")
    run.say(f"training stood still for {row['stall_s']:.3g} s, {row['stall_s'] / row['limit_s']:.2f} of that copy")
    run.headline = f"{row['stall_s']:.3g} s of standstill; a bare copy takes {row['limit_s']:.3g} s"
    run.say(f"a step takes {row['plain_s']:.4g} s, with a save before it {row['saving_s']:.4g} s")
    if not row["background"]:
        run.problem("the host has no memory for a copy: checkpoints were not written in the background")
    elif not row["pinned"]:
        run.problem("memory could not be pinned (cudaHostRegister): checkpoints copy slowly")


def that_fits_the_host(run: SubjectRun) -> RunConfig:
    """As many layers as ranks' copies have room for in host memory."""
    room = min(run.sizes.checkpoint_bytes, HOST_SHARE * host_memory.available_bytes())
    for layers in range(run.sizes.few_layers, 0, -1):
        config = measured_models.of_role(run.machine, run.sizes, "small", layers)
        if saved_bytes(config) <= room:
            return config
    raise UnrunError(f"{room / 2**30:.1f} GiB of host memory are too few for a copy of one layer's checkpoint")


def saved_bytes(config: RunConfig) -> float:
    """Of a whole checkpoint."""
    return SAVED_BYTES * num_parameters(measured_models.shape_of(config))


def stalls(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's medians, and the limit of its own copy."""
    slowest = max(ranks, key=lambda rank: statistics.median(rank["stall_s"]))
    found = {name: statistics.median(slowest[name]) for name in ("stall_s", "plain_s", "saving_s")}
    rate = min(rank["copy_gb_per_s"] for rank in ranks)
    return found | {
        "own_bytes": slowest["own_bytes"],
        "copy_gb_per_s": rate,
        "limit_s": slowest["own_bytes"] / rate / 1e9,
        "background": all(rank["background"] for rank in ranks),
        "pinned": all(rank["pinned"] for rank in ranks),
    }
