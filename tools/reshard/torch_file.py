"""Files that torch.save wrote, read as data: what they hold, and their tensors by rectangle, from where they lie.

Both of torch.save's formats: an uncompressed zip file with a member for each storage, and the one before torch 1.6,
where storages follow the pickle (torch/serialization.py of 2.13: _save, _legacy_save). No pickle is executed.
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from program.errors import UserError
from program.untrusted import regular_descriptor
from tools.reshard.inert_pickle import InertNames, Ordered, Outside, PickledRecord, read, read_next, record
from tools.reshard.megatron.files import OF_BLOBS, Tensor
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS, read_words

PICKLE_BYTES = 2 << 30
"""Largest pickle that is read: names, shapes and settings; tensors' bytes lie beside it."""
SPAN_BYTES = 64 << 20
"""Read in one go at most."""
_MAGIC = 0x1950A86A20F9469CFC6C
_CUT = "ends before what it says it holds. Copy it again."

Parameter, TypedTensor, Subclass = record("Parameter"), record("TypedTensor"), record("Subclass")


class _AnyDict(Ordered):
    """A dict, whatever its class was made with."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Attributes of a dict's subclass are not kept."""


OF_FILES: Mapping[tuple[str, str], Any] = InertNames(
    {
        **OF_BLOBS,
        **{("torch", name): name for name in ("uint16", "uint32", "uint64", "complex64", "float8_e8m0fnu")},
        ("torch", "device"): record("Device"),
        ("torch", "Tensor"): record("TensorClass"),
        ("torch.storage", "UntypedStorage"): "untyped",
        ("torch", "UntypedStorage"): "untyped",
        ("torch._utils", "_rebuild_tensor"): Tensor,
        ("torch._utils", "_rebuild_tensor_v3"): TypedTensor,
        ("torch._utils", "_rebuild_parameter"): Parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): Parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): Subclass,
        ("collections", "defaultdict"): _AnyDict,
        ("_codecs", "encode"): record("Encoded"),
        ("_io", "BytesIO"): record("Bytes"),
        ("builtins", "getattr"): record("Attribute"),
        ("builtins", "set"): record("Set"),
        ("__builtin__", "set"): record("Set"),
        ("builtins", "dict"): record("Dict"),
        ("builtins", "bytearray"): record("Bytes"),
        ("functools", "partial"): record("Partial"),
        ("pathlib", "PosixPath"): record("Path"),
        ("pathlib", "Path"): record("Path"),
        ("pathlib._local", "PosixPath"): record("Path"),
    },
    ("megatron", "deepspeed", "numpy", "transformers", "apex", "transformer_engine", "torch.nn", "torch.optim",
     "torch.distributed", "torch.torch_version", "torch._C", "torch.utils"),
)  # fmt: skip
"""Names in files of Megatron-LM, its forks and DeepSpeed. A class of their packages gives a record, which is inert."""


@dataclass(slots=True, frozen=True)
class StridedView:
    """A tensor in a file: element (i, j, ...) lies ``strides`` elements from the first one."""

    file: str
    """Within the folder."""
    start: int
    """Byte of the first element."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> "StridedView":
        """A rectangle of it."""
        first = sum(at * stride for at, stride in zip(offset, self.strides, strict=True))
        return StridedView(self.file, self.start + first * ITEM_BYTES[self.dtype], self.dtype, shape, self.strides)

    def reshaped(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> "StridedView":
        """The same elements counted otherwise; strides in elements."""
        return StridedView(self.file, self.start, self.dtype, shape, strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie row by row without gaps."""
        wanted = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return all(
            size == 1 or stride == own for size, stride, own in zip(self.shape, self.strides, wanted, strict=True)
        )


def read_view(descriptor: int, view: StridedView, into: np.ndarray, where: str) -> None:
    """Fill ``into``, of the view's shape, with its words. Raises UserError where the file is cut short."""
    if not into.size:
        return
    item = ITEM_BYTES[view.dtype]
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if span * item <= max(item, min(SPAN_BYTES, 8 * into.nbytes)):
        words = np.empty(span, dtype=WORDS[item])
        if read_words(descriptor, view.start, words) is not None:
            raise UserError(f"{where}: {_CUT}")
        steps = tuple(stride * item for stride in view.strides)
        into[...] = np.lib.stride_tricks.as_strided(words, view.shape, steps)
        return
    axis = max((dim for dim, size in enumerate(view.shape) if size > 1), key=lambda dim: view.strides[dim])
    half = view.shape[axis] // 2
    for first, last in ((0, half), (half, view.shape[axis])):
        offset = tuple(first if dim == axis else 0 for dim in range(len(view.shape)))
        shape = tuple(last - first if dim == axis else size for dim, size in enumerate(view.shape))
        inside = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
        read_view(descriptor, view.part(offset, shape), into[inside], where)


@dataclass(slots=True, frozen=True)
class SavedStorage:
    """Where the elements of tensors lie in a file."""

    start: int
    bytes: int
    crc: int | None
    """Of the zip member."""


