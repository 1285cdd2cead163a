"""Whether the shards under a run are still the files that it opened: who writes over one changes what is trained on."""

import time
from pathlib import Path

from data.prepared import Prepared
from parallel.groups import Ranks
from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepResult

INTERVAL_S = 60.0
"""Between two looks while training goes on; one more comes with each checkpoint, and one at the end."""
MOST_NAMED = 5


class DataWatch(Callback):
    """Looks on rank 0, and names each file that has changed once. Costs two calls of stat for a shard."""

    def __init__(self, prepared: Prepared, ranks: Ranks) -> None:
        every = [prepared, *prepared.validation_sets.values()] if ranks.rank == 0 else []
        self.shards = [shard for one in every for shard in one.shards]
        self.say, self.looked_s, self.said = ranks.say, time.monotonic(), set[str]()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if time.monotonic() > self.looked_s + INTERVAL_S:
            self.look()

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self.look()

    def stop(self, progress: Progress, reason: Reason) -> None:
        self.look()

    def look(self) -> None:
        """Say what has changed since the last look."""
        fresh = sorted({text for shard in self.shards for text in shard.changes()} - self.said)
        self.said.update(fresh)
        self.looked_s = time.monotonic()
        for text in fresh[:MOST_NAMED]:
            self.say(
                f"warning: data: {text} since this run opened it: what is read from it is not what the run began with, "
                "nor what a resume will find"
            )
        if len(fresh) > MOST_NAMED:
            self.say(f"warning: data: and {len(fresh) - MOST_NAMED} more files of shards have changed")
