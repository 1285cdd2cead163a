"""RUN_DIR/skipped_samples.json: batches that made the loss jump, whose updates are skipped from then on.

A range is [first, end) of the run's samples in the order in which it reads them, so it means the same in any layout.
The batch is read and computed, and its gradients are dropped: data position and schedule go on as if it had counted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel.groups import Ranks
from program.durable import replace_file
from program.schema import Count
from program.untrusted import InputError, read_json
from training.checkpoint.agreement import on_first_rank

NAME = "skipped_samples.json"
Range = tuple[int, int]


@dataclass(kw_only=True, slots=True, frozen=True)
class Skipped:
    """The content of NAME."""

    ranges: tuple[tuple[Count, Count], ...]


class SkippedBatches:
    """The ranges, the same on every rank: those that the file had at the start, and those of the checkpoint."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.path, self.ranks = run_dir / NAME, ranks
        self.ranges, problem = on_first_rank(partial(_read, self.path), ranks)
        if problem:
            ranks.say(f"warning: {self.path} is left out: {problem}")

    def holds(self, first: int, end: int) -> bool:
        """Whether any of these samples is to be skipped."""
        return any(begin < end and first < stop for begin, stop in self.ranges)

    def add(self, first: int, end: int) -> str:
        """Note a batch for all starts to come: empty, or why the file could not be written. Collective."""
        self.ranges = sorted({*self.ranges, (first, end)})
        return on_first_rank(partial(_write, self.path, self.ranges), self.ranks)

    def state(self) -> list[list[int]]:
        """For a checkpoint: a run that continues it elsewhere skips them too."""
        return [list(one) for one in self.ranges]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Those of a checkpoint, in addition."""
        self.ranges = sorted({*self.ranges, *((first, end) for first, end in state)})


def _read(path: Path) -> tuple[list[Range], str]:
    try:
        return sorted(read_json(path, Skipped).ranges), ""
    except FileNotFoundError:
        return [], ""
    except (OSError, InputError) as error:
        return [], str(error)


def _write(path: Path, ranges: Sequence[Range]) -> str:
    what = "Samples [first, end) in reading order; updates with any of them are skipped. Remove what shall count."
    try:
        text = json.dumps({"what": what, "ranges": ranges}, indent=2) + "\n"
        replace_file(path, text.encode(), suffix=".unfinished", durable=False)
    except OSError as error:
        return error.strerror or str(error)
    return ""
