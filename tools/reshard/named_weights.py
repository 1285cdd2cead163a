"""A model's weights by another program's names: where each one's rows lie in theirs."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Names = Literal["transformers", "torchtitan"]
NewName = tuple[str, tuple[int, str] | None]
"""A name; and of one expert's matrix its number and which part of the stack's rows it is: first, second or all."""


@dataclass(slots=True, frozen=True)
class RowRun:
    """Rows of one of their tensors, and where they lie in ours."""

    name: str
    """Theirs."""
    start: int
    """First row in theirs, counted over all dims but the last."""
    row: int
    """First row in ours."""
    rows: int
    step: int = 1
    """Rows in theirs from one to the next."""


@dataclass(slots=True, frozen=True)
class Geometry:
    """How rows lie in their tensors: the last dim's opposite, unless this says otherwise."""

    transposed: bool = False
    """They are columns: [columns, rows], or [experts, columns, rows]."""
    vectors: bool = False
    """Ours is [experts, rows]: each element is a row."""
    unsqueezed: int | None = None
    """They have one more dim, of 1, at this place."""

    def core(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """A shape or an offset of theirs without that dim."""
        place = self.unsqueezed
        return dims if place is None else dims[:place] + dims[place + 1 :]

    def whole(self, dims: tuple[int, ...], one: int) -> tuple[int, ...]:
        """Inverse of ``core``. one: 1 of a shape, 0 of an offset."""
        place = self.unsqueezed
        return dims if place is None else (*dims[:place], one, *dims[place:])


PLAIN = Geometry()


@dataclass(slots=True, frozen=True)
class NamedWeight:
    """One of our weights, by their names."""

    key: str
    """Ours."""
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]
    """By our rows."""
    padded: bool
    """Ours ends with rows of padding."""
    geometry: Geometry


@dataclass(frozen=True)
class Naming:
    """All weights of a model by their names."""

    label: str
    family: Names
    weights: tuple[NamedWeight, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of their tensors."""
    copies: Collection[str] = ()
    """Names of tensors that are others' equals: a tied output layer's."""
    padded: Collection[str] = field(default_factory=set)
    """Names of tensors that may have more rows: the vocabulary, rounded up."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the weights, the same in every model of this type, by their names."""
    computed: re.Pattern[str] = re.compile(r"(?!)")
    """Names of tensors that follow from the configuration."""


def renamed(naming: Naming, rename: Callable[[str], NewName], label: str = "", family: Names | None = None) -> Naming:
    """By other names; of experts, matrices that are stacked: [experts, rows, columns]."""
    shapes: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, int] = {}
    for name, shape in naming.shapes.items():
        new, expert = rename(name)
        if expert is None:
            shapes[new] = shape
            continue
        numbers[new] = max(numbers.get(new, 0), expert[0] + 1)
        rows = shape[0] if expert[1] == "all" else 2 * shape[0]
        shapes[new] = (numbers[new], rows, *shape[1:])
    weights = []
    for weight in naming.weights:
        runs = []
        for run in weight.runs:
            new, expert = rename(run.name)
            first = 0
            if expert is not None:
                rows = shapes[new][1]
                first = expert[0] * rows + (rows // 2 if expert[1] == "second" else 0)
            runs.append(dataclasses.replace(run, name=new, start=first + run.start))
        weights.append(dataclasses.replace(weight, runs=tuple(runs)))
    return dataclasses.replace(
        naming,
        label=label or naming.label,
        family=family or naming.family,
        weights=tuple(weights),
        shapes=shapes,
        copies=tuple(rename(name)[0] for name in naming.copies),
        padded={rename(name)[0] for name in naming.padded},
        constants={rename(name)[0]: value for name, value in naming.constants.items()},
    )
