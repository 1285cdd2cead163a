"""Cases, as columns: one numpy element per case, so that thousands cost as much as one; and bytes, as answers."""

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from models.costs.candidate import Candidate
from models.costs.program import AS_OURS, Published, Software
from models.costs.sizes import ATTENTION_MATRICES, ModelSizes

Column = NDArray[np.float64]

RECOMPUTE = ("none", "core_attn", "mlp", "operators", "moe", "full")
FORMATS = ("16bit", "fp8", "mxfp8", "fp4", "fp32")


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryCase:
    """One layout of one model under one program."""

    model: ModelSizes
    layout: Candidate
    software: Software
    published: Published = AS_OURS


class MemoryColumns:
    """The same cases, attribute by attribute: ``columns.model.hidden`` is an array over the cases."""

    def __init__(self, cases: Sequence[MemoryCase]) -> None:
        self.count = len(cases)
        self.model = ColumnGroup([case.model for case in cases], skip=("matrices", "kinds"))
        self.layout = ColumnGroup(
            [case.layout for case in cases], skip=("recompute", "precision", "split", "chunk_layers")
        )
        self.software = ColumnGroup([case.software for case in cases])
        self.published = ColumnGroup([case.published for case in cases])
        self.recompute = codes([case.layout.recompute for case in cases], RECOMPUTE)
        self.format = codes([number_format(case.layout.precision) for case in cases], FORMATS)
        self.matrices = matrices_of(cases)

    def recomputes(self, name: str) -> NDArray[np.bool_]:
        return self.recompute == RECOMPUTE.index(name)

    def recomputing(self, name: str) -> Self:
        """The same cases, if all recomputed so."""
        other = copy.copy(self)
        other.recompute = np.full(self.count, RECOMPUTE.index(name))
        return other


class States(NamedTuple):
    """Bytes of a rank throughout a step."""

    weights: float
    gradients: float
    optimizer: float
    host: float
    """In the host's memory; the others on the rank's device."""

    @property
    def total(self) -> float:
        """On the device."""
        return self.weights + self.gradients + self.optimizer


@dataclass(slots=True)
class PeakBytes:
    """Bytes on a rank; ``total`` is their sum."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    workspace: Column
    stage: Column
    """The fullest pipeline stage."""
    host: Column
    """In the host's memory, of the stage that holds most there."""

    @property
    def total(self) -> Column:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


def tokens(columns: MemoryColumns) -> Column:
    """Of a microbatch on one rank, before sequence parallelism divides them."""
    return np.asarray(columns.model.seq_length * columns.layout.mbs / columns.layout.cp)


def element_bytes(columns: MemoryColumns) -> Column:
    """Of an activation: fp8's and fp4's are 16-bit ones between the products."""
    return np.where(columns.format == FORMATS.index("fp32"), 4.0, 2.0)


def number_format(precision: str) -> str:
    """The kind of matrix product that a precision means."""
    if precision == "fp32":
        return "fp32"
    if "fp4" in precision:
        return "fp4"
    if precision == "mxfp8" or "row" in precision or "block" in precision:
        return "mxfp8"
    return "fp8" if "fp8" in precision else "16bit"


class ColumnGroup:
    """Columns of one part of the cases; parts that many cases share are looked at once.

    skip: fields that are not numbers.
    """

    def __init__(self, parts: Sequence[object], skip: tuple[str, ...] = ()) -> None:
        unique = {id(part): part for part in parts}
        position = {key: number for number, key in enumerate(unique)}
        where = np.array([position[id(part)] for part in parts], dtype=np.intp)
        names = [name for name in getattr(type(parts[0]), "__dataclass_fields__", {}) if name not in skip]
        read = operator.attrgetter(*names)
        for name, values in zip(names, np.array([read(part) for part in unique.values()], np.float64).T, strict=True):
            setattr(self, name, values[where])

    def __getattr__(self, name: str) -> Column:  # for mypy: every attribute is a column
        raise AttributeError(name)


def codes(words: Sequence[str], known: tuple[str, ...]) -> NDArray[np.intp]:
    """Each word's place among the known ones."""
    code = {word: number for number, word in enumerate(known)}
    return np.array([code[word] for word in words], dtype=np.intp)


def matrices_of(cases: Sequence[MemoryCase], *, whole: bool = False) -> list[tuple[Column, Column]]:
    """Local rows and columns of each matrix of attention; cases of one model and TP size have the same."""
    keys = [(id(case.model), 1 if whole else case.layout.tp) for case in cases]
    unique = dict(zip(keys, cases, strict=True))
    position = {key: number for number, key in enumerate(unique)}
    where = np.array([position[key] for key in keys], dtype=np.intp)
    found = []
    for slot in range(ATTENTION_MATRICES):
        local = [case.model.matrices[slot].local(tp) for (_, tp), case in unique.items()]
        found.append((np.array([rows for rows, _ in local])[where], np.array([columns for _, columns in local])[where]))
    return found
