"""A hook: iteration 2's first result is said to be NaN, so that its microbatches run again."""

import dataclasses
from typing import Any

from training import step

measure, calls = step.measure, [0]


def not_finite_once(*args: Any) -> step.GradientResult:
    calls[0] += 1
    return dataclasses.replace(measure(*args), finite=calls[0] != 2)


step.measure = not_finite_once  # type: ignore[assignment]
