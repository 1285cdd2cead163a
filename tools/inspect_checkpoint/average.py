"""The mean of several checkpoints' weights, as a checkpoint of weights alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.hf.files import CARRIED_BYTES
from program.durable import replace_file
from program.errors import UserError
from program.printing import some
from program.untrusted import JSON_BYTES, read_bytes, read_text
from tools.inspect_checkpoint.contents import Stored, kind_of, parameters
from tools.inspect_checkpoint.numbers import Shape, read, rectangles
from tools.shared import resumable
from tools.shared.checked_checkpoint import CheckedReader, check_files
from tools.shared.dtypes import FLOATS, from_numbers, to_numbers
from tools.shared.part_files import in_parts, is_committed, is_done, part_name, write_parts
from tools.shared.written import check_new
from training.checkpoint.format.manifest import MANIFEST, read_manifest, write_manifest
from training.checkpoint.format.pieces import ITEM_BYTES, TensorGroup
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import INDEX, PIECES, merge, remove_tables
from training.checkpoint.format.writer import FileWriter

DTYPE = "float32"
"""Of the means: what a run's own weights, its masters, are."""

FILE_BYTES = 4 << 30
"""Of a file of the result; what is lost when the work is killed is one per worker."""


@dataclass(slots=True, frozen=True)
class AveragedBlock:
    """What is averaged in one go: a piece of the result."""

    name: str
    key: str
    shape: Shape
    offset: Shape
    size: Shape

    @property
    def bytes(self) -> int:
        """Of the piece."""
        return math.prod(self.size) * ITEM_BYTES[DTYPE]


@dataclass(kw_only=True, frozen=True)
class AveragePlan:
    """One mean, as every worker works it out from the same checkpoints."""

    sources: tuple[Path, ...]
    shares: tuple[float, ...]
    """One for each source; 1 in all."""
    folder: Path
    """The unfinished checkpoint."""

    @cached_property
    def parts(self) -> list[list[AveragedBlock]]:
        """Blocks by the file that they go into; the same whatever the number of workers."""
        with FileReader(self.sources[-1]) as reader:
            weights = weights_of(reader)
        found = (
            AveragedBlock(name, kind_of(stored.key)[1], stored.shape, offset, shape)
            for name, stored in weights.items()
            for offset, shape in rectangles(stored.shape)
        )
        return in_parts(found, FILE_BYTES)

    def run_worker(self, worker: int, workers: int, report: resumable.Report) -> None:
        """Every ``workers``-th part from number ``worker`` on, but for those that are done."""
        readers = [CheckedReader(source) for source in self.sources]
        weights = [weights_of(reader) for reader in readers]
        try:
            for number, part in list(enumerate(self.parts))[worker::workers]:
                if is_done(self.folder, number):
                    continue
                with FileWriter(self.folder, part_name(number)) as file:
                    for block in part:
                        stored = [of[block.name] for of in weights]
                        words = mean(readers, stored, self.shares, block.offset, block.size)
                        data = memoryview(words.reshape(-1).view(np.uint8))
                        file.add(TensorGroup((block.key,), DTYPE, block.shape), block.offset, block.size, [data])
                        report(block.bytes)
        finally:
            for reader in readers:
                reader.close()


def mean(
    readers: Sequence[FileReader], stored: Sequence[Stored], shares: Sequence[float], offset: Shape, shape: Shape
) -> np.ndarray:
    """The rectangle's mean over all checkpoints, added up in fp64: words of DTYPE."""
    total = np.zeros(shape)
    for reader, one, share in zip(readers, stored, shares, strict=True):
        total += share * to_numbers(read(reader, one, offset, shape), one.dtype).astype(np.float64)
    return from_numbers(total, DTYPE)


def average(sources: Sequence[Path], target: Path, shares: Sequence[float] | None, workers: int) -> None:
    """Write ``target``, with configuration, state and tokenizer of the last source.

    Killed and started again it goes on with the next file. Raises UserError for a target that is there and sources
    that are not of one shape, before anything is written, and for damaged ones, of which nothing is left.
    """
    check_new(target)
    check(sources)
    manifests = [read_text(source / MANIFEST, JSON_BYTES) for source in sources]
    parts = normalised(shares, len(sources))
    job_text: dict[str, Any] = {"average": list(map(str, sources)), "shares": parts, "of": manifests, "version": 1}
    with resumable.unfinished(target, job_text) as folder:
        job = AveragePlan(sources=tuple(sources), shares=tuple(parts), folder=folder)
        if not is_committed(folder):
            write_parts(job, folder, job.parts, workers, "average")
            commit(job)
        remove_tables(folder, map(part_name, range(len(job.parts))))


def commit(job: AveragePlan) -> None:
    """Index, and the carried files of the last source; the manifest last."""
    last = job.sources[-1]
    facts = merge(job.folder, map(part_name, range(len(job.parts))))
    manifest = read_manifest(last)
    for name in manifest.files:
        if name not in (INDEX, PIECES) and not name.endswith(".bin"):
            replace_file(job.folder / name, read_bytes(last / name, CARRIED_BYTES))
    kept = {name: value for name, value in manifest.about.items() if name not in ("source", "average_of")}
    said = [f"{source.name} x {share:.6g}" for source, share in zip(job.sources, job.shares, strict=True)]
    write_manifest(job.folder, facts, {**kept, "average_of": said})


def check(sources: Sequence[Path]) -> None:
    """Raises UserError unless all are whole, by their sizes, and hold weights of the same names and shapes."""
    for source in sources:
        check_files(source)
    tables = []
    for source in sources:
        with FileReader(source) as reader:
            tables.append(weights_of(reader))
    for source, table in zip(sources[1:], tables[1:], strict=True):
        if problem := _difference(sources[0], tables[0], source, table):
            raise UserError(f"only checkpoints of one shape have a mean: {problem}.")


def weights_of(reader: FileReader) -> dict[str, Stored]:
    """Name -> its weights, the fp32 masters where there are any. Raises UserError for what is no floating point."""
    found = {parameter.name: parameter.weights for parameter in parameters(reader.tensors) if parameter.weights}
    if wrong := [f"{name} {stored.dtype}" for name, stored in found.items() if stored.dtype not in FLOATS]:
        raise UserError(f"{reader.folder}: no mean of {some(wrong, 3)}; expected one of {', '.join(FLOATS)}.")
    return found


def normalised(shares: Sequence[float] | None, count: int) -> list[float]:
    """Shares that add up to 1, equal ones for None. Raises UserError for another number of them, or negative ones."""
    if shares is None:
        return [1 / count] * count
    given = " ".join(f"{share:g}" for share in shares)
    if len(shares) != count:
        raise UserError(f"--weights {given}: {len(shares)} numbers for {count} checkpoints. Give one for each.")
    if not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise UserError(f"--weights {given}: expected numbers of 0 or more, and one above 0.")
    return [share / sum(shares) for share in shares]


def _difference(first: Path, one: Mapping[str, Stored], second: Path, other: Mapping[str, Stored]) -> str:
    found = [
        f"{name} is {list(one[name].shape)} in {first} and {list(other[name].shape)} in {second}"
        for name in one.keys() & other.keys()
        if one[name].shape != other[name].shape
    ]
    for here, has, lacks in ((first, one, other), (second, other, one)):
        found += [f"only {here} has {name}" for name in has.keys() - lacks.keys()]
    return some(sorted(found), 3)
