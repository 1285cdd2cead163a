"""Megatron's torch_dist folders: tensors by rectangle, and the common state. No pickle is executed.

``.metadata`` lists, for each tensor, its chunks (rectangles), and, for each chunk, a range of bytes of a ``.distcp``
file; there lies what torch.save made of the chunk: an uncompressed zip file with the tensor's bytes as one of its
members. These are read from where they lie (torch/distributed/checkpoint/metadata.py and filesystem.py of 2.13,
torch/serialization.py for the zip file's members).
"""

import io
import math
import os
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from program.errors import UserError
from program.untrusted import read_bytes
from tools.reshard.inert_pickle import DTYPES, STORAGES, Ordered, Outside, PickledRecord, Size, read, record
from training.checkpoint.format.coverage import covered_once
from training.checkpoint.format.descriptors import Descriptors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import read_words

METADATA, CONFIG, LEGACY_COMMON = ".metadata", "metadata.json", "common.pt"
COMMON = "common_state/shard_0_1"
METADATA_BYTES = 8 << 30
"""Largest .metadata or common.pt that is read: it names every chunk of every tensor of every rank."""

_DCP = "torch.distributed.checkpoint"
_TORCH = {("torch", "Size"): Size} | {("torch", name): dtype for name, dtype in DTYPES.items()}
Chunk, TensorStorage, BytesStorage = record("Chunk"), record("TensorStorage"), record("BytesStorage")
Properties, Metadata, Index, Place = record("Properties"), record("Metadata"), record("Index"), record("Place")

OF_METADATA: Mapping[tuple[str, str], Any] = {
    **_TORCH,
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorStorage,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): BytesStorage,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Chunk,
    (f"{_DCP}.metadata", "TensorProperties"): Properties,
    (f"{_DCP}.metadata", "MetadataIndex"): Index,
    (f"{_DCP}.metadata", "StorageMeta"): record("StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): record("MemoryFormat"),
    (f"{_DCP}.filesystem", "_StorageInfo"): Place,
    (f"{_DCP}.filesystem", "_StoragePrefix"): record("StoragePrefix"),
    (f"{_DCP}.planner", "SavePlan"): record("SavePlan"),
    (f"{_DCP}.planner", "WriteItem"): record("WriteItem"),
    (f"{_DCP}.planner", "WriteItemType"): record("WriteItemType"),
    (f"{_DCP}.planner", "TensorWriteData"): record("TensorWriteData"),
    ("torch.serialization", "_get_layout"): record("Layout"),
    ("pathlib", "PosixPath"): record("Path"),
    ("pathlib", "Path"): record("Path"),
    ("pathlib._local", "PosixPath"): record("Path"),
    ("collections", "OrderedDict"): Ordered,
}
"""Every name that a ``.metadata`` of torch 2.13 and megatron-core 0.19.2 has, and its older spellings."""

Tensor, Namespace = record("Tensor"), record("Namespace")

OF_BLOBS: Mapping[tuple[str, str], Any] = {
    **_TORCH,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch.serialization", "_get_layout"): record("Layout"),
    ("collections", "OrderedDict"): Ordered,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("megatron.core.transformer.enums", "AttnBackend"): record("Enum"),
    ("megatron.core.enums", "ModelType"): record("Enum"),
    ("megatron.core.rerun_state_machine", "RerunState"): record("Enum"),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic"): record("Enum"),
    ("megatron.core.rerun_state_machine", "RerunMode"): record("Enum"),
}
"""Every name that the common state or a tensor's chunk may have."""


@dataclass(slots=True, frozen=True)
class ChunkPlace:
    """One chunk, and the bytes that torch.save made of it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(slots=True, frozen=True)
class TorchDistTensor:
    """One tensor of a folder."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkPlace, ...]


