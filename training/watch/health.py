"""All that watches a run from within, built in one place: the gate before updates, and what is looked at in between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from parallel.groups import Ranks
from training.checkpoint.model_state import Chunks, settled
from training.checkpoint.progress import Progress
from training.loop import Attachment
from training.watch.config import FaultConfig
from training.watch.gate import HealthGate
from training.watch.memory_growth import MemoryGrowth
from training.watch.nonfinite import NonFinite
from training.watch.passed_over import PassedOver
from training.watch.poison import refuse_poison
from training.watch.replicas import Replicas
from training.watch.stopwatch import Stopwatch
from training.watch.stragglers import Stragglers

ENTRY = "watch"
"""What a checkpoint's ``state.json`` has of this, among its entries."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Health:
    """What a run's parts need of it."""

    gate: HealthGate
    attachments: Sequence[Attachment]
    chunks: Chunks
    optimizer: MegatronOptimizer
    ranks: Ranks

    def before_save(self, progress: Progress) -> dict[str, Any]:
        """What a checkpoint must have of this. Raises SharedFault, on every rank, for a state that may not be saved."""
        refuse_poison(progress, self.chunks, self.optimizer, self.ranks)
        if self.gate.replicas is not None:
            with settled(self.chunks):
                self.gate.replicas.check(progress)
        return {ENTRY: self.gate.state()}


def watch(
    fault: FaultConfig,
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    ranks: Ranks,
    run_dir: Path,
    entries: Mapping[str, Any],
) -> Health:
    """entries: those of the checkpoint that the run continues, if any."""
    replicas = Replicas(chunks, optimizer, ranks) if fault.replica_check_interval else None
    nonfinite = NonFinite(fault.nonfinite, chunks, ranks, run_dir)
    gate = HealthGate(fault, nonfinite, replicas, PassedOver(run_dir, ranks), ranks)
    gate.restore(entries.get(ENTRY))
    attachments: list[Attachment] = [gate]
    if fault.straggler_interval:
        watch = Stopwatch(chunks, ranks)
        attachments.append(Stragglers(watch, fault.straggler_interval, fault.straggler_ratio, ranks))
    if fault.memory_interval:
        attachments.append(MemoryGrowth(fault.memory_interval, fault.memory_growth_mib, ranks))
    return Health(gate=gate, attachments=attachments, chunks=chunks, optimizer=optimizer, ranks=ranks)
