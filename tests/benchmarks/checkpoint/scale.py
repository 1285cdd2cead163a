"""The tables of a checkpoint of thousands of ranks, written, merged and read as those of a run of that size would be.

Only the ranks are made up: their parameters and shares follow from the shapes, by Megatron's rules (row- and
column-parallel matrices; buckets of parameters in reverse, each divided evenly over the data-parallel ranks). The
merge proves itself that the shares hold every element once. Tensors' bytes are not written.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.costs.parameters import Parameter, parameters
from models.families import SHAPES
from models.names import checkpoint_key
from models.shapes import GPTShape
from parallel.layout import Layout
from parallel.regions import flat_boxes
from tests.benchmarks.checkpoint import memory
from training.checkpoint.format.pieces import TensorGroup, TensorPiece, piece_entry
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import INDEX, PIECES, merge
from training.checkpoint.format.writer import TABLE

STATES = ("param", "exp_avg", "exp_avg_sq")
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements: mcore pads the start of a parameter and the end of a bucket (distrib_optimizer, param_and_grad_buffer)."""


@dataclass(slots=True, frozen=True)
class HeldRectangle:
    """A rectangle of a parameter that a tensor-parallel rank holds, one after another in its memory."""

    parameter: Parameter
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def measure(shape_name: str, layout: Layout, bucket_size: int, folder: Path) -> dict[str, Any]:
    """What the tables of one checkpoint take: bytes, and seconds of the commit and of a rank's read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = SHAPES[shape_name]
    pieces, sizes = [], []
    for rank, held in enumerate(ranks(shape, layout, bucket_size)):
        groups, count, size = table(f"rank_{rank:05d}.bin", held)
        text = json.dumps({"file": f"rank_{rank:05d}.bin", "bytes": size, "hash": "0" * 32, "groups": groups})
        (folder / f"rank_{rank:05d}{TABLE}").write_text(text)
        pieces.append(count)
        sizes.append(len(text))
    names = [f"rank_{rank:05d}" for rank in range(len(pieces))]
    cost = memory.cost(lambda: merge(folder, names), lambda: None)
    result = {
        "shape": shape_name,
        "layout": str(layout),
        "bucket_size": bucket_size,
        "pieces": sum(pieces),
        "pieces_of_a_rank": max(pieces),
        "table_bytes_of_a_rank": max(sizes),
        "merge_s": cost.seconds,
        "merge_growth_bytes": cost.grown_bytes,
        "index_bytes": (folder / INDEX).stat().st_size,
        "pieces_bytes": (folder / PIECES).stat().st_size,
        **reading(folder, shape, layout),
    }
    shutil.rmtree(folder)
    return result


def reading(folder: Path, shape: GPTShape, layout: Layout) -> dict[str, Any]:
    """What one rank reads of the tables to load its stage: the index, and the lines of its own tensors."""
    began = time.perf_counter()
    with FileReader(folder) as reader:
        keys = [checkpoint_key(parameter.name) for parameter in stage_parameters(shape, layout, 0)]
        lines = {reader.tensors[f"optimizer.state.param.{key}"].line for key in keys}
        for key in keys:
            for state in STATES:
                reader.pieces(f"optimizer.state.{state}.{key}")
    seconds = time.perf_counter() - began
    size = (folder / INDEX).stat().st_size + sum(length for _, length in lines)
    return {"metadata_bytes_read_by_a_rank": size, "metadata_s_of_a_rank": seconds}


def ranks(shape: GPTShape, layout: Layout, bucket_size: int) -> Iterator[list[tuple[HeldRectangle, int, int]]]:
    """For each rank, what its share of the optimizer is made of: (rectangle, first, last + 1 of its flat elements)."""
    for stage in range(layout.pp):
        listed = stage_parameters(shape, layout, stage)
        for tp_rank in range(layout.tp):
            held = [(param, list(rectangles(param, layout.tp, tp_rank))) for param in listed]
            shares = divided(held, layout.dp, bucket_size)
            yield from shares


def stage_parameters(shape: GPTShape, layout: Layout, stage: int) -> list[Parameter]:
    """Of one of equal pipeline stages; the embedding is on the first, the head on the last."""
    per_stage = -(-shape.num_layers // layout.pp)
    wanted = range(stage * per_stage, min((stage + 1) * per_stage, shape.num_layers))
    found = []
    for parameter in parameters(shape):
        parts = parameter.name.split(".")
        if parts[0] == "layers":
            mine = int(parts[1]) in wanted
        else:
            mine = stage == (0 if parts[0] == "word_embeddings" else layout.pp - 1)
        if mine:
            found.append(parameter)
    return found


def rectangles(parameter: Parameter, tp: int, tp_rank: int) -> Iterator[HeldRectangle]:
    """What a TP rank holds of a parameter: rows, columns, the gate's and the other half's rows, or a copy."""
    name, shape = parameter.name, parameter.shape
    if len(shape) == 1:
        if tp_rank == 0:  # the copies of the others are not written
            yield HeldRectangle(parameter, (0,), shape)
        return
    rows, columns = shape
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        yield HeldRectangle(parameter, (0, tp_rank * columns // tp), (rows, columns // tp))
    elif name.endswith("linear_fc1.weight"):
        half = rows // 2
        for start in (0, half):
            yield HeldRectangle(parameter, (start + tp_rank * half // tp, 0), (half // tp, columns))
    else:
        yield HeldRectangle(parameter, (tp_rank * rows // tp, 0), (rows // tp, columns))


def divided(
    held: list[tuple[Parameter, list[HeldRectangle]]], dp: int, bucket_size: int
) -> list[list[tuple[HeldRectangle, int, int]]]:
    """The flat memory of a model-parallel rank, cut into buckets, each into ``dp`` equal parts."""
    shares: list[list[tuple[HeldRectangle, int, int]]] = [[] for _ in range(dp)]
    bucket: list[tuple[int, HeldRectangle]] = []
    end = 0
    for position, (_, parts) in enumerate(reversed(held)):
        end = _up(end, PARAMETER_ALIGNMENT)
        for part in parts:
            bucket.append((end, part))
            end += part.size
        if end >= bucket_size or position == len(held) - 1:
            share = _up(end, max(dp, BUCKET_ALIGNMENT) if BUCKET_ALIGNMENT % dp else BUCKET_ALIGNMENT) // dp
            for start, part in bucket:
                for rank in range(start // share, (start + part.size - 1) // share + 1):
                    first, last = max(rank * share - start, 0), min((rank + 1) * share - start, part.size)
                    shares[rank].append((part, first, last))
            bucket, end = [], 0
    return shares


def table(file: str, held: list[tuple[HeldRectangle, int, int]]) -> tuple[list[dict[str, Any]], int, int]:
    """A rank's table, as its writer leaves it: groups, number of pieces, bytes."""
    groups: dict[TensorGroup, list[TensorPiece]] = {}
    position = 0
    for part, first, last in held:
        key = checkpoint_key(part.parameter.name)
        group = TensorGroup(
            tuple(f"optimizer.state.{state}.{key}" for state in STATES), "float32", part.parameter.shape
        )
        for box in flat_boxes(part.shape, first, last):
            offset = tuple(base + own for base, own in zip(part.offset, box.offset, strict=True))
            hashes = (f"{position & (2**64 - 1):016x}",) * len(STATES)
            groups.setdefault(group, []).append(TensorPiece(file, position, offset, box.shape, hashes))
            position += len(STATES) * group.piece_bytes(box.shape)
    entries = [
        {"keys": g.keys, "dtype": g.dtype, "shape": g.shape, "pieces": [piece_entry(piece) for piece in pieces]}
        for g, pieces in groups.items()
    ]
    return entries, sum(map(len, groups.values())), position


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
