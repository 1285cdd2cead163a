"""Parts of the whole that fit a machine which is there for minutes, in the order in which they tell most.

A slice continues what an earlier one brought back (``--resume``), so that a machine that is lent twice for ten minutes
shows as much as one that is there for twenty.
"""

from dataclasses import dataclass
from typing import Literal

from tests.gpu.table import SubjectName

SliceName = Literal["look", "correctness", "speed", "memory", "kernels", "layouts", "profile"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Slice:
    """Subjects, and the minutes that they need on one H100 with 16 cores, as estimated before one was there."""

    subjects: tuple[SubjectName, ...]
    minutes: float


SLICES: dict[SliceName, Slice] = {
    "look": Slice(subjects=("layers", "trainings"), minutes=2.5),
    "correctness": Slice(subjects=("layers", "trainings", "specs", "layouts", "fp8", "tests"), minutes=4),
    "speed": Slice(subjects=("throughput", "planner", "memory", "beside"), minutes=8),
    "memory": Slice(subjects=("checkpoint", "savings"), minutes=6),
    "kernels": Slice(subjects=("fusions",), minutes=7),
    "layouts": Slice(subjects=("planned_layouts",), minutes=5),
    "profile": Slice(subjects=("profile",), minutes=2),
}
