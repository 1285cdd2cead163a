"""Pickles read as data: names in them are looked up in a closed table of our own, never imported.

A pickle is a program: it names what to import and calls it with what it likes. Here a name gives a
``PickledRecord``, which keeps the arguments it is "called" with, or a plain word for a dtype; a name that is not in
the table ends the reading. So no code of a pickle can run.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

from program.errors import UserError

DTYPES = {
    name: name
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16",
                 "int8", "uint8", "bool")
}  # fmt: skip
"""Torch's dtypes by their names in ``torch``."""

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
}  # fmt: skip
"""Torch's typed storages, which name the dtype of a tensor in torch.save's files."""


class PickledRecord:
    """Stands for an object of some class: keeps what the object would have been made of, and does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "PickledRecord":
        """As a class is called by a pickle."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing more."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def record(name: str) -> type[PickledRecord]:
    """A class of records of its own."""
    return type(name, (PickledRecord,), {})


class Size(PickledRecord):
    """A shape, ``torch.Size``."""

    @property
    def value(self) -> tuple[int, ...]:
        """Its numbers."""
        return tuple(int(number) for number in (self.args[0] if self.args else ()))


class Ordered(dict[Any, Any]):
    """A dict that keeps its order, as every dict does now."""


Known = Mapping[tuple[str, str], Any]


class Inert(PickledRecord):
    """Of any class; lists and dicts among them take what is put into them."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Not kept."""

    def append(self, value: Any) -> None:
        """Not kept."""

    def extend(self, values: Any) -> None:
        """Not kept."""


class InertNames(dict[tuple[str, str], Any]):
    """A table of names, in which every name of some packages gives a record of its own: it keeps what it is called
    with, and does nothing. Settings of forks have classes that no list has."""

    def __init__(self, known: Known, packages: tuple[str, ...]) -> None:
        super().__init__(known)
        self._packages = packages

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        module = key[0] if isinstance(key, tuple) else ""
        return any(module == package or module.startswith(f"{package}.") for package in self._packages)

    def __missing__(self, key: tuple[str, str]) -> Any:
        return Inert


class _ClosedUnpickler(pickle.Unpickler):
    """Knows the names of a table alone."""

    def __init__(self, file: BinaryIO, known: Known, persistent: Known | None) -> None:
        super().__init__(file)
        self._known, self._persistent = known, persistent

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name; nothing is imported."""
        if (module, name) not in self._known:
            raise UserError(f"it names {module}.{name}, which no checkpoint needs")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """A reference to something outside the pickle: of torch.save, a tensor's bytes."""
        if self._persistent is None:
            raise UserError("it refers to something outside of it")
        return Outside(pid)


class Outside:
    """A reference to something outside the pickle."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid


def read(data: bytes, known: Known, where: str, outside: bool = False) -> Any:
    """What a pickle holds. ``outside``: references such as torch.save's are there.

    Raises UserError, naming ``where``, for anything that is not in the table or no pickle.
    """
    return read_next(io.BytesIO(data), known, where, outside)


def read_next(file: BinaryIO, known: Known, where: str, outside: bool = False) -> Any:
    """The same of one pickle of a file, which stands behind it then."""
    try:
        return _ClosedUnpickler(file, known, {} if outside else None).load()
    except UserError as error:
        raise UserError(f"{where}: refused, nothing was run: {error}. Do not trust this file.") from None
    except Exception as error:  # a pickle can make its reader fail in any way
        raise UserError(f"{where}: not what Megatron or torch.save writes ({type(error).__name__}: {error}).") from None
