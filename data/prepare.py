"""From `data.paths` to shards and a tokenizer on this machine's disk: done once, then found in the cache."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data import blend, bucket_shards, cache, corpus, inputs, shard_writer
from data.block_cache import BlockCache
from data.config import DataConfig
from data.prepared import Prepared, PreparedSource, digest
from data.raw import pieces
from data.raw.csv_records import DELIMITERS
from data.raw.identity import identity
from data.raw.input_file import InputSource
from data.raw.inputs import Places, source_of
from data.raw.pieces import DocumentPiece
from data.shards import Shard
from data.sources import Named, inputs_of, named
from data.streamed import prepare_streams
from data.tokenizers import base
from data.tokenizers.base import Tokenizer
from program.buckets.names import is_url
from program.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm


RECIPE = "2"  # part of the cache key: raise it when the same inputs are to give other tokens


def prepare(config: DataConfig, console: cache.Console, tokenizer: Tokenizer | None = None) -> Prepared:
    """Train the built-in tokenizer and tokenise raw inputs, where the cache has not got them yet.

    tokenizer: the one that `config` names, where it is open already.

    Any number of processes may call this at once, on nodes that share the cache or do not: what it makes is
    the same bit for bit. `console` gets one line a step taken; a progress bar goes to stderr where that is a
    terminal. Raises UserError for missing, damaged, unreadable or empty inputs.
    """
    try:
        return _prepared(config, console, tokenizer)
    except UserError as error:
        if f"/{bucket_shards.FOLDER}/" not in str(error):
            raise
        raise UserError(bucket_shards.as_urls(str(error), cache.root(config))) from None


def _prepared(config: DataConfig, console: cache.Console, tokenizer: Tokenizer | None) -> Prepared:
    if config.streamed:
        return prepare_streams(config, cache.root(config), console)
    sources = named(config)
    given = [inputs_of(source, config) for source in sources]
    if len(sources) > 1:
        _tell_overlaps(sources, given, console)
    folder = cache.root(config)
    tokenizer = tokenizer or base.load(config, folder, console)
    units = blend.rounded([source.weight for source in sources])
    blocks = BlockCache(folder / bucket_shards.FOLDER, int(config.bucket_cache_gb * 1e9))
    opened = [[Shard(prefix, blocks=blocks) for prefix in found.prefixes] for found in given]
    _check_manifests([shard for some in opened for shard in some], tokenizer, config, console)
    prepared = [
        _source(config, source, found, shown, weight, tokenizer, folder, console)
        for source, found, shown, weight in zip(sources, given, opened, units, strict=True)
    ]
    digests = [tokenizer.fingerprint, *(source.fingerprint for source in prepared)]
    if len(sources) > 1:
        digests += map(str, units)
        for source in prepared:
            console(
                f"data: {source.units / blend.PERIOD:.7f} of the samples from {source.name} ({source.tokens:,} tokens)"
            )
    return Prepared(
        tokenizer=tokenizer,
        shards=tuple(shard for source in prepared for shard in source.shards),
        fingerprint=digest(digests),
        sources=tuple(prepared),
        blend=blend.load(units, folder, console) if len(sources) > 1 else None,
    )


def _tell_overlaps(sources: list[Named], given: list[inputs.Inputs], console: cache.Console) -> None:
    """What lies in two sources of a blend may be meant to count for more, or be there by mistake."""
    places, named = Places(), dict[str, str]()
    both: dict[tuple[str, str], list[str]] = {}
    for source, found in zip(sources, given, strict=True):
        for path in (*map(str, found.prefixes), *found.raw_files):
            first = named.setdefault(path if is_url(path) else places.at(path), source.name)
            if first != source.name:
                both.setdefault((first, source.name), []).append(path)
    for (first, second), paths in both.items():
        console(f"data: {len(paths)} file(s) or shards are in both {first} and {second}, the first {paths[0]}")


def _source(
    config: DataConfig,
    source: Named,
    given: inputs.Inputs,
    shown: list[Shard],
    units: int,
    tokenizer: Tokenizer,
    folder: Path,
    console: cache.Console,
) -> PreparedSource:
    """The shards of one source, opened and checked; raw files become one more."""
    if given.raw_files or not given.prefixes:
        shown = [*shown, Shard(_tokenised(config, given.raw_files, tokenizer, folder, console))]
    digests = [shard.fingerprint() for shard in shown]
    return PreparedSource(
        name=source.name,
        shards=tuple(shown),
        units=units,
        fingerprint=digest(digests),
        each=tuple(digest[:8] for digest in digests),
        tokens=sum(shard.token_count for shard in shown),
        weight=source.weight,
    )


def _check_manifests(given: list[Shard], tokenizer: Tokenizer, config: DataConfig, console: cache.Console) -> None:
    """Raises UserError for shards of another tokenizer, for those whose documents nothing ends where they are to be
    kept apart, and for those that do not say where they are to."""
    fields = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    apart = next((f"data.{name}" for name in fields if getattr(config, name)), "")
    for shard in given:
        said = shard.manifest
        if said is not None and said.tokenizer_fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"data: {shard.prefix} was made with tokenizer {said.tokenizer[:100]} "
                f"({said.tokenizer_fingerprint[:12]}…, {said.vocab_size} ids), data.tokenizer is another "
                f"({tokenizer.fingerprint[:12]}…, {tokenizer.vocab_size} ids). Set data.tokenizer to that one, or "
                "tokenise the text again."
            )
        if said is not None and (said.eod, said.vocab_size) != (tokenizer.eod, tokenizer.vocab_size):
            raise UserError(
                f"data: the manifest of {shard.prefix} says that id {said.eod} of {said.vocab_size} ends documents; "
                f"its tokenizer says {tokenizer.eod} of {tokenizer.vocab_size}: damaged. Copy or tokenise it again."
            )
        if said is not None and apart and not said.append_eod:
            raise UserError(
                f"{apart}: {shard.prefix} was made with --no_append_eod: no id tells where its documents end. Make it "
                f"again without that, or leave {apart} out."
            )
    without = [shard.prefix for shard in given if shard.manifest is None]
    if without and config.require_manifest:
        raise UserError(
            f"data.require_manifest: {len(without)} of {len(given)} shards have no manifest, the first {without[0]}. "
            "Make them with tools.preprocess, or leave data.require_manifest out."
        )
    if without:
        console(
            f"data: {len(without)} of {len(given)} shards have no manifest ({without[0].name} …): their sizes "
            "are right; that data.tokenizer is theirs cannot be checked"
        )


def _tokenised(
    config: DataConfig,
    raw_files: tuple[str, ...],
    tokenizer: Tokenizer,
    folder: Path,
    console: cache.Console,
) -> Path:
    """Prefix of the one shard that holds all raw files; of the built-in corpus where there are none.

    Files are known by what `identity` says, the built-in corpus by the interpreter's build.
    """
    if raw_files:
        sources = [source_of(path) for path in raw_files]
        read_as = [f"{one.kind}{one.compression}" for one in sources]
        columns = [config.csv_column or config.jsonl_key] if any(one.kind in DELIMITERS for one in sources) else []
        name, known_by = "raw", [config.jsonl_key, *columns, *read_as, *map(_identity, sources)]
    else:
        name, known_by = "builtin", [sys.version]
    target = folder / "tokens" / f"{name}-{digest([RECIPE, tokenizer.fingerprint, *known_by])}"

    def build(part: Path) -> None:
        files = raw_files or tuple(map(str, corpus.files()))
        _tokenise([source_of(path) for path in files], config, tokenizer, part / "tokens", console)
        if raw_files and known_by[-len(raw_files) :] != [_identity(source_of(path)) for path in raw_files]:
            raise UserError(f"data.paths: {_named(raw_files)} changed while it was tokenised. Start again.")

    cache.build_once(target, build, console)
    return target / "tokens"


def _tokenise(
    sources: Sequence[InputSource], config: DataConfig, tokenizer: Tokenizer, prefix: Path, console: cache.Console
) -> None:
    """Write the documents of files, each ended by `eod`, to one shard; one without text leaves nothing."""
    start_s, size_bytes = time.perf_counter(), sum(one.size for one in sources)
    files = tuple(one.path for one in sources)
    console(f"data: tokenising {size_bytes / 1e6:.1f} MB of {_named(files)}")
    with _progress(size_bytes) as bar, shard_writer.ShardWriter(prefix, tokenizer.vocab_size) as writer:
        for piece in _pieces(sources, config):
            _write_piece(piece, tokenizer, writer)
            bar.update(piece.source_bytes)
        if writer.document_count == 0:
            raise UserError(f"data: empty corpus: no text in {_named(files)}.")
    took_s = time.perf_counter() - start_s
    console(
        f"data: {writer.token_count:,} tokens, {writer.document_count:,} document(s), {took_s:.1f} s "
        f"({size_bytes / 1e6 / took_s:.1f} MB/s)"
    )


def _write_piece(piece: DocumentPiece, tokenizer: Tokenizer, writer: shard_writer.ShardWriter) -> None:
    if piece.text:
        writer.add(tokenizer.encode(piece.text))
    if piece.ends_document and writer.open_document_tokens:
        writer.add(np.array([tokenizer.eod]))
        writer.end_document()


def _pieces(sources: Iterable[InputSource], config: DataConfig) -> Iterator[DocumentPiece]:
    for source in sources:
        yield from pieces.read(source, config.jsonl_key, config.max_expansion, config.csv_column)


def _progress(size_bytes: int) -> "tqdm":
    """A bar on stderr with MB/s and time left; nothing where stderr is no terminal."""
    from tqdm import tqdm

    class ByteBar(tqdm):
        monitor_interval = 0  # no watching thread: ranks are forked from this process later

    return ByteBar(total=size_bytes, desc="tokenising", unit="B", unit_scale=True, disable=None, leave=False)


def _identity(source: InputSource) -> str:
    """What the cache knows a file or an object by."""
    return "\0".join(map(str, (source.path, *source.facts))) if is_url(source.path) else identity(Path(source.path))


def _named(files: tuple[str, ...]) -> str:
    if len(files) == 1:
        return files[0]
    return f"{len(files)} files ({Path(files[0]).name}, {Path(files[1]).name}, …)"
