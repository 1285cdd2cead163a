"""A Hugging Face folder: its configuration, its tensors by rows, and what else it carries. No torch here."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from parallel.errors import UserError
from tools.convert.words import FLOATS, cast, dequantised, from_numbers, to_numbers
from training.checkpoint.format.descriptors import Descriptors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
"""What the name of an fp8 matrix's scales ends with."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
"""Torch's names of the dtypes that weights may have in a safetensors file."""

CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "tekken.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
"""Files that go along with the weights, either way. Nothing that could be executed is among them."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of all but the first dim."""
        count = ITEM_BYTES[self.dtype]
        for size in self.shape[1:]:
            count *= size
        return count


def read_configuration(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder's ``config.json``. Raises UserError where it cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected the configuration of a model; {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected the configuration of a model, an object in braces.")
    return values


class Source:
    """The folder, opened for reading. Close it, or use it as a context: it keeps files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors = Descriptors(folder)
        self._scales: dict[str, np.ndarray] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json``. Raises UserError where it cannot be read."""
        return read_configuration(self.folder)

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Every tensor of the files, by its name there. Raises UserError for a file that is not whole."""
        found: dict[str, Place] = {}
        for path in weight_files(self.folder):
            for name, place in read_header(path).items():
                if name in found:
                    raise UserError(f"{path}: {name} is in {found[name].file.name} too.")
                found[name] = place
        return found

    def dtype(self, name: str) -> str:
        """A tensor's dtype; bfloat16 of fp8 matrices with scales, as DeepSeek's own script makes of them."""
        return "bfloat16" if self._is_scaled(name) else self.places[name].dtype

    def rows(self, name: str, first: int, count: int, dtype: str) -> np.ndarray:
        """Rows of a tensor as words of ``dtype``: [count, elements of a row]."""
        place = self.places[name]
        words = np.empty((count, place.row_bytes // ITEM_BYTES[place.dtype]), dtype=WORDS[ITEM_BYTES[place.dtype]])
        _fill(self._descriptors.of(place.file.name), place.start + first * place.row_bytes, words, place.file)
        if self._is_scaled(name):
            return from_numbers(dequantised(words, self._scale(name), first), dtype)
        return cast(words, place.dtype, dtype)

    def carried(self) -> dict[str, Path]:
        """The files that go along, by name."""
        return {name: self.folder / name for name in CARRIED if (self.folder / name).is_file()}

    def fingerprint(self) -> list[list[Any]]:
        """What tells one state of the folder from another without reading the weights: [name, bytes, changed]."""
        paths = [*weight_files(self.folder), *self.carried().values()]
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)]

    def close(self) -> None:
        """Close the files."""
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_scaled(self, name: str) -> bool:
        return self.places[name].dtype == "float8_e4m3fn" and name + SCALE in self.places

    def _scale(self, name: str) -> np.ndarray:
        """fp32, whole: a 16,384th of the matrix. Only the last is kept."""
        if name not in self._scales:
            place = self.places[name + SCALE]
            words = self.rows(name + SCALE, 0, place.shape[0], place.dtype)
            self._scales = {name: to_numbers(words, place.dtype).astype(np.float32)}
        return self._scales[name]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises UserError where there are none."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: not an index of safetensors files ({error}).") from None
        paths = [folder / Path(str(name)).name for name in names]
        if missing := [path for path in paths if not path.is_file()]:
            raise UserError(f"{missing[0]}: {index.name} names it, but it is not there. Download it.")
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    hint = " Pickled weights are not read, since that runs code in them: get its safetensors." if pickled else ""
    what = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise UserError(f"{folder}: expected {SINGLE} or {INDEX}; found {what or 'nothing'}.{hint}")


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of a safetensors file (https://huggingface.co/docs/safetensors, "Format").

    Raises UserError where it is not one, where it is cut short, and for dtypes that weights cannot have.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, 100 << 20):
                raise ValueError(f"a table of contents of {length:,} bytes")
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        found = {}
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            if dtype is None:
                raise UserError(f"{path}: {name} is {entry['dtype']}; expected one of {', '.join(DTYPES)}.")
            if end - begin != int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]:
                raise ValueError(f"{name} {entry['dtype']} {list(shape)} in {end - begin:,} bytes")
            if 8 + length + end > size:
                raise UserError(
                    f"{path}: cut short: {name} ends at byte {8 + length + end:,} of {size:,}. Get it anew."
                )
            found[name] = Place(path, 8 + length + begin, dtype, shape)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors file ({error}).") from None


def is_weight_dtype(dtype: str) -> bool:
    """Whether ``--dtype`` may name it."""
    return dtype in FLOATS


def _fill(descriptor: int, start: int, into: np.ndarray, path: Path) -> None:
    view = memoryview(into.reshape(-1).view(np.uint8))
    while view.nbytes:
        count = os.preadv(descriptor, [view], start)
        if not count:
            raise UserError(f"{path}: ended at byte {start:,} while it was read. Get it anew.")
        start, view = start + count, view[count:]
