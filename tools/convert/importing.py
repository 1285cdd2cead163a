"""A Hugging Face folder becomes a checkpoint: rows of theirs into pieces of ours, block after block. No torch here."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.hf.tables import entries
from models.shapes import GPTShape
from parallel.layout import Layout
from tools.convert import recipe, work
from tools.convert.blocks import Block, blocks, entry_dtype, most_frequent_dtype, read_block
from tools.convert.checking import architecture, check, names_in
from tools.convert.parts import do, in_parts, is_committed, is_done, part_name
from tools.convert.source import Source
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.pieces import Group
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import FileWriter, write_durably
from training.checkpoint.progress import Progress
from training.checkpoint.state import JSON, State, write_state


@dataclass(kw_only=True, frozen=True)
class Import:
    """One import, as every worker works it out from the same folder."""

    source: Path
    folder: Path
    """The unfinished checkpoint."""
    dtype: str | None
    """None: each tensor's own."""
    max_file_bytes: int

    @cached_property
    def architecture(self) -> tuple[str, GPTShape]:
        """The model_type, and our shape of it. Raises UserError."""
        with Source(self.source) as source:
            return architecture(source)

    def parts(self, source: Source) -> list[list[Block]]:
        """Blocks by the file that they go into; the same whatever the number of workers."""
        model_type, shape = self.architecture
        names = names_in(source, model_type)
        found = (blocks(entry, entry_dtype(entry, source, names, self.dtype)) for entry in entries(model_type, shape))
        return in_parts(itertools.chain.from_iterable(found), self.max_file_bytes)

    def do(self, worker: int, workers: int, report: work.Report) -> None:
        """Every ``workers``-th part from number ``worker`` on, but for those that are done."""
        with Source(self.source) as source:
            names = names_in(source, self.architecture[0])
            for number, part in list(enumerate(self.parts(source)))[worker::workers]:
                if not is_done(self.folder, number):
                    self._write(part, number, source, names, report)

    def _write(
        self, part: Sequence[Block], number: int, source: Source, names: dict[str, str], report: work.Report
    ) -> None:
        with FileWriter(self.folder, part_name(number)) as file:
            for block in part:
                words = read_block(block, source, names)
                group = Group((block.entry.key,), block.dtype, block.entry.shape)
                file.add(group, *block.rectangle, [memoryview(words.reshape(-1).view(np.uint8))])
                report(block.bytes)


def import_folder(source: Path, target: Path, *, dtype: str | None, workers: int, max_file_bytes: int) -> list[str]:
    """Write ``target``, a checkpoint of weights with a ``config.toml``: notes for the user.

    Killed and started again, it goes on with the next file and writes the same bytes. Raises UserError for what is
    not supported, before anything is written.
    """
    with Source(source) as opened:
        model_type, shape = architecture(opened)
        notes = check(opened, model_type, shape)
        fingerprint: dict[str, Any] = {"source": str(source.resolve()), "files": opened.fingerprint()}
        fingerprint |= {"config": opened.config, "dtype": dtype, "max_file_bytes": max_file_bytes, "version": 1}
        with work.unfinished(target, fingerprint) as folder:
            job = Import(source=source, folder=folder, dtype=dtype, max_file_bytes=max_file_bytes)
            parts = job.parts(opened)
            if not is_committed(folder):
                do(job, folder, parts, workers, "import")
                commit(folder, opened, job, len(parts))
            remove_tables(folder, map(part_name, range(len(parts))))
            work.finish(folder, target)
    return notes


def commit(folder: Path, source: Source, job: Import, parts: int) -> None:
    """Index, state, configuration and what goes along; the manifest last."""
    model_type, shape = job.architecture
    facts = merge(folder, map(part_name, range(parts)))
    for name, path in source.carried().items():
        write_durably(folder / name, path.read_bytes())
    dtype = job.dtype or most_frequent_dtype(job.parts(source))
    text = recipe.config_toml(shape, dtype, source.folder.resolve().name, folder)
    write_durably(folder / "config.toml", text.encode())
    write_state(folder, State(progress=Progress(), layout=Layout(), device="cpu"))
    about: dict[str, JSON] = {"source": source.folder.resolve().name, "model_type": model_type}
    write_manifest(folder, facts, {**about, "iteration": 0, "layout": str(Layout())})
