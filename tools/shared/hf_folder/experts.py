"""Tensors that hold the matrices of all experts, seen as the tensors of each."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from models.hf.row_layouts import Table
from models.spans import MOST_EXPERTS
from program.untrusted import InputError
from tools.shared.dtypes import FLOATS
from tools.shared.hf_folder.headers import TensorSpan
from training.checkpoint.format.pieces import ITEM_BYTES


def each_expert(places: dict[str, TensorSpan], table: Table | None) -> dict[str, TensorSpan]:
    """The same tensors, with each expert's matrices in place of those that ``table.fused`` names: the same bytes.

    What does not have the shape of such a tensor stays as it is. Raises InputError where a file holds both.
    """
    if table is None or not table.fused:
        return places
    found: dict[str, TensorSpan] = {}
    for name, place in places.items():
        for own, span in _parts(name, place, table.fused):
            if own in found:
                raise InputError(place.file, f"{own} is there twice, alone and in a tensor of all experts.")
            found[own] = span
    return found


def _parts(name: str, place: TensorSpan, fused: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, TensorSpan]]:
    """The tensor itself, or the matrices in it."""
    kind = next((kind for kind in fused if name.endswith(f".{kind}")), None)
    matrices = fused[kind] if kind else ()
    whole = not kind or len(place.shape) != 3 or not math.prod(place.shape) or place.dtype not in FLOATS
    if whole or place.shape[0] > MOST_EXPERTS or place.shape[1] % len(matrices):
        yield name, place
        return
    experts, rows, columns = place.shape[0], place.shape[1] // len(matrices), place.shape[2]
    stem, size = name.removesuffix(kind or ""), rows * columns * ITEM_BYTES[place.dtype]
    for expert in range(experts):
        for number, matrix in enumerate(matrices):
            start = place.start + (expert * len(matrices) + number) * size
            own = dataclasses.replace(place, start=start, shape=(rows, columns))
            yield stem + matrix.format(expert=expert), own
