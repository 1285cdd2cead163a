"""What is measured inside the model, beyond a step's result: only where the model has it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from models.shapes import GPTShape
from parallel.groups import Ranks
from training.metrics.depths import DepthMeter
from training.metrics.experts import ExpertMeter
from training.metrics.values import Value


class Meter(Protocol):
    """Collects while the model trains, on every rank."""

    def report(self) -> Mapping[str, Value]:
        """The numbers since the last report, by their key in metrics.jsonl. Collective: all ranks, same iteration."""
        ...


def model_meters(shape: GPTShape, chunks: Sequence[nn.Module], ranks: Ranks) -> list[Meter]:
    """Those that the architecture gives something to measure; the same on every rank."""
    meters: list[Meter] = []
    if shape.num_moe_experts:
        meters.append(ExpertMeter(shape, chunks, ranks))
    if shape.mtp_num_layers:
        meters.append(DepthMeter(shape, chunks, ranks))
    return meters
