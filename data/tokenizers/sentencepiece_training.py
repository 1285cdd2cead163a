"""The built-in tokenizer's model: trained once, bit for bit the same on every machine."""

import hashlib
import io
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data import cache, corpus
from program.untrusted import read_bytes

RECIPE = "1"  # part of the cache key: raise it when the same corpus is to give another model

SAMPLE_BYTES = 2_000_000  # twice as much changes tokens per byte by less than 2 % and doubles the time


def builtin_model(vocab_size: int, folder: Path, console: cache.Console) -> Path:
    """Path of the built-in model in cache `folder`; trained on the built-in corpus if it is not there."""
    from sentencepiece import __version__

    key = hashlib.blake2b("\0".join((RECIPE, sys.version, __version__)).encode(), digest_size=8).hexdigest()
    target = folder / "tokenizers" / f"builtin-{vocab_size}-{key}"

    def build(part: Path) -> None:
        start_s = time.perf_counter()
        (part / "tokenizer.model").write_bytes(train(corpus.files(), vocab_size))
        took_s = time.perf_counter() - start_s
        console(f"data: trained a SentencePiece model of {vocab_size} pieces in {took_s:.1f} s")

    cache.build_once(target, build, console)
    return target / "tokenizer.model"


REVERSIBLE: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "add_dummy_prefix": False,
    "split_digits": True,
    "character_coverage": 0.9995,
}
"""No normalisation, blanks kept, unknown characters as bytes (which newlines are too), no leading blank added."""


def train(files: Iterable[Path], vocab_size: int) -> bytes:
    """A serialised byte-pair model of `vocab_size` pieces, from the first 2 MB of text files.

    Reversible. One thread, no sampling, and text and model passed in memory: thread counts, random
    draws and file names would find their way into the model.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=_lines(files),
        model_writer=model,
        vocab_size=vocab_size,
        **REVERSIBLE,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,  # errors only; its progress would land between ours
    )
    return model.getvalue()


def _lines(files: Iterable[Path]) -> Iterator[str]:
    read = 0
    for path in files:
        text = read_bytes(path)
        yield from filter(None, text.decode().splitlines())
        read += len(text)
        if read >= SAMPLE_BYTES:
            return
