"""Megatron-LM's names and units of curves, for dashboards that were made for it: ``log.names = "megatron"``.

They are those of megatron/training/training.py (``training_log``, ``evaluate_and_print_results``), and megatron-core's
for losses of MTP. Its second axis, "... vs samples", is left out: TensorBoard could not tell which of its points a
resumed run draws again.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal

from training.metrics.registry import find
from training.metrics.values import Number, Values, curves

Names = Literal["triplane", "megatron"]
DEPTH = re.compile(r"mtp_loss/depth_(\d+)")
LARGEST_EXPONENT = 20
"""Megatron-LM's largest logarithm of a perplexity."""


def named_curves(values: Values, max_experts: int, names: Names) -> Iterator[tuple[str, Number]]:
    """``values.curves`` with the names that ``log.names`` asks for."""
    drawn = curves(values, max_experts)
    return renamed(drawn) if names == "megatron" else drawn


def renamed(drawn: Iterable[tuple[str, Number]]) -> Iterator[tuple[str, Number]]:
    """Curves by Megatron-LM's names and in its units; those that it does not have keep ours."""
    for name, value in drawn:
        theirs, scale = megatron_name(name)
        yield theirs, value * scale if scale != 1 else value
        if name.startswith("validation_loss"):
            yield f"{theirs} ppl", math.exp(min(value, LARGEST_EXPONENT))


def megatron_name(name: str) -> tuple[str, float]:
    """Of one curve, and what its values are multiplied by. A ``*`` stands for the same part of both names."""
    if depth := DEPTH.fullmatch(name):
        return f"mtp_{int(depth[1]) + 1} loss", 1.0
    metric = find(name)
    if metric is None or not metric.megatron:
        return name, 1.0
    before, _, after = metric.name.partition("*")
    part = name[len(before) : len(name) - len(after)]
    return metric.megatron.replace("*", part), metric.megatron_scale