class TorchFile:
    """What one file holds: ``value`` with a ``StridedView`` for each tensor, and plain values; the rest as records."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._where = name, str(folder / name)
        try:
            with os.fdopen(regular_descriptor(folder / name), "rb") as file:
                is_zip = file.read(4) == b"PK\x03\x04"
                file.seek(0)
                found, self.storages = self._read_zip(file) if is_zip else self._read_old(file)
        except OSError as error:
            raise UserError(f"{self._where}: {error.strerror or error}.") from None
        try:
            self.value = self._with_views(found)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UserError(f"{self._where}: not what torch.save writes ({type(error).__name__}: {error}).") from None

    def _read_zip(self, file: BinaryIO) -> tuple[Any, dict[str, SavedStorage]]:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if not members or any(member.compress_type != zipfile.ZIP_STORED for member in members):
                    raise ValueError("its members are compressed")
                root = members[0].filename.partition("/")[0]
                names = {member.filename: member for member in members}
                main = names[f"{root}/data.pkl"]
                if main.file_size > PICKLE_BYTES:
                    raise ValueError(f"its data.pkl has {main.file_size:,} bytes")
                order = names.get(f"{root}/byteorder")
                if order is not None and archive.read(order) != b"little":
                    raise ValueError("it is big endian")
                value = read(archive.read(main), OF_FILES, self._where, outside=True)
                prefix = f"{root}/data/"
                storages = {
                    name.removeprefix(prefix): SavedStorage(_data_start(file, member), member.file_size, member.CRC)
                    for name, member in names.items()
                    if name.startswith(prefix)
                }
        except (zipfile.BadZipFile, ValueError, KeyError, struct.error, EOFError, NotImplementedError) as error:
            raise UserError(f"{self._where}: not what torch.save writes ({error}). Copy it again.") from None
        return value, storages

    def _read_old(self, file: BinaryIO) -> tuple[Any, dict[str, SavedStorage]]:
        """The format before torch 1.6."""
        size = os.fstat(file.fileno()).st_size
        if read_next(file, {}, self._where) != _MAGIC:
            raise UserError(f"{self._where}: not what torch.save writes.")
        read_next(file, {}, self._where)  # the protocol's version
        read_next(file, {}, self._where)  # of the machine: byte order and sizes of C's numbers
        value = read_next(file, OF_FILES, self._where, outside=True)
        keys = read_next(file, {}, self._where)
        numbers = {pid[2]: (str(pid[1]), int(pid[4])) for pid in _pids(value)}
        found, position = {}, file.tell()
        for key in keys if isinstance(keys, list) else []:
            dtype, count = numbers.get(key, ("", -1))
            file.seek(position)
            if dtype not in ITEM_BYTES or file.read(8) != struct.pack("<q", count):
                raise UserError(f"{self._where}: {_CUT}")
            found[str(key)] = SavedStorage(position + 8, count * ITEM_BYTES[dtype], None)
            position += 8 + count * ITEM_BYTES[dtype]
        if position > size:
            raise UserError(f"{self._where}: {_CUT}")
        return value, found

    def _with_views(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_views(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._with_views(each) for each in value]
        if isinstance(value, tuple):
            return tuple(self._with_views(each) for each in value)
        if isinstance(value, Parameter):
            return self._with_views(value.args[0])
        if isinstance(value, Subclass) and value.args[0] in (Tensor, TypedTensor, Parameter):
            return self._with_views(value.args[0](*value.args[2]))  # a record, as every class here is
        if isinstance(value, TypedTensor):
            return self._view(value, value.args[6])
        if isinstance(value, Tensor):
            return self._view(value, None)
        if isinstance(value, PickledRecord) and isinstance(value.state, dict):
            value.state = {key: self._with_views(each) for key, each in value.state.items()}
        return value

    def _view(self, tensor: PickledRecord, dtype: str | None) -> StridedView:
        """Raises ValueError where it does not lie within its storage."""
        outside, first, size, strides = tensor.args[:4]
        _, kind, name, _, _ = outside.pid[:5]
        dtype = dtype or kind
        shape = tuple(int(length) for length in getattr(size, "value", size))
        strides = tuple(int(stride) for stride in getattr(strides, "value", strides))
        storage = self.storages[str(name)]
        if dtype not in ITEM_BYTES or len(strides) != len(shape) or first < 0 or min((*shape, *strides), default=0) < 0:
            raise ValueError(f"a tensor of {dtype} {list(shape)} {list(strides)}")
        item = ITEM_BYTES[dtype]
        last = first + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and (last + 1) * item > storage.bytes:
            raise ValueError(f"a tensor of {dtype} {list(shape)} is larger than its {storage.bytes:,} bytes")
        return StridedView(self.name, storage.start + int(first) * item, dtype, shape, strides)


def _data_start(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after its header, whose lengths of name and extra field are its own."""
    file.seek(member.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return member.header_offset + 30 + int(name_bytes) + int(extra_bytes)


def _pids(value: Any) -> Iterator[tuple[Any, ...]]:
    """Every reference to a storage."""
    if isinstance(value, Outside):
        yield value.pid
    elif isinstance(value, dict):
        for each in value.values():
            yield from _pids(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _pids(each)
    elif isinstance(value, PickledRecord):
        yield from _pids(value.args)
        yield from _pids(value.state)


def damaged_storages(descriptor: int, storages: Mapping[str, SavedStorage]) -> list[str]:
    """Names of those whose bytes do not have the checksum that torch.save has written for them."""
    found, buffer = [], bytearray(8 << 20)
    for name, storage in storages.items():
        if storage.crc is None:
            continue
        crc, position, rest = 0, storage.start, storage.bytes
        while rest:
            count = os.preadv(descriptor, [memoryview(buffer)[: min(rest, len(buffer))]], position)
            if not count:
                break
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            position, rest = position + count, rest - count
        if rest or crc != storage.crc:
            found.append(name)
    return found
