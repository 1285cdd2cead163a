"""A SentencePiece model, trained on documents of the inputs."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from data.raw import documents, inputs, units
from data.raw.reading import ReadOptions, Rejects
from data.tokenizers.sentencepiece_training import REVERSIBLE
from program.errors import UserError
from tools.preprocess.output import saying_where_no_space_is, write_whole
from tools.shared.written import check_new

PART_BYTES = 1 << 20


def read_options(jsonl_key: str = "text", csv_column: str | None = None) -> ReadOptions:
    """Bad documents are left out: a sample is enough."""
    return ReadOptions(
        jsonl_key=jsonl_key,
        csv_column=csv_column,
        on_bad_document="skip",
        max_document_bytes=64_000_000,
        max_expansion=200,
    )


def train(names: tuple[str, ...], output: Path, vocab_size: int, reading: ReadOptions, sample_bytes: int) -> None:
    """Train a byte-pair model with bytes for unknown characters, reversible: nothing is normalised.

    Raises UserError where the inputs cannot be read or hold too little for `vocab_size` pieces.
    """
    from sentencepiece import SentencePieceTrainer

    check_new(output, "--output")
    found = inputs.find(names, say=lambda line: print(line, file=sys.stderr), csv_column=reading.csv_column)
    divided = units.divide(found, PART_BYTES)
    step = max(1, sum(unit.size for unit in divided) // sample_bytes)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(divided[::step], reading),
            model_writer=model,
            vocab_size=vocab_size,
            **REVERSIBLE,
            max_sentence_length=1 << 16,
            minloglevel=1,
        )
    except RuntimeError as error:
        raise UserError(f"--vocab_size {vocab_size}: {str(error).splitlines()[-1]}") from None
    with saying_where_no_space_is(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, model.getvalue())
    print(f"{output}: {vocab_size} pieces")


def _lines(divided: list[units.Unit], reading: ReadOptions) -> Iterator[str]:
    for unit in divided:
        for batch in documents.read(unit, reading, Rejects("skip")):
            for text in batch.texts:
                yield from filter(None, text.splitlines())
