"""On one card: one rank of a job whose other ranks do not exist, by a fake process group: its seconds and its bytes.

Nothing is sent, so that a step's time is what this rank computes: no collective is waited for, and no pipeline is
empty. All else is the run's own: groups, model, DDP or FSDP, optimizer, schedule with its microbatches in flight.
"""

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from data.loader import Batch
from models.costs.predict import of_stage
from models.layers import cross_entropy
from models.resolve import resolve
from parallel import groups
from parallel.groups import Ranks
from parallel.launch import Identity
from tests.benchmarks.step.one_rank import RandomTokens
from tests.gpu.arrivals import filled
from tests.gpu.measured_models import loaded
from tests.gpu.steps import take
from training.batches import context_slice
from training.config.run_config import RunConfig
from training.memory.measured import Counted, modules_of
from training.memory.planned import as_case
from training.parts.model import build_parts

WARMUP_STEPS = 2
"""The first allocates the optimizer's moments, and the allocator asks CUDA for memory."""


class OwnTokens(RandomTokens):
    """A context rank's piece of each sample."""

    def __init__(self, config: RunConfig, ranks: Ranks, vocab_size: int) -> None:
        super().__init__(config, vocab_size, dp=ranks.layout.dp, dp_rank=ranks.at.dp, device=ranks.device)
        self.ranks = ranks

    def next(self, seq_length: int) -> list[Batch | None]:
        """Batch tensors are [b, s/cp]."""
        return [batch and context_slice(batch, self.ranks) for batch in super().next(seq_length)]


def measure(identity: Identity, text: str, job_size: int, rank: int | None, steps: int) -> dict[str, Any]:
    """Of a recipe's text: the median step after two that warm up, and bytes at the peak of all.

    ``measured`` is the allocator's, ``predicted`` the same tensors of this rank's stage. The peak of building does not
    count: ZeRO-3 builds whole weights. rank: the one that is played; None: this process is one of ``job_size`` ranks
    that do exist (a test holds a played one against these).
    """
    config = loaded(text)
    if rank is not None:
        identity = replace(identity, rank=rank, world_size=job_size)
    shape = resolve(config.model, None)
    with group(config, identity, played=rank is not None) as ranks:
        parts = build_parts(config, shape, ranks)
        torch.cuda.reset_peak_memory_stats(ranks.device)
        taken = take(WARMUP_STEPS + steps, parts, OwnTokens(config, ranks, shape.vocab_size))
        expected = of_stage(as_case(config, job_size, shape, modules_of(ranks)), shape, ranks.at.pp)
    times_s, result = taken.times_s[WARMUP_STEPS:], taken.results[-1]
    return {
        "stage": expected.stage,
        "loss": result.loss,
        "updated": not result.skipped,
        "step_s": statistics.median(times_s),
        "slowest_step_s": max(times_s),
        "measured": taken.held._asdict() | {"total": taken.held.total},
        "predicted": {name: getattr(expected, name) for name in (*Counted._fields, "activations", "tensors")},
    }


@contextlib.contextmanager
def group(config: RunConfig, identity: Identity, *, played: bool) -> Iterator[Ranks]:
    """The run's groups: fake ones, or those of ranks that exist."""
    layout, graphs = config.layout(identity.world_size), config.kernels.graphs
    if not played:
        with groups.start(layout, identity, device="cuda", seed=1, parallel=config.parallel, graphs=graphs) as ranks:
            yield ranks
        return
    with groups.pretend(layout, identity, device="cuda", parallel=config.parallel, graphs=graphs) as ranks, filled():
        vars(cross_entropy)["disproof"] = believed
        yield ranks


def believed(*_: object) -> str:
    """In place of ``disproof``, to which sums over a vocabulary whose other parts do not exist are wrong: Transformer
    Engine's cross entropy runs wherever a real rank would try it."""
    return ""
