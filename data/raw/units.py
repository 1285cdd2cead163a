"""Units: what one shard is made from. Their list follows from the inputs and the unit size alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from data.raw.csv_records import DELIMITERS, cuts
from data.raw.input_file import InputSource, for_arrow, open_same
from program.errors import UserError


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A stretch of a source: bytes of a file (the lines that begin there), row groups, or a dataset's steps."""

    source: InputSource
    start: int
    stop: int
    size: int
    """Bytes on disk, for progress and for filling units; a dataset's step fills one, whatever it holds."""

    def __str__(self) -> str:
        return f"{self.source.path}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Unit:
    """The parts whose documents become one shard, in this order."""

    index: int
    parts: tuple[SourcePart, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)


def divide(sources: list[InputSource], unit_bytes: int) -> list[Unit]:
    """Units of about `unit_bytes`: large files are cut, small ones put together. What is compressed stays whole; plain
    csv files are read once for where their records begin.
    """
    units: list[Unit] = []
    gathered: list[SourcePart] = []
    size = 0
    for source in sources:
        for part in _parts(source, unit_bytes):
            if gathered and size + part.size > unit_bytes:
                units.append(Unit(len(units), tuple(gathered)))
                gathered, size = [], 0
            gathered.append(part)
            size += part.size
    if not gathered:
        raise UserError(f"no document in {sources[0].path}: its parquet files hold no rows.")
    return [*units, Unit(len(units), tuple(gathered))]


def _parts(source: InputSource, unit_bytes: int) -> Iterator[SourcePart]:
    if source.kind == "dataset":
        for step in range(source.size):
            yield SourcePart(source, step, step + 1, unit_bytes)
    elif source.kind == "parquet":
        yield from _row_groups(source)
    elif source.kind in DELIMITERS and not source.compression:
        at = [0, *cuts(source, unit_bytes), source.size]
        for start, stop in pairwise(at) if source.size else ():
            yield SourcePart(source, start, stop, stop - start)
    elif source.kind == "jsonl" and not source.compression:
        for start in range(0, source.size, unit_bytes):
            stop = min(start + unit_bytes, source.size)
            yield SourcePart(source, start, stop, stop - start)
    elif source.size:
        yield SourcePart(source, 0, source.size, source.size)


def _row_groups(source: InputSource) -> Iterator[SourcePart]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source.path}: parquet needs `pip install pyarrow`.") from None
    try:
        with open_same(source) as file:
            metadata = pyarrow.parquet.ParquetFile(for_arrow(file, source)).metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source.path} is not a parquet file: {error}") from None
    total = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)) or 1
    for group in range(metadata.num_row_groups):
        share = metadata.row_group(group).total_byte_size / total
        yield SourcePart(source, group, group + 1, round(share * source.size))
