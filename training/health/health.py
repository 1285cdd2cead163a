"""All that watches a run's numbers, built in one place: the policy before updates, and the checks in between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint.model_state import settled
from training.health.finite_check import check_finite
from training.health.memory_growth import MemoryGrowth
from training.health.nonfinite import NonFinite
from training.health.replica_check import Replicas
from training.health.skipped_batches import SkippedBatches
from training.health.skipping import Skipping
from training.health.stragglers import Stopwatch, Stragglers
from training.health.update_policy import HealthPolicy
from training.loop import Callback
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import RankParts

ENTRY = "watch"
"""What a checkpoint's ``state.json`` has of this, among its entries."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Health:
    """What a run's parts need of it."""

    policy: HealthPolicy
    callbacks: Sequence[Callback]
    parts: RankParts

    def before_save(self, progress: Progress) -> dict[str, Any]:
        """What a checkpoint must have of this. Raises SharedFault, on every rank, for a state that may not be saved."""
        check_finite(progress, self.parts.chunks, self.parts.optimizer, self.parts.ranks)
        if self.policy.replicas is not None:
            with settled(self.parts.chunks):
                self.policy.replicas.check(progress)
        return {ENTRY: self.policy.state(), **self.policy.skipping.entry()}


def build_health(
    parts: RankParts, run_dir: Path, entries: Mapping[str, Any], skipping: Skipping, note: Note = unnoted
) -> Health:
    """entries: those of the checkpoint that the run continues, if any. note: keeps what is found."""
    fault, chunks, optimizer, ranks = parts.config.fault, parts.chunks, parts.optimizer, parts.ranks
    replicas = Replicas(chunks, optimizer, ranks) if fault.replica_check_interval else None
    nonfinite = NonFinite(fault.nonfinite, chunks, optimizer, ranks, run_dir, skipping.gaps, note)
    policy = HealthPolicy(fault, nonfinite, replicas, SkippedBatches(run_dir, ranks), skipping, ranks, note)
    policy.restore(entries.get(ENTRY))
    callbacks: list[Callback] = [policy, skipping]
    if every := fault.watch_interval:
        callbacks += [Stragglers(Stopwatch(chunks, ranks), every, ranks, note), MemoryGrowth(every, ranks, note)]
    return Health(policy=policy, callbacks=callbacks, parts=parts)
