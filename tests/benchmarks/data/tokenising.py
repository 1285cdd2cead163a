"""Text to shards against Megatron-LM's tools/preprocess_data.py, and the index alone against megatron-core."""

import filecmp
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.benchmarks.data import corpus
from tests.benchmarks.data.table import MeasuredRow, command_cpu_s, cpu_s

ROOT = Path(__file__).parents[3]
NO_MEGATRON = "peer missing: give Megatron-LM's checkout by --megatron_lm"


def rows(folder: Path, size_mb: float, megatron_lm: Path | None) -> Iterator[MeasuredRow]:
    """The table's rows on tokenising."""
    text = corpus.lines(folder, size_mb)
    for kind, tokenizer in (
        ("byte-level BPE", corpus.byte_level(folder)),
        ("SentencePiece", corpus.sentencepiece(folder)),
    ):
        theirs, note = _megatron(text, tokenizer, folder, megatron_lm)
        engines = (("auto", 10.0), ("gigatoken", 25.0)) if kind == "byte-level BPE" else (("auto", 1.8),)
        for engine, at_least in engines:
            name = f"{kind}, engine {engine}, {size_mb:g} MB, 2 workers"
            try:
                ours = _ours(text, tokenizer, folder, engine)
            except RuntimeError as error:
                yield MeasuredRow(name=name, ours=None, unit="CPU s", at_least=at_least, note=str(error))
                continue
            said = note or _compared(folder)
            yield MeasuredRow(name=name, ours=ours, theirs=theirs, unit="CPU s", at_least=at_least, note=said)
    yield _index()


def _ours(text: Path, tokenizer: Path, folder: Path, engine: str) -> float:
    command = [sys.executable, "-m", "tools.preprocess", text, "--output", folder / "ours", "--tokenizer", tokenizer]
    flags = ["--workers", "2", "--engine", engine, "--merge", "--overwrite"]
    return command_cpu_s([*map(str, command), *flags], ROOT, dict(os.environ))


def _megatron(text: Path, tokenizer: Path, folder: Path, megatron_lm: Path | None) -> tuple[float | None, str]:
    """CPU-seconds of Megatron's own; or None, and why not."""
    if megatron_lm is None:
        return None, NO_MEGATRON
    is_json = tokenizer.suffix == ".json"
    command = [sys.executable, "tools/preprocess_data.py", "--input", text, "--output-prefix", folder / "theirs"]
    kind = "HuggingFaceTokenizer" if is_json else "SentencePieceTokenizer"
    command += ["--tokenizer-type", kind, "--tokenizer-model", tokenizer.parent if is_json else tokenizer]
    command += ["--workers", "2", "--append-eod", "--log-interval", "1000000"]
    environ = os.environ | {"PYTHONPATH": str(megatron_lm), "TOKENIZERS_PARALLELISM": "false"}
    try:
        return command_cpu_s(list(map(str, command)), megatron_lm, environ), ""
    except RuntimeError as error:
        return None, str(error)


def _compared(folder: Path) -> str:
    """Whether both have written the same bytes."""
    names = [f"_text_document{suffix}" for suffix in (".bin", ".idx")]
    same = [filecmp.cmp(folder / f"ours{name}", folder / f"theirs{name}", shallow=False) for name in names]
    return "same bytes" if all(same) else "OTHER BYTES"


def _index(documents: int = 10_000_000) -> MeasuredRow:
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    from data.shard_writer import write_index

    lengths = np.random.default_rng(0).integers(1, 2000, documents).astype(np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        ours = cpu_s(lambda: write_index(Path(scratch, "ours"), lengths, np.dtype(np.uint16)))
        listed, ends = lengths.tolist(), list(range(documents + 1))

        def write() -> None:
            with _IndexWriter(f"{scratch}/theirs", np.uint16) as writer:
                writer.write(listed, None, ends)

        theirs = cpu_s(write, rounds=1)
        same = filecmp.cmp(f"{scratch}/ours", f"{scratch}/theirs", shallow=False)
    note = "same bytes" if same else "OTHER BYTES"
    return MeasuredRow(name=".idx of 10M documents", ours=ours, theirs=theirs, unit="CPU s", at_least=12, note=note)
