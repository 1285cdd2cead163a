"""Whether the shards under a run are still the files that it opened: who writes over one changes what is trained on."""

import time
from collections.abc import Sequence
from pathlib import Path

from data.prepared import Prepared
from data.shards import Shard
from parallel.groups import Ranks
from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepResult

INTERVAL_S = 60.0
"""Between two looks while training goes on; one more comes with each checkpoint, and one at the end."""
MOST_AT_ONCE = 256
"""Shards at each of these but the last, in turn: a file server takes a millisecond for one, and training waits."""
MOST_NAMED = 5


class DataWatch(Callback):
    """Looks on rank 0, and names each file that has changed once. Costs two calls of stat for a shard."""

    def __init__(self, prepared: Prepared, ranks: Ranks) -> None:
        every = [prepared, *prepared.validation_sets.values()] if ranks.rank == 0 else []
        self.shards = [shard for one in every for shard in one.shards]
        self.say, self.looked_s, self.said, self.next = ranks.say, time.monotonic(), set[str](), 0

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if time.monotonic() > self.looked_s + INTERVAL_S:
            self.look(self._turn())

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.look(self._turn())

    def stop(self, progress: Progress, reason: Reason) -> None:
        self.look(self.shards)

    def _turn(self) -> list[Shard]:
        first = self.next if self.next < len(self.shards) else 0
        self.next = first + MOST_AT_ONCE
        return self.shards[first : self.next]

    def look(self, shards: Sequence[Shard]) -> None:
        """Say what has changed since the last look."""
        fresh = sorted({text for shard in shards for text in shard.changes()} - self.said)
        self.said.update(fresh)
        self.looked_s = time.monotonic()
        for text in fresh[:MOST_NAMED]:
            self.say(
                f"warning: data: {text} since this run opened it: what is read from it is not what the run began with, "
                "nor what a resume will find"
            )
        if len(fresh) > MOST_NAMED:
            self.say(f"warning: data: and {len(fresh) - MOST_NAMED} more files of shards have changed")
