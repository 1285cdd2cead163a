"""What a part of the inputs tells of all: how much there is to read, and how much will be written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.raw import documents, hub
from data.raw.reading import DocumentBatch, ReadOptions, Rejects
from data.raw.units import Unit

SAMPLED_UNITS = 8
SAMPLE_BYTES = 256 << 10
SAMPLED_DOCUMENT = 32 << 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Some documents of the whole input."""

    texts: list[str]
    text_per_byte: float
    """Bytes of text for each byte of files."""
    row_bytes: float
    """Bytes of text of a row of datasets."""
    mean_document: float
    """Bytes of text."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much units hold, as far as it is known before they are read."""

    file_bytes: int
    """Bytes on disk."""
    rows: float
    """Of datasets that say how many they have."""
    unknown: tuple[str, ...]
    """Datasets that do not."""

    def to_read(self, sample: Sample) -> int | None:
        """What batches of documents will count together (documents.DocumentBatch); None: not known."""
        return None if self.unknown else round(self.file_bytes + self.rows * sample.row_bytes)

    def text_bytes(self, sample: Sample) -> float:
        """Bytes of text, without those of unknown datasets."""
        return self.file_bytes * sample.text_per_byte + self.rows * sample.row_bytes


def extent(units: Sequence[Unit]) -> Extent:
    """Of some units. Raises UserError where a dataset cannot be opened."""
    parts = [part for unit in units for part in unit.parts]
    datasets = dict.fromkeys(part.source for part in parts if part.source.kind == "dataset")
    by_dataset = {source: hub.step_rows(source.path, source.revision) for source in datasets}
    steps = [(by_dataset[part.source], part.start) for part in parts if part.source in by_dataset]
    return Extent(
        file_bytes=sum(part.size for part in parts if part.source not in by_dataset),
        rows=sum(rows[step] for rows, step in steps if rows is not None),
        unknown=tuple(source.path for source, rows in by_dataset.items() if rows is None),
    )


def sample(left: Sequence[Unit], reading: ReadOptions) -> Sample:
    """The first documents of units that are spread over all."""
    most = 2 if _is_dataset(left[0]) else SAMPLED_UNITS
    chosen = left[:: max(1, len(left) // most)][:most]
    # Of what is packed, as much is read ahead, and counted as read: a little of it would tell nothing.
    little = replace(reading, batch_bytes=min(reading.batch_bytes, SAMPLE_BYTES))
    texts: list[str] = []
    of_files, of_datasets = _BatchSizes(), _BatchSizes()
    for unit in chosen:
        how = reading if any(part.source.compression for part in unit.parts) else little
        batch = next(documents.read(unit, how, Rejects("skip")), DocumentBatch([], 1))
        (of_datasets if _is_dataset(unit) else of_files).add(batch)
        room = SAMPLE_BYTES // len(chosen)
        for text in batch.texts:
            if room <= 0:
                break
            texts.append(text[: min(room, SAMPLED_DOCUMENT)])
            room -= len(texts[-1])
    mean_document = (of_files.text + of_datasets.text) / max(1, of_files.count + of_datasets.count)
    return Sample(
        texts,
        text_per_byte=of_files.text / max(1, of_files.read),
        row_bytes=of_datasets.text / of_datasets.count if of_datasets.count else mean_document,
        mean_document=mean_document,
    )


def _is_dataset(unit: Unit) -> bool:
    return unit.parts[0].source.kind == "dataset"


@dataclass(slots=True)
class _BatchSizes:
    """Of batches: bytes of text, bytes read, number of documents."""

    text: int = 0
    read: int = 0
    count: int = 0

    def add(self, batch: DocumentBatch) -> None:
        self.text += sum(len(text.encode()) for text in batch.texts)
        self.read += batch.source_bytes
        self.count += len(batch.texts)
