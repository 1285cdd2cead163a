"""Run a check on several ranks from plain pytest: forked from this process, which imports and never computes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import prometheus_client  # noqa: F401  (every run's first rank writes metrics.prom)

from parallel.lean_imports import lean

with lean("cpu"):  # as pretrain_gpt.py does: torch and megatron once, so that forked ranks start at once
    import training.train  # noqa: F401
    from parallel import launch, local_ranks, mcore_patches

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

from training.run_dir import fingerprint

mcore_patches.check_once()  # as in pretrain_gpt.py, before ranks are forked
fingerprint.code_digest()  # kept: each rank of each run would read all sources


def run_ranks(world_size: int, check: Callable[..., Any], *args: object, log: Path | None = None) -> None:
    """Call ``check(identity, *args)`` on every rank; the first failing rank's traceback fails the test."""

    def run(identity: launch.Identity) -> int:
        check(identity, *args)
        return 0

    code, failure = local_ranks.fork_ranks(world_size, run)
    if failure is not None:
        raise AssertionError(f"rank {failure.rank}:\n{failure.text}")
    assert code == 0
