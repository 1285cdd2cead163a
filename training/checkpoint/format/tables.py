"""Puts the writers' tables together into the index of a checkpoint."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from program.durable import replace_file
from program.schema import Count
from program.untrusted import json_value, read_bytes
from training.checkpoint.format.coverage import covered_once
from training.checkpoint.format.pieces import TensorGroup, TensorPiece, piece_entry, read_group, read_piece
from training.checkpoint.format.writer import TABLE

INDEX, PIECES = "index.json", "pieces.jsonl"
INDEX_BYTES = 1 << 30
"""At most in one table: those of 405B on 16,384 ranks have 45 MB in all."""


class IncompleteError(Exception):
    """What the writers wrote is not each tensor exactly once."""


class FileFacts(NamedTuple):
    """What a writer knows of its file."""

    bytes: Count
    hash: str


def merge(folder: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Write ``index.json`` and ``pieces.jsonl`` from the tables of the writers ``names``: the facts of their files.

    Linear in the pieces: 11 s for the 406,243 of a 405B model's 16,384 ranks (make bench-checkpoint). Raises
    IncompleteError where a tensor is not covered exactly once, and OSError where a writer's table is missing.
    """
    facts: dict[str, FileFacts] = {}
    groups: dict[TensorGroup, list[TensorPiece]] = {}
    for name in names:
        path = folder / f"{name}{TABLE}"
        table = json_value(read_bytes(path, INDEX_BYTES), path)
        facts[table["file"]] = FileFacts(table["bytes"], table["hash"])
        for entry in table["groups"]:
            groups.setdefault(read_group(entry), []).extend(map(read_piece, entry["pieces"]))
    _check(groups)
    index: dict[str, Any] = {}
    lines, position = [], 0
    for group, pieces in groups.items():
        pieces.sort(key=lambda piece: piece.offset)
        line = json.dumps([piece_entry(piece) for piece in pieces], separators=(",", ":")).encode() + b"\n"
        for number, key in enumerate(group.keys):
            place = [position, len(line), number]
            index[key] = {"dtype": group.dtype, "shape": group.shape, "pieces": place}
        lines.append(line)
        position += len(line)
    replace_file(folder / PIECES, b"".join(lines))
    replace_file(folder / INDEX, (json.dumps({"tensors": index}, indent=0) + "\n").encode())
    return facts


def remove_tables(folder: Path, names: Iterable[str]) -> None:
    """The writers' tables, once they are in the index: a checkpoint of n writers has n files and a few."""
    for name in names:
        (folder / f"{name}{TABLE}").unlink(missing_ok=True)


def _check(groups: dict[TensorGroup, list[TensorPiece]]) -> None:
    seen: dict[str, TensorGroup] = {}
    for group, pieces in groups.items():
        for key in group.keys:
            if key in seen:
                raise IncompleteError(f"{key}: writers disagree: {_described(seen[key])} and {_described(group)}")
            seen[key] = group
        if not covered_once(group.shape, ((piece.offset, piece.shape) for piece in pieces)):
            raise IncompleteError(
                f"{group.keys[0]} {list(group.shape)}: the writers' {len(pieces)} pieces do not hold each element once"
            )


def _described(group: TensorGroup) -> str:
    return f"{group.dtype} {list(group.shape)} with {len(group.keys)} tensors cut alike"
