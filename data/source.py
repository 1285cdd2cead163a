"""Samples of one split: windows of the token stream, fetched by global sample index."""

from collections.abc import Sequence

import numpy as np

from data import packed_source
from data.blend import Blend
from data.config import DataConfig
from data.fim import Fim
from data.order_begin import RUN_BEGIN, OrderBegin, Read, orders, turns
from data.prepared import FetchesAhead, Prepared, Samples, SourceProgress
from data.shards import Shard
from data.split import SplitName, split_shards
from data.streaming.source import InterleavedStreams, StreamedSource
from data.token_source import SplitSegment, TokenSource
from data.transformed import Change, Transformed, users_change
from program.errors import UserError


def build_source(
    prepared: Prepared,
    config: DataConfig,
    seq_length: int,
    seed: int,
    split: SplitName,
    begin: OrderBegin = RUN_BEGIN,
) -> Samples:
    """Open a split. Every shard is split by document, as Megatron does; streams by a hash of each text.

    begin: where the order of the train split begins. data.packing and data.transform shape the train split alone, so
    that validation losses compare; data.fim_rate every split, as Megatron's does.

    Raises UserError where the split of a source cannot fill one sample, and where a token of FIM is not in the
    vocabulary.
    """
    samples = prepared.splits.get(split)
    if samples is None:
        samples = _opened(prepared, config, seq_length, seed, split, begin)
    return _changed(samples, prepared, config, seed, split)


def build_part(
    prepared: Prepared, config: DataConfig, seq_length: int, seed: int, split: SplitName, number: int
) -> Samples:
    """Open one source of a blend as if it were the only one. Raises as ``build_source``."""
    samples = _part(prepared, config, seq_length, split, number, Read(str(seed), 0))
    return _changed(samples, prepared, config, seed, split)


def _changed(samples: Samples, prepared: Prepared, config: DataConfig, seed: int, split: SplitName) -> Samples:
    changes = dict[int, Change]()
    if split == "train" and config.transform is not None and prepared.transform is not None:
        changes[0] = users_change(config.transform, prepared.transform, prepared.tokenizer.vocab_size)
    if config.fim_rate:
        changes[1] = Fim(config, prepared.tokenizer)
    return Transformed(samples, changes, seed, split) if changes else samples


def _opened(
    prepared: Prepared, config: DataConfig, seq_length: int, seed: int, split: SplitName, begin: OrderBegin
) -> Samples:
    read = orders(prepared, config, seq_length, seed, begin)
    if prepared.blend is None and not prepared.streams:  # which count from their own first sample
        read = [read[0]._replace(samples=read[0].samples - begin.samples)]
    names = ["data"] if prepared.blend is None else [source.name for source in prepared.sources]
    parts = [_part(prepared, config, seq_length, split, *one) for one in enumerate(read)]
    if prepared.streams and split == "train":
        streams = [part for part in parts if isinstance(part, StreamedSource)]
        return InterleavedStreams(streams, names, turns(prepared, config, seq_length, seed, begin))
    return parts[0] if prepared.blend is None else BlendedSource(parts, names, prepared.blend, begin.samples)


def _part(
    prepared: Prepared, config: DataConfig, seq_length: int, split: SplitName, number: int, read: Read
) -> StreamedSource | TokenSource:
    if prepared.streams:
        return StreamedSource(prepared.streams[number], split, config.split, seq_length, read.order)
    shards, whose = prepared.shards, ""
    if prepared.blend is not None:
        shards, whose = prepared.sources[number].shards, f" of {prepared.sources[number].name}"
    segments = _segments(shards, config, seq_length, split, whose)
    given = segments, seq_length, read.order, prepared.tokenizer.vocab_size, read.samples
    if split != "train" or config.packing == "concatenate":
        return TokenSource(*given)
    return packed_source.PackedSource(*given, packed_source.load(shards, config, seq_length))


def _segments(
    shards: Sequence[Shard], config: DataConfig, seq_length: int, split: SplitName, whose: str
) -> list[SplitSegment]:
    segments, document_count = [], 0
    dealt = split_shards([shard.document_count for shard in shards], config.split)
    for shard, splits in zip(shards, dealt, strict=True):
        documents = splits[split]
        document_count += len(documents)
        bounds = shard.document_start(documents.start), shard.document_start(documents.stop)
        segments.append(SplitSegment(shard, *bounds))
    token_count = sum(segment.stop - segment.start for segment in segments)
    if token_count < seq_length + 1:
        raise UserError(
            f"data: the {split} split{whose} holds {token_count} tokens in {document_count} document(s); one sample "
            f"needs seq_length + 1 = {seq_length + 1}. Give more documents (a .jsonl has one a line, another "
            f'file is one), change data.split = "{config.split}", or lower model.seq_length.'
        )
    return segments


class BlendedSource[Opened: Samples]:
    """Samples of several sources, each in its own order, in the proportions of a blend."""

    def __init__(self, opened: list[Opened], names: list[str], blend: Blend, begin: int = 0) -> None:
        """begin: the global sample that is the blend's first one."""
        self.opened, self.names, self.blend, self.begin = opened, names, blend, begin
        self.seq_length = opened[0].seq_length

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64. Raises as TokenSource.fetch."""
        sources, indices = self.blend.assign(sample_indices - self.begin)
        samples = np.empty((len(sample_indices), self.seq_length + 1), np.int32)
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            samples[chosen] = self.opened[source].fetch(indices[chosen])
        return samples

    def ask_for(self, sample_indices: np.ndarray) -> None:
        """Have what samples [n] are made of fetched, of shards in a bucket. Returns at once."""
        sources, indices = self.blend.assign(sample_indices - self.begin)
        for source in np.unique(sources):
            opened = self.opened[source]
            if isinstance(opened, FetchesAhead):
                opened.ask_for(indices[sources == source])

    def source_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Number in `names` of the source of each sample: [n]."""
        return self.blend.assign(sample_indices - self.begin)[0]

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How far each source has been read after the first `consumed_samples` samples, by its name."""
        counts = self.blend.counts(consumed_samples - self.begin).tolist()
        each = zip(self.names, self.opened, counts, strict=True)
        return {name: source.sources(count)["data"] for name, source, count in each}
