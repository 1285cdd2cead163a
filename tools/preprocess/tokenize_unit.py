"""A unit becomes a shard: what every worker does, one unit after another."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.inputs import empty_path
from data.manifest import FileSum, ShardManifest
from data.raw import documents
from data.raw.reading import ReadOptions, Rejects
from data.raw.units import Unit
from data.shard_writer import ShardWriter
from data.shards import token_dtype
from data.tokenizers.base import Tokenizer
from program.errors import printable
from tools.preprocess.encoding import Encoding, UnitCounts
from tools.preprocess.output import (
    Output,
    saying_where_no_space_is,
    write_whole,
)
from tools.preprocess.worker_pool import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """How units become shards."""

    units: list[Unit]
    reading: ReadOptions
    encoding: Encoding
    tokenizer: Tokenizer
    tokenizer_name: str
    output: Output
    is_last_stage: bool
    """Whether a unit's shard is a result; else a later stage takes it up."""

    def prefix(self, index: int) -> Path:
        """Of a unit's shard."""
        place = self.output.shard if self.is_last_stage else lambda *which: self.output.kept("unit", *which)
        return place(index, len(self.units))

    def run_task(self, index: int, report: Report) -> None:
        """Make the shard of one unit; what it would not hold is reported by UserError, and nothing of it stays."""
        prefix, unit, seen = self.prefix(index), self.units[index], UnitCounts()
        rejects = Rejects(self.reading.on_bad_document)

        def describe(writer: ShardWriter, files: dict[str, FileSum]) -> ShardManifest:
            counts = {
                "text_bytes": seen.text_bytes,
                "empty": seen.empty,
                "rejected": rejects.count,
                "special_text": seen.special_text,
            }
            source = tuple(map(str, unit.parts))
            return self.manifest(writer, files, source=source, counts=counts, rejected=tuple(rejects.shown))

        with saying_where_no_space_is(prefix):
            try:
                with ShardWriter(prefix, self.tokenizer.vocab_size, describe) as writer:
                    self._write_documents(writer, unit, seen, rejects, report)
                    write_whole(self.output.hashes(index), np.array(seen.hashes, np.uint64).tobytes())
                    if not writer.document_count:
                        raise _NoDocument
            except _NoDocument:
                write_whole(empty_path(prefix), describe(writer, {}).dump().encode())

    def _write_documents(
        self, writer: ShardWriter, unit: Unit, seen: UnitCounts, rejects: Rejects, report: Report
    ) -> None:
        before = 0
        for batch in documents.read(unit, self.reading, rejects):
            if batch.texts:
                where = partial(documents.where, unit, batch, reading=self.reading)
                writer.add_documents(*self.encoding.encode(batch.texts, seen, rejects, where))
            report(batch.source_bytes, writer.token_count - before)
            before = writer.token_count

    def manifest(
        self,
        writer: ShardWriter,
        files: dict[str, FileSum],
        *,
        source: tuple[str, ...],
        counts: dict[str, int],
        rejected: tuple[str, ...] = (),
    ) -> ShardManifest:
        """What a shard's manifest says, whatever stage writes it."""
        return ShardManifest(
            tokens=writer.token_count,
            documents=writer.document_count,
            dtype=token_dtype(writer.vocab_size).name,
            vocab_size=writer.vocab_size,
            tokenizer=printable(self.tokenizer_name),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            eod=self.tokenizer.eod,
            append_eod=self.encoding.eod is not None,
            special_text=self.encoding.special_text,
            engine=self.output.engine() or "",
            source=tuple(map(printable, source)),
            counts=counts,
            rejected=rejected,
            files=files,
        )


class _NoDocument(Exception):
    """A unit that holds nothing to write."""
