"""A callback (``train.callbacks``) that writes down which sample a rank takes when, whole windows as they were read."""

import hashlib
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from training import batches

CALLBACK = f"{__name__}:RecordedSamples"


class RecordedSamples:
    """Of data rank r, RUN_DIR/samples-r.jsonl: [time, consumed samples before it, what it holds] of each sample."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def start(self, progress: Any) -> None:
        """Watch where batches come from."""
        run, at, layout = self.run, self.run.ranks.at, self.run.ranks.layout
        if at.tp or at.cp or at.pp:
            return
        plain_next, plain_batch = batches.BatchStream.next, batches.to_batch
        with (run.run_dir / f"samples-{at.dp}.jsonl").open("ab") as file:
            file.write(b"\n")  # behind what a kill has left
        begun = [0]

        def following(stream: Any, seq_length: int) -> Any:
            begun[0] = stream.consumed_samples + at.dp * stream.micro_batch_size
            return plain_next(stream, seq_length)

        def to_batch(window: Any, *rest: Any) -> Any:
            lines = [[time.time(), begun[0] + k, digest(one)] for k, one in enumerate(window.numpy())]
            with (run.run_dir / f"samples-{at.dp}.jsonl").open("ab", buffering=0) as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            begun[0] += layout.dp * len(window)
            return plain_batch(window, *rest)

        vars(batches)["to_batch"] = to_batch
        batches.BatchStream.next = following  # type: ignore[method-assign,assignment]


def digest(window: np.ndarray) -> str:
    """A short name for a sample's tokens [s + 1]."""
    return hashlib.blake2b(window.astype("<i4").tobytes(), digest_size=8).hexdigest()


def recorded(run_dir: Path) -> list[str]:
    """What every sample of the run was, in their order; of one that was taken again, the last. Fails where some are
    missing."""
    found = defaultdict[int, list[tuple[float, str]]](list)
    for path in run_dir.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                at_s, number, name = json.loads(line)
            except ValueError:
                continue  # of a rank that was killed
            found[number].append((at_s, name))
    assert sorted(found) == list(range(len(found)))
    return [max(found[number])[1] for number in range(len(found))]
