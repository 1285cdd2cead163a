"""What one iteration of a program asks of the device, from the start of the fourth to the start of the fifth.

A hook where the program is ours; tests/gpu_path/megatron_lm/program.py calls it where it is Megatron-LM's.
``rank-RANK.json`` in the folder EMULATED_CUDA_LOG: collectives, losses (Megatron-LM's), kernels, host waits.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from tests.gpu_path import flight
from tests.gpu_path.counters import Count, counts

ITERATION = 4


class StepLog:
    """Of one rank."""

    def __init__(self) -> None:
        self.iteration = 0
        self.losses: list[float] = []
        self.begun: tuple[int, dict[Count, int]] | None = None
        self.found: dict[str, Any] = {}

    def begin(self) -> None:
        """At the start of each iteration."""
        self.iteration += 1
        if self.iteration == ITERATION:
            self.begun = flight.last(), counts()
        elif self.begun:
            newest, before = self.begun
            after, self.begun = counts(), None
            self.found = {kind.name: after[kind] - before[kind] for kind in Count if kind is not Count.REGISTERED}
            self.found["collectives"] = [dataclasses.asdict(one) for one in flight.since(newest)]

    def write(self) -> None:
        """After training."""
        path = Path(os.environ["EMULATED_CUDA_LOG"], f"rank-{os.environ['RANK']}.json")
        path.write_text(json.dumps(self.found | {"losses": self.losses}))


LOG = StepLog()
