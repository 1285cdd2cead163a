"""A Hugging Face folder: its configuration, its tensors by rows, and what else it carries."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from models.families import TABLES
from models.hf.files import CARRIED, present, read_configuration
from models.hf.shapes import read_shape
from models.hf.tables import full_name, mtp_blocks
from models.shapes import GPTShape
from program.errors import UserError
from tools.shared.dtypes import cast, dequantised, from_numbers, to_numbers
from tools.shared.hf_folder.experts import each_expert
from tools.shared.hf_folder.headers import TensorSpan, read_places, weight_files
from training.checkpoint.format.descriptors import Descriptors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS, read_words

SCALE = "_scale_inv"
"""What the name of an fp8 matrix's scales ends with."""


class HfFolder:
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
    def places(self) -> Mapping[str, TensorSpan]:
        """Every tensor of the files, by its name there, and each expert's of those that hold all. Raises UserError for
        a file that is not whole."""
        return each_expert(read_places(self.folder), TABLES.get(str(self.config.get("model_type"))))

    def dtype(self, name: str) -> str:
        """A tensor's dtype; bfloat16 of fp8 matrices with scales, as DeepSeek's own script makes of them."""
        return "bfloat16" if self._is_scaled(name) else self.places[name].dtype

    def rows(self, name: str, first: int, count: int, dtype: str) -> np.ndarray:
        """Rows of a tensor as words of ``dtype``: [count, elements of a row]."""
        place = self.places[name]
        words = np.empty((count, place.row_bytes // ITEM_BYTES[place.dtype]), dtype=WORDS[ITEM_BYTES[place.dtype]])
        start = place.start + first * place.row_bytes
        if (end := read_words(self._descriptors.get(place.file.name), start, words)) is not None:
            raise UserError(f"{place.file}: ended at byte {end:,} while it was read. Download it again.")
        if self._is_scaled(name):
            return from_numbers(dequantised(words, self._scale(name), first), dtype)
        return cast(words, place.dtype, dtype)

    def carried(self) -> dict[str, Path]:
        """Carried files by name."""
        return present(self.folder, CARRIED)

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


def architecture(source: HfFolder) -> tuple[str, GPTShape]:
    """The model_type and shape of a folder; without multi-token prediction where its files have none of it."""
    model_type, shape = read_shape(source.config)
    prefixes = mtp_blocks(model_type, shape)
    if prefixes and not any(name.startswith(prefixes) for name in source.places):
        shape = dataclasses.replace(shape, mtp_num_layers=0)
    return model_type, shape


def names_in(source: HfFolder, model_type: str) -> dict[str, str]:
    """The tables' names -> the names in the files, which may lack a prefix. Raises UserError for one tensor under two
    names."""
    found: dict[str, str] = {}
    for name in source.places:
        if (other := found.setdefault(full_name(model_type, name), name)) != name:
            raise UserError(f"{source.folder}: {other} and {name} are the same tensor. Remove one of the two.")
    return found
