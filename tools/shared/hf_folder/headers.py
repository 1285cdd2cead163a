"""Tables of contents of safetensors files: written, and believed only where they fit the file.

A header comes from outside: what it says of offsets, sizes and names is compared with the file before a byte of a
tensor is read. The rules are those of the format (https://huggingface.co/docs/safetensors, "Format") as its own library
keeps them: tensors follow each other without gaps, from the header's end to the file's.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from program.printing import some
from program.schema import Count, Foreign, Range, structured
from program.untrusted import InputError, open_regular, parse_json, read_foreign
from training.checkpoint.format.pieces import ITEM_BYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
"""Torch's names of the dtypes that weights may have in a safetensors file."""
OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64,
    "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of the dtypes that other tensors may have, such as masks and counters beside the weights."""
THEIR_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}

HEADER_BYTES = 100_000_000
"""Longest header, as in the format's own library."""
MOST_DIMS = 8
METADATA = "__metadata__"


@dataclass(slots=True, frozen=True)
class TensorSpan:
    """Where a tensor lies."""

    file: Path
    start: int
    dtype: str
    """Torch's name; of what weights cannot be, the format's own."""
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of all but the first dim."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


@dataclass(slots=True, frozen=True)
class Described:
    """A tensor as a header has it. data_offsets: first byte, and the one behind the last, behind the header."""

    dtype: str
    shape: tuple[Annotated[int, Range(0, 1 << 48)], ...]
    data_offsets: tuple[Count, Count]


@dataclass(slots=True, frozen=True)
class SafetensorsIndex:
    """``model.safetensors.index.json``."""

    weight_map: Mapping[str, str]
    """A tensor's name -> the file that holds it."""


def weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The safetensors files of a folder, and the tensors that the index says are in each; None without an index.

    Raises UserError where there are none, and where the index names files elsewhere.
    """
    index, single = folder / INDEX, folder / SINGLE
    for link in (index, single):
        if link.is_symlink() and not link.exists():
            raise InputError(link, f"a link to {link.readlink()}, which is not there. Download the model again.")
    if os.path.lexists(index):
        files = _by_file(index)
        if os.path.lexists(single) and SINGLE not in files:
            raise InputError(folder, f"has both {SINGLE} and {INDEX}. Remove the one that is not meant.")
        if missing := [name for name in files if not (folder / name).exists()]:
            raise InputError(folder / missing[0], f"{INDEX} names it, but it is not there. Download it.")
        return {folder / name: frozenset(names) for name, names in sorted(files.items())}
    if os.path.lexists(single):
        return {single: None}
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    hint = " Pickled weights are not read, since that runs code in them: get its safetensors." if pickled else ""
    what = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise InputError(folder, f"expected {SINGLE} or {INDEX}; found {what or 'nothing'}.{hint}")


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """What a safetensors file begins with. tensors: name, dtype (torch's) and shape of each, in their order."""
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": THEIR_DTYPES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read_places(folder: Path) -> dict[str, TensorSpan]:
    """Every tensor of a folder's files, by name. Raises UserError for a file that is not whole, and where the index
    and the files' own headers disagree."""
    found: dict[str, TensorSpan] = {}
    for path, names in weight_files(folder).items():
        places = read_header(path)
        if names is not None:
            _compare(folder / INDEX, path, names, places.keys())
        for name, place in places.items():
            if name in found:
                raise InputError(path, f"{name} is in {found[name].file.name} too.")
            found[name] = place
    return found


def read_header(path: Path) -> dict[str, TensorSpan]:
    """The tensors of a safetensors file. Raises UserError where it is none, where it is cut short, where its header
    does not fit it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        table, length = _table(file, path, size)
    table.pop(METADATA, None)
    described, problems = structured(table, Mapping[str, Described])
    if problems:
        raise InputError(path, "not the header of a safetensors file: " + " ".join(problems[:5]))
    at, last = 0, ""
    places = {}
    for name, entry in sorted(described.items(), key=lambda item: item[1].data_offsets):
        dtype = _check_entry(path, name, entry)
        begin, end = entry.data_offsets
        if begin != at:
            behind = f"behind {last}" if last else "first of all"
            raise InputError(path, f"{name} begins at byte {begin:,} of the data; expected {at:,}, {behind}.")
        if length + end > size:
            text = f"cut short: {name} ends at byte {length + end:,}; the file has {size:,}. Download it again."
            raise InputError(path, text)
        at, last = end, name
        places[name] = TensorSpan(path, length + begin, dtype, entry.shape)
    if length + at != size:
        raise InputError(path, f"expected {length + at:,} bytes, which its header describes; found {size:,}.")
    return {name: places[name] for name in described}


def _table(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON, and the position behind it."""
    length = int.from_bytes(file.read(8), "little")
    most = min(size - 8, HEADER_BYTES)
    if size < 8 or length > most:
        found = f"one of {length:,} bytes in a file of {size:,}" if size >= 8 else f"a file of {size} bytes"
        raise InputError(path, f"not a safetensors file: expected a header of at most {max(0, most):,} bytes; {found}.")
    data = b""
    while len(data) < length and (piece := file.read(length - len(data))):
        data += piece
    return dict(parse_json(data, Foreign, path, unique_names=True)), 8 + length


def _check_entry(path: Path, name: str, entry: Described) -> str:
    """Its dtype, as ``TensorSpan`` has it. Raises UserError where it does not fit itself."""
    dtype, (begin, end) = DTYPES.get(entry.dtype, entry.dtype), entry.data_offsets
    if dtype not in ITEM_BYTES and dtype not in OTHER_BITS:
        raise InputError(path, f"{name} is {entry.dtype}; expected one of {', '.join([*DTYPES, *OTHER_BITS])}.")
    if len(entry.shape) > MOST_DIMS:
        raise InputError(path, f"{name} has {len(entry.shape)} dims; expected at most {MOST_DIMS}.")
    bits = 8 * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else OTHER_BITS[dtype]
    expected = math.prod(entry.shape) * bits // 8  # Python's own integers: no product overflows
    if end - begin != expected:
        what = f"{name} {entry.dtype} {list(entry.shape)}"
        raise InputError(path, f"{what}: expected {expected:,} bytes; its offsets {begin:,} to {end:,} differ.")
    return dtype


def _by_file(index: Path) -> dict[str, list[str]]:
    """Names of tensors by the file that holds them. Raises UserError for files that are not in the folder itself."""
    weight_map = read_foreign(index, SafetensorsIndex).weight_map
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name)
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(index, f'weight_map: expected names of .safetensors files beside it, found "{file}".')
    if not files:
        raise InputError(index, "weight_map: expected tensors and the files that hold them, found none.")
    return files


def _compare(index: Path, path: Path, named: frozenset[str], held: Any) -> None:
    """Raises UserError where an index says something else of a file than the file."""
    for what, names in (("lacks", named - held), ("holds, beside what is mapped to it,", held - named)):
        if names:
            raise InputError(index, f"{path.name} {what} {some(sorted(names))}. Download both again.")
