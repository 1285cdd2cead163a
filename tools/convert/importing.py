"""A Hugging Face folder becomes a checkpoint: its rows into our pieces, block by block."""

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from models.config import MOST_NAME
from models.hf.files import CARRIED_BYTES
from models.hf.tables import entries
from models.shapes import GPTShape
from parallel.layout import Layout
from program.durable import replace_file
from program.errors import printable
from program.untrusted import read_bytes
from tools.convert.checking import check
from tools.shared import resumable
from tools.shared.carried_tokenizer import STAND_IN, Choice, check_beside, choose
from tools.shared.hf_folder.row_blocks import RowBlock, blocks, entry_dtype, most_frequent_dtype, read_block
from tools.shared.hf_folder.source import HfFolder, architecture, names_in
from tools.shared.part_files import in_parts, is_committed, is_done, part_name, write_parts
from training.checkpoint.format.manifest import write_manifest
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.tables import merge, remove_tables
from training.checkpoint.format.writer import FileWriter
from training.checkpoint.imported import IMPORTED
from training.checkpoint.state import JSON, State, write_state
from training.progress import Progress

Begin = Callable[[HfFolder, Path], list[str]]
SCRATCH = "logits.partial"
WITHOUT = "Training these weights on raw text needs --data.tokenizer PATH of its tokenizer."


@dataclass(kw_only=True, frozen=True)
class ImportPlan:
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
        with HfFolder(self.source) as source:
            return architecture(source)

    def parts(self, source: HfFolder) -> list[list[RowBlock]]:
        """Blocks by the file that they go into; the same whatever the number of workers."""
        model_type, shape = self.architecture
        names = names_in(source, model_type)
        found = (blocks(entry, entry_dtype(entry, source, names, self.dtype)) for entry in entries(model_type, shape))
        return in_parts(itertools.chain.from_iterable(found), self.max_file_bytes)

    def run_worker(self, worker: int, workers: int, report: resumable.Report) -> None:
        """Every ``workers``-th part from number ``worker`` on, but for those that are done."""
        with HfFolder(self.source) as source:
            names = names_in(source, self.architecture[0])
            for number, part in list(enumerate(self.parts(source)))[worker::workers]:
                if not is_done(self.folder, number):
                    self._write(part, number, source, names, report)

    def _write(
        self, part: Sequence[RowBlock], number: int, source: HfFolder, names: dict[str, str], report: resumable.Report
    ) -> None:
        with FileWriter(self.folder, part_name(number)) as file:
            for block in part:
                words = read_block(block, source, names)
                group = TensorGroup((block.entry.key,), block.dtype, block.entry.shape)
                file.add(group, *block.rectangle, [memoryview(words.reshape(-1).view(np.uint8))])
                report(block.bytes)


def import_folder(
    source: Path,
    target: Path,
    *,
    dtype: str | None,
    workers: int,
    max_file_bytes: int,
    begin: Begin | None = None,
    accept: resumable.Accept | None = None,
) -> list[str]:
    """Write ``target``, a checkpoint of weights with a ``config.toml``: notes for the user.

    Killed and started again, it goes on with the next file and writes the same bytes. begin: called before anything is
    converted, with the source and an empty folder, which is removed after it. accept: called with the checkpoint
    before it gets its name. What both say become notes; where one raises work.Rejected, nothing stays. Raises
    UserError for what is not supported, before anything is written.
    """
    with HfFolder(source) as opened:
        model_type, shape = architecture(opened)
        notes = check(opened, model_type, shape)
        fingerprint: dict[str, Any] = {"source": str(source.resolve()), "files": opened.fingerprint()}
        fingerprint |= {"config": opened.config, "dtype": dtype, "max_file_bytes": max_file_bytes, "version": 2}
        check_beside(source)
        tokenizer = choose(source, opened.config, shape.vocab_size)
        if tokenizer.problem:
            notes.append(f"no tokenizer of its own can be used: {tokenizer.problem} {WITHOUT}")
        with resumable.unfinished(target, fingerprint) as folder:
            job = ImportPlan(source=source, folder=folder, dtype=dtype, max_file_bytes=max_file_bytes)
            parts = job.parts(opened)
            if begin is not None:
                notes += _in_scratch(begin, opened, folder / SCRATCH)
            if not is_committed(folder):
                write_parts(job, folder, parts, workers, "import")
                commit(folder, opened, job, len(parts), tokenizer)
            remove_tables(folder, map(part_name, range(len(parts))))
            notes += accept(folder) if accept is not None else []
    return notes


def _in_scratch(begin: Begin, source: HfFolder, scratch: Path) -> list[str]:
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        return begin(source, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def commit(folder: Path, source: HfFolder, job: ImportPlan, parts: int, tokenizer: Choice) -> None:
    """Index, state, configuration and carried files; the manifest last."""
    model_type, shape = job.architecture
    facts = merge(folder, map(part_name, range(parts)))
    for name, path in source.carried().items():
        replace_file(folder / name, read_bytes(path, CARRIED_BYTES))
    dtype = job.dtype or most_frequent_dtype(job.parts(source))
    name = model_name(source.folder.resolve())
    text = config_toml(shape, dtype, name, tokenizer)
    replace_file(folder / "config.toml", text.encode())
    about: dict[str, JSON] = {"source": source.folder.resolve().name, "model_type": model_type}
    write_state(folder, State(progress=Progress(), layout=Layout(), device="cpu", entries={IMPORTED: about}))
    write_manifest(folder, facts, {**about, "iteration": 0, "layout": str(Layout())})


def model_name(folder: Path) -> str:
    """What a folder's model is called: OWNER/NAME of one in the cache of huggingface_hub, else the folder's name."""
    cached = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    owner, _, name = cached.removeprefix("models--").partition("--")
    found = f"{owner}/{name}" if cached.startswith("models--") and name else folder.name
    return " ".join(printable(found).split())[:MOST_NAME] or "imported"


LONGEST = 4096
"""Tokens of a sample, where the model could see more: memory grows with it, and the user chooses."""

PRECISION = {"float64": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def config_toml(shape: GPTShape, dtype: str, source: str, tokenizer: Choice) -> str:
    """A recipe that ``pretrain_gpt.py`` reads. ``finetune``: there is no optimizer's state to continue with."""
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "name": source,
            "seq_length": min(LONGEST, shape.max_position_embeddings),
            **dataclasses.asdict(shape),
        },
        "precision": {"dtype": PRECISION[dtype]},
        "data": {"tokenizer": tokenizer.name} | ({"eod_token": tokenizer.eod_token} if tokenizer.eod_token else {}),
        "checkpoint": {"finetune": True},
    }
    lines = [
        f"# Imported from {source}. Train on from it:",
        "#   python pretrain_gpt.py CHECKPOINT/config.toml --data.paths YOUR_DATA --run_dir runs/YOUR_NAME",
        "# Every number of the model is its own; none comes from a named shape.",
    ]
    if tokenizer.name == STAND_IN:
        lines += [
            f"# None of its own tokenizer's files can be used: {' '.join(tokenizer.problem.split())}",
            f'# "{STAND_IN}" stands in. Training these weights on raw text with it is refused: its ids are not those',
            "# that the model has learned. Give --data.tokenizer PATH, or shards that were tokenised with its own.",
        ]
    return "\n".join([*lines, "", tomli_w.dumps(sections)])