class TorchDist:
    """A torch_dist folder's tensors by Megatron's keys. Close it: it keeps files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors = Descriptors(folder)
        self._data: dict[tuple[str, int], int] = {}

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        path = self.folder / METADATA
        found = read(read_bytes(path, METADATA_BYTES), OF_METADATA, str(path))
        if not isinstance(found, Metadata) or not isinstance(found.state, dict):
            raise UserError(f"{path}: not the metadata of a torch_dist checkpoint.")
        return found.state

    @cached_property
    def tensors(self) -> Mapping[str, TorchDistTensor]:
        """Every tensor. Raises UserError where its chunks are not each element of it once."""
        try:
            return dict(self._tensors())
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{self.folder / METADATA}: not what torch writes ({type(error).__name__}: {error})."
            ) from None

    def _tensors(self) -> Iterator[tuple[str, TorchDistTensor]]:
        places = self._places
        for key, entry in self._metadata["state_dict_metadata"].items():
            if not isinstance(entry, TensorStorage):
                continue
            fields = entry.state
            dtype, shape = fields["properties"].state[0], fields["size"].value
            chunks = []
            for chunk in fields["chunks"]:
                offset, size = chunk.state["offsets"].value, chunk.state["sizes"].value
                chunks.append(ChunkPlace(offset, size, *places[key, offset]))
            if dtype not in ITEM_BYTES:
                raise ValueError(f"{key} is {dtype}")
            if not covered_once(shape, ((chunk.offset, chunk.shape) for chunk in chunks)):
                raise UserError(f"{self.folder}: the chunks of {key} {list(shape)} do not hold each element once.")
            yield key, TorchDistTensor(dtype, shape, tuple(chunks))

    @cached_property
    def objects(self) -> tuple[str, ...]:
        """Keys of what is no tensor."""
        entries = self._metadata["state_dict_metadata"].items()
        return tuple(key for key, entry in entries if isinstance(entry, BytesStorage))

    @cached_property
    def _places(self) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
        found = {}
        for index, place in self._metadata["storage_data"].items():
            fields = index.state
            offset = fields.get("offset")
            where = place.state
            if where.get("transform_descriptors"):
                raise UserError(f"{self.folder}: {fields['fqn']} is stored compressed, which is not read here.")
            entry = (str(where["relative_path"]), int(where["offset"]), int(where["length"]))
            found[fields["fqn"], None if offset is None else offset.value] = entry
        return found

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """Fill ``into``, words of the dtype's size, with the rectangle at ``offset`` of its shape.

        A chunk's rows that are wanted are read whole. Raises UserError where a file is cut short.
        """
        info = self.tensors[key]
        for chunk in info.chunks:
            inside: list[slice] = []
            outside: list[Any] = []
            for at, size, start, length in zip(chunk.offset, chunk.shape, offset, into.shape, strict=True):
                low, high = max(at, start), min(at + size, start + length)
                inside.append(slice(low - at, max(low, high) - at))
                outside.append(slice(low - start, max(low, high) - start))
            if all(part.stop > part.start for part in inside):
                self._read_chunk(key, info, chunk, tuple(inside), into[(*outside, ...)])

    def _read_chunk(
        self, key: str, info: TorchDistTensor, chunk: ChunkPlace, inside: tuple[slice, ...], target: np.ndarray
    ) -> None:
        start, item = self._data_start(key, info, chunk), ITEM_BYTES[info.dtype]
        if not chunk.shape:
            self._read_at(chunk.file, start, target)
            return
        row = math.prod(chunk.shape[1:])
        step = max(1, (32 << 20) // max(1, row * item))
        for first in range(inside[0].start, inside[0].stop, step):
            count = min(step, inside[0].stop - first)
            rows = np.empty((count, *chunk.shape[1:]), dtype=target.dtype)
            self._read_at(chunk.file, start + first * row * item, rows)
            at = first - inside[0].start
            target[at : at + count] = rows[(slice(None), *inside[1:])]

    def _read_at(self, file: str, position: int, into: np.ndarray) -> None:
        if (end := read_words(self._descriptor(file), position, into)) is not None:
            raise UserError(f"{self.folder / file}: ends at byte {end:,}, where a tensor goes on. Download it again.")

    def _data_start(self, key: str, info: TorchDistTensor, chunk: ChunkPlace) -> int:
        """Where the chunk's elements begin in its file: found once, from the zip file's table of contents."""
        place = (chunk.file, chunk.start)
        if place not in self._data:
            where = f"{self.folder / chunk.file}: the chunk of {key} at {list(chunk.offset)}"
            blob = _Window(self._descriptor(chunk.file), chunk.start, chunk.length, where)
            self._data[place] = chunk.start + _tensor_start(blob, info.dtype, chunk.shape, where)
        return self._data[place]

    def common(self) -> dict[str, Any]:
        """The common state: plain values; tensors and objects of known classes in it as records."""
        legacy = self.folder / LEGACY_COMMON
        if legacy.is_file():
            found = read_saved(read_bytes(legacy, METADATA_BYTES), str(legacy))
        elif (COMMON, None) in self._places:
            found = self.object(COMMON)
        else:
            raise UserError(f"{self.folder}: has neither {COMMON} nor {LEGACY_COMMON}: not written by megatron-core.")
        found = found[0] if isinstance(found, list) and found else found
        if not isinstance(found, dict):
            raise UserError(f"{self.folder}: its common state is no dict.")
        return found

    def object(self, key: str) -> Any:
        """Something that is no tensor, by its key."""
        file, start, length = self._places[key, None]
        data = os.pread(self._descriptor(file), length, start)
        return read_saved(data, f"{self.folder / file}: {key}")

    def check(self, keys: Collection[str]) -> None:
        """Read each chunk once and compare it with torch.save's checksums. Raises UserError for one that differs."""
        for key in keys:
            for chunk in self.tensors[key].chunks:
                where = f"{self.folder / chunk.file}: the chunk of {key} at {list(chunk.offset)}"
                window = _Window(self._descriptor(chunk.file), chunk.start, chunk.length, where)
                with _opened(window, where) as archive:
                    if archive.testzip() is not None:
                        raise UserError(f"{where} is damaged: not the checksum that torch.save has written.")

    def fingerprint(self) -> list[list[Any]]:
        """What tells one state of the folder from another without reading it: [name, bytes, changed]."""
        stats = [(path.name, path.stat()) for path in sorted(self.folder.iterdir()) if path.is_file()]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def close(self) -> None:
        """Close the files."""
        self._descriptors.close()

    def _descriptor(self, name: str) -> int:
        try:
            return self._descriptors.get(name)
        except ValueError as error:
            raise UserError(f"{self.folder}: a chunk lies in {error}.") from None
        except OSError as error:
            raise UserError(f"{self.folder / name}: {error.strerror}, but {METADATA} names it.") from None


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int, where: str) -> None:
        self._descriptor, self._start, self._length, self._at, self.where = descriptor, start, length, 0, where

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As files do."""
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        """As files do."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As files do."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._descriptor, [view], self._start + self._at) if view.nbytes else 0
        self._at += count
        return count


