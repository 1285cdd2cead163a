"""From `data.paths` to shards and a tokenizer on this machine's disk: done once, then found in the cache."""

import hashlib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data import cache, corpus, inputs, shard_writer, shards, tokenizers
from data.config import DataConfig
from data.tokenizers import Tokenizer
from parallel.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

RECIPE = "1"  # part of the cache key: raise it when the same inputs are to give other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that batches are read from."""

    tokenizer: Tokenizer
    prefixes: tuple[Path, ...]
    """Shards, in the order of their tokens; each has been opened and checked."""
    fingerprint: str
    """Hex digest of tokenizer and shards, equal on machines that hold the same; made in O(1) a shard."""

    @property
    def tokenizer_path(self) -> Path | None:
        """The SentencePiece model; None for bytes."""
        return self.tokenizer.path


def prepare(config: DataConfig, console: cache.Console) -> Prepared:
    """Train the built-in tokenizer and tokenise raw inputs, where the cache has not got them yet.

    Any number of processes may call this at once, on nodes that share the cache or do not: what it makes is
    the same bit for bit. `console` gets one line a step taken; a progress bar goes to stderr where that is a
    terminal. Raises UserError for missing, damaged, unreadable or empty inputs.
    """
    given = inputs.resolve(config.paths)
    folder = cache.root(config)
    tokenizer = tokenizers.load(config, folder, console)
    prefixes = given.prefixes
    if given.raw_files or not prefixes:
        prefixes += (_tokenised(config, given.raw_files, tokenizer, folder, console),)
    digests = [shards.Shard(prefix).fingerprint() for prefix in prefixes]
    return Prepared(tokenizer=tokenizer, prefixes=prefixes, fingerprint=_digest([tokenizer.fingerprint, *digests]))


def _tokenised(
    config: DataConfig,
    raw_files: tuple[Path, ...],
    tokenizer: Tokenizer,
    folder: Path,
    console: cache.Console,
) -> Path:
    """Prefix of the one shard that holds all raw files; of the built-in corpus where there are none.

    Files are known by path, size and time of change, the built-in corpus by the interpreter's build.
    """
    if raw_files:
        name, identity = "raw", [config.jsonl_key, *map(_identity, raw_files)]
    else:
        name, identity = "builtin", [sys.version]
    target = folder / "tokens" / f"{name}-{_digest([RECIPE, tokenizer.fingerprint, *identity])}"

    def build(part: Path) -> None:
        files = raw_files or tuple(corpus.files())
        _tokenise(files, config.jsonl_key, tokenizer, part / "tokens", console)

    cache.build_once(target, _holds_shard, build, console)
    return target / "tokens"


def _holds_shard(folder: Path) -> bool:
    try:
        shards.Shard(folder / "tokens")
    except UserError:
        return False
    return True


def _tokenise(
    files: tuple[Path, ...], jsonl_key: str, tokenizer: Tokenizer, prefix: Path, console: cache.Console
) -> None:
    """Write the documents of `files`, each ended by `eod`, to one shard; one without text leaves nothing."""
    start_s, size_bytes = time.perf_counter(), sum(path.stat().st_size for path in files)
    console(f"data: tokenising {size_bytes / 1e6:.1f} MB of {_named(files)}")
    with _progress(size_bytes) as bar, shard_writer.ShardWriter(prefix, tokenizer.vocab_size) as writer:
        for piece in _pieces(files, jsonl_key):
            _write_piece(piece, tokenizer, writer)
            bar.update(piece.source_bytes)
        if writer.document_count == 0:
            raise UserError(f"data: empty corpus: no text in {_named(files)}.")
    took_s = time.perf_counter() - start_s
    console(
        f"data: {writer.token_count:,} tokens, {writer.document_count:,} document(s), {took_s:.1f} s "
        f"({size_bytes / 1e6 / took_s:.1f} MB/s)"
    )


def _write_piece(piece: inputs.Piece, tokenizer: Tokenizer, writer: shard_writer.ShardWriter) -> None:
    if piece.text:
        writer.add(tokenizer.encode(piece.text))
    if piece.ends_document and writer.open_document_tokens:
        writer.add(np.array([tokenizer.eod]))
        writer.end_document()


def _pieces(files: Iterable[Path], jsonl_key: str) -> Iterator[inputs.Piece]:
    for path in files:
        yield from inputs.read(path, jsonl_key)


def _progress(size_bytes: int) -> "tqdm":
    """A bar on stderr with MB/s and time left; nothing where stderr is no terminal."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no watching thread: ranks are forked from this process later

    return Bar(total=size_bytes, desc="tokenising", unit="B", unit_scale=True, disable=None, leave=False)


def _named(files: tuple[Path, ...]) -> str:
    return str(files[0]) if len(files) == 1 else f"{len(files)} files ({files[0].name}, {files[1].name}, …)"


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}"


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
