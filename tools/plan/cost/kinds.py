"""Blocks of hybrids, kind by kind: how many each stage has, and stages by what their blocks take."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.costs.candidate import Candidate, chunks
from models.costs.cases import Column, MemoryCase
from models.costs.sizes import ATTENTION_AND_MLP, ModelSizes

Kinds = dict[str, NDArray[np.float64]]
"""Blocks by their sublayers (``GPTShape.blocks``): of each case, on each of its stages."""


def dealt(cases: Sequence[MemoryCase]) -> Kinds:
    """Nothing where all are attention and an MLP: such models are priced by their mean block."""
    models = {id(case.model): case.model for case in cases}.values()
    kinds = dict.fromkeys(kind for model in models for kind in model.kinds)
    if ATTENTION_AND_MLP.issuperset(kinds):
        return {}
    found = {kind: np.zeros((len(cases), max(case.layout.pp for case in cases))) for kind in kinds}
    known: dict[tuple[object, ...], dict[str, list[int]]] = {}
    for number, case in enumerate(cases):
        own = case.layout
        key = (id(case.model), own.pp, own.vpp, own.split, own.first_layers, own.last_layers, own.chunk_layers)
        if key not in known:
            known[key] = _on_stages(case.model, own)
        for kind, counts in known[key].items():
            found[kind][number, : own.pp] = counts
    return found


def _on_stages(model: ModelSizes, layout: Candidate) -> dict[str, list[int]]:
    counts, start = {kind: [0] * layout.pp for kind in model.kinds}, 0
    for number, size in enumerate(chunks(model.layers, layout)):
        for kind in model.kinds[start : start + size]:
            counts[kind][number % layout.pp] += 1
        start += size
    return counts


def share_of(kinds: Kinds, symbols: str, layers: Column) -> Column:
    """Sublayers with one of these letters, per block of the model."""
    counts = [own.sum(axis=1) for kind, own in kinds.items() for letter in kind if letter in symbols]
    return sum(counts, np.zeros_like(layers)) / layers


def stages_of(kinds: Kinds, takes: dict[str, Column], pp: Column) -> tuple[Column, Column, Column]:
    """The first stage, the longest one between, and the last, each as so many mean blocks.

    takes: time of a block of each kind, in that of the mean block.
    """
    every = sum((own * takes[kind][:, None] for kind, own in kinds.items()), np.zeros(1))
    number = np.arange(every.shape[1])[None, :]
    first, last = every[:, 0], every[np.arange(len(pp)), pp.astype(np.intp) - 1]
    between = np.where((number > 0) & (number < pp[:, None] - 1), every, 0.0).max(axis=1)
    return first, np.where(pp > 2, between, first), last