def _tensor_start(blob: _Window, dtype: str, shape: tuple[int, ...], where: str) -> int:
    """Where a saved tensor's elements begin in its blob. Raises UserError unless it is the contiguous one expected."""
    with _opened(blob, where) as archive:
        root = archive.namelist()[0].partition("/")[0]
        tensor = _pickled(archive, root, where)
        if not isinstance(tensor, Tensor):
            raise UserError(f"{where}: expected a tensor.")
        storage, first, size, stride = tensor.args[:4]
        _, kind, name, _, _ = storage.pid
        size, stride = tuple(getattr(size, "value", size)), tuple(stride)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        plain = all(
            given == wanted or length == 1 for given, wanted, length in zip(stride, strides, shape, strict=False)
        )
        if (kind, size) != (dtype, shape) or not plain or _is_big_endian(archive, root):
            raise UserError(
                f"{where}: expected {dtype} {list(shape)}, row by row; found {kind} {list(size)} {list(stride)}."
            )
        member = archive.getinfo(f"{root}/data/{name}")
        if member.file_size < (first + math.prod(shape)) * ITEM_BYTES[dtype]:
            raise UserError(f"{where}: {member.file_size:,} bytes are too few for {dtype} {list(shape)}.")
        blob.seek(member.header_offset + 26)  # lengths of the name and of the extra field that follow the header
        name_bytes, extra_bytes = struct.unpack("<HH", blob.read(4) or b"")
        return member.header_offset + 30 + name_bytes + extra_bytes + int(first) * ITEM_BYTES[dtype]


def read_saved(data: bytes, where: str) -> Any:
    """What torch.save wrote, tensors in it as records. Raises UserError for anything that plain data does not need."""
    with _opened(io.BytesIO(data), where) as archive:
        root = archive.namelist()[0].partition("/")[0]
        return _with_numbers(_pickled(archive, root, where), archive, root)


def _with_numbers(value: Any, archive: zipfile.ZipFile, root: str) -> Any:
    """The value with fp32 tensors of a few elements (a loss scale) as lists of numbers."""
    if isinstance(value, dict):
        return {key: _with_numbers(each, archive, root) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each, archive, root) for each in value]
    if not isinstance(value, Tensor):
        return value
    storage, first, size, _ = value.args[:4]
    count = math.prod(getattr(size, "value", size))
    if storage.pid[1] != "float32" or count > 8:
        return value
    data = archive.read(f"{root}/data/{storage.pid[2]}")
    return np.frombuffer(data, dtype=np.float32, count=count, offset=4 * first).tolist()


def _opened(file: Any, where: str) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()) or not archive.namelist():
            raise ValueError("its members are compressed")
        return archive
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UserError(f"{where}: not what torch.save writes ({error}).") from None


def _pickled(archive: zipfile.ZipFile, root: str, where: str) -> Any:
    try:
        data = archive.read(f"{root}/data.pkl")
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{where}: not what torch.save writes ({error}).") from None
    return read(data, OF_BLOBS, where, outside=True)


def _is_big_endian(archive: zipfile.ZipFile, root: str) -> bool:
    name = f"{root}/byteorder"
    return name in archive.namelist() and archive.read(name) != b"little"


__all__ = ["COMMON", "METADATA", "Namespace", "Outside", "PickledRecord", "TorchDist", "read_saved"]
