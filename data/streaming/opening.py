"""From `data.stream` to what streams are made of: inputs found, cut into units, and tried out."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig
from data.raw import hub, inputs, units
from data.raw.csv_records import DELIMITERS
from data.raw.documents import read
from data.raw.input_file import InputSource
from data.raw.reading import ReadOptions, Rejects
from data.raw.units import Unit
from data.streaming import dealing
from data.tokenizers import engines
from data.tokenizers.base import Tokenizer
from data.tokenizers.engines import Engine
from program.errors import UserError

BATCH_BYTES = 256 << 10
"""Of a file, read at a time: a rank has many streams open."""
SAMPLED_UNITS = 4
SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 100, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What the logical streams of one source are made of; a seed makes them."""

    name: str
    """Of the source, in data.stream_blend; "" for all of data.stream."""
    units: tuple[Unit, ...]
    count: int
    reading: ReadOptions
    engine: Engine
    eod: int
    fingerprints: dict[str, str]
    """Of each input, as it was named: hex digest of what is in it."""
    shuffle: int
    """data.stream_shuffle."""
    plan: dict[str, str | int | float]
    """What else decides which samples there are."""
    console: Callable[[str], None]


def open_streams(config: DataConfig, tokenizer: Tokenizer, console: Callable[[str], None]) -> tuple[Streams, ...]:
    """Find the inputs and read a little of them, so that most mistakes are said before any rank starts. One for all of
    data.stream, or for each source of data.stream_blend.

    Raises UserError for inputs that are missing, empty, unreadable or not as expected where they are tried.
    """
    by_input = inputs.find_each(config.streamed, config.streamed_by, console, config.csv_column)
    if config.stream:
        return (_opened("", by_input, config, tokenizer, console),)
    for name in config.stream_blend:
        if not any(one.size for one in by_input.get(name, ())):  # those of shards are left out
            raise UserError(f"data.stream_blend: {name} holds no text. Leave it out (token shards: data.blend).")
    return tuple(_opened(name, {name: by_input[name]}, config, tokenizer, console) for name in config.stream_blend)


def _opened(
    name: str,
    by_input: dict[str, list[InputSource]],
    config: DataConfig,
    tokenizer: Tokenizer,
    console: Callable[[str], None],
) -> Streams:
    reading = ReadOptions(
        jsonl_key=config.jsonl_key,
        csv_column=config.csv_column,
        on_bad_document=config.on_bad_document,
        max_document_bytes=int(config.max_document_mb * 1e6),
        max_expansion=config.max_expansion,
        batch_bytes=BATCH_BYTES,
        flags="data.",
    )
    sources = [source for found in by_input.values() for source in found]
    total_bytes = sum(one.size for one in sources if one.kind != "dataset")
    divided = units.divide(sources, dealing.unit_bytes(total_bytes, config.stream_count))
    sample = _sample(divided, reading, list(by_input))
    engine = engines.choose(tokenizer, "auto", False, sample, console)
    for one in sources:
        if one.revision and not Path(one.path).exists():
            hubs = f"{inputs.HUB}{one.path}"
            console(f"data: {hubs} is at revision {one.revision}; {hubs}#{one.revision} keeps to it")
    sizes = [share.size / 1e6 for share in dealing.deal(divided, config.stream_count, "")]
    what = name or f"{len(sources)} input(s)"
    console(
        f"data: streaming {what} in {len(divided)} unit(s) as {config.stream_count} streams of "
        f"{min(sizes):.2f} to {max(sizes):.2f} MB on disk, tokenised by {engine.name} while training"
    )
    return Streams(
        name=name,
        units=tuple(divided),
        count=config.stream_count,
        reading=reading,
        engine=engine,
        eod=tokenizer.eod,
        fingerprints={named: fingerprint(found) for named, found in by_input.items()},
        shuffle=config.stream_shuffle,
        plan=_plan(config, any(one.kind in DELIMITERS for one in sources), reading),
        console=console,
    )


def _plan(config: DataConfig, has_columns: bool, reading: ReadOptions) -> dict[str, str | int | float]:
    """It is part of fingerprints: what is at its default, and was not there before, is left out."""
    names = ("stream_count", "jsonl_key", "on_bad_document", "max_document_mb", "max_expansion")
    plan: dict[str, str | int | float] = {name: getattr(config, name) for name in names}
    columns = {"csv_column": reading.column} if has_columns else {}
    return plan | columns | ({"stream_shuffle": config.stream_shuffle} if config.stream_shuffle else {})


def fingerprint(sources: Sequence[InputSource]) -> str:
    """Hex digest of files by name, size, time of change, beginning and end, wherever they lie; of a dataset, its name
    on the Hub and its revision."""
    if len(sources) == 1 and sources[0].revision:
        where = "" if hub.is_saved_dataset(Path(sources[0].path)) else f"{sources[0].path}, "
        return f"{where}revision {sources[0].revision}"
    digest = hashlib.blake2b(digest_size=16)
    for one in sources:
        name = one.path if one.kind == "dataset" else Path(one.path).name
        digest.update(f"{name}\0{one.kind}\0{one.compression}\0{one.size}\0{one.changed_ns}\0{one.ends}\0".encode())
    return digest.hexdigest()


def _sample(divided: Sequence[Unit], reading: ReadOptions, names: Sequence[str]) -> list[str]:
    """Documents of some units that are spread over all, the same in every process."""
    spread = divided[:: max(1, len(divided) // SAMPLED_UNITS)][:SAMPLED_UNITS]
    texts = [text for unit in spread for text in _first(unit, reading)]
    if not texts:
        texts = next(filter(None, (_first(unit, reading) for unit in divided)), [])
    if not texts:
        raise UserError(f"data.stream: no document with text in {', '.join(names)}.")
    return texts


def _first(unit: Unit, reading: ReadOptions) -> list[str]:
    """Beginnings of the documents with text of a unit's first batch that has any."""
    batches = read(unit, reading, Rejects(reading.on_bad_document, reading.flags))
    beginnings = ([text[:SAMPLED_CHARACTERS] for text in batch.texts if text] for batch in batches)
    return next(filter(None, beginnings), [])[:SAMPLED_DOCUMENTS]
