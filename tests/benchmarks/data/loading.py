"""Samples from shards against megatron-core, MosaicML Streaming and litdata; opening large corpora."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data import shards
from data.config import DataConfig
from data.loader import to_batch
from data.manifest import BLOCK_BYTES, BlockSums, FileSum, ShardManifest, manifest_path
from data.megatron_order import SamplePlan, open_splits
from data.prepare import prepare
from data.prepared import Prepared, Samples
from data.shard_writer import ShardWriter, write_index
from data.source import build_source
from data.tokenizers.base import ByteTokenizer
from program.untrusted import read_text
from tests.benchmarks.data.table import MeasuredRow, cpu_s

SEQ_LENGTH = 4096
TOKENS = 50_000_000
SAMPLES = 4096


class _Tokenizer(ByteTokenizer):
    """Of 32,000 ids."""

    vocab_size, eod = 32_000, 0


def rows(folder: Path) -> Iterator[MeasuredRow]:
    """The table's rows on loading."""
    prefix = corpus(folder)
    prepared = Prepared(tokenizer=_Tokenizer(), shards=(shards.Shard(prefix),), fingerprint="benchmark")
    config = DataConfig(cache_dir=str(folder / "cache"), split="1,0,0")
    source = build_source(prepared, config, SEQ_LENGTH, 1, "train")
    memory = _own_memory_kib()
    ours = {size: _rate(lambda size=size: _read(source, size)) for size in (8, 64)}  # type: ignore[misc]
    grown = (_own_memory_kib() - memory) / 1024
    plan = SamplePlan(train=SAMPLES, validation=0, test=0)
    theirs = open_splits(prepared, config, SEQ_LENGTH, 1, plan, lambda line: None)["train"].dataset
    mcore = _rate(lambda: _collate(theirs))
    goals = {64: 8.0, 8: 3.0}
    for size, name in ((64, "blocks of 64"), (8, "batch 8")):
        yield MeasuredRow(
            name=f"loader, {name}, against mcore GPTDataset + collate", ours=ours[size], theirs=mcore,
            unit="samples/CPU s", at_least=goals[size], is_rate=True, note=f"{grown:.1f} MiB of memory of its own",
        )  # fmt: skip
    masked = _masked(prepared, config, plan)
    boundaries = _rate(lambda: _read_with_documents(source))
    yield MeasuredRow(
        name="with document boundaries, against inter_document_masking", ours=boundaries, theirs=masked,
        unit="samples/CPU s", at_least=4, is_rate=True,
    )  # fmt: skip
    for name, measure in (("MosaicML Streaming", mosaic), ("litdata", litdata)):
        rate, note = measure(source, folder, SAMPLES)
        best = max(ours.values())
        row = MeasuredRow(
            name=f"loader against {name}",
            ours=best,
            theirs=rate,
            unit="samples/CPU s",
            at_least=1,
            is_rate=True,
            note=note,
        )
        yield row
    yield from _opening(folder)


def corpus(folder: Path) -> Path:
    """Documents of 1,000 tokens in the mean."""
    prefix = folder / "loader"
    if not shards.idx_path(prefix).is_file():
        draw = np.random.default_rng(0)
        lengths = draw.integers(100, 1900, TOKENS // 1000)
        ids = draw.integers(1, 32_000, int(lengths.sum())).astype(np.uint16)
        ids[np.cumsum(lengths) - 1] = 0
        with ShardWriter(prefix, 32_000) as writer:
            writer.add_documents(ids, lengths)
    return prefix


def _rate(work: Callable[[], int]) -> float:
    """Samples for each CPU-second, of the best of three rounds."""
    work()
    count = SAMPLES
    return count / cpu_s(work)


def _read(source: Samples, size: int) -> int:
    for start in range(0, SAMPLES, size):
        source.fetch(np.arange(start, start + size))
    return SAMPLES


def _read_with_documents(source: Samples) -> int:
    """As training does: tokens, labels, loss mask, positions and where documents start."""
    from data.loader import Packing

    packing, cpu = Packing(eod=0, reset_attention=True, reset_positions=True), torch.device("cpu")
    for start in range(0, SAMPLES, 8):
        to_batch(torch.from_numpy(source.fetch(np.arange(start, start + 8))), cpu, packing)
    return SAMPLES


def _collate(dataset: object, size: int = 8) -> int:
    from torch.utils.data import default_collate

    for start in range(0, SAMPLES, size):
        default_collate([dataset[index] for index in range(start, start + size)])  # type: ignore[index]
    return SAMPLES


def _masked(prepared: Prepared, config: DataConfig, plan: SamplePlan) -> float | None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from data.megatron_order import _Adapter

    given = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ_LENGTH, blend=([str(prepared.prefixes[0])], None), split="1,0,0",
        tokenizer=_Adapter(prepared.tokenizer), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, inter_document_masking=True,
    )  # fmt: skip
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [plan.train, 0, 0], lambda: True, given).build()[0]
    return _rate(lambda: _collate(dataset))


def _opening(folder: Path) -> Iterator[MeasuredRow]:
    """Sparse files: what opening costs, not what a disk gives."""
    for shard_count, tokens, limit in ((100, 10**12, 0.3), (10_000, 15 * 10**12, 3.0)):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            prefix = _sparse(Path(scratch), shard_count, tokens // shard_count)
            config = DataConfig(paths=(str(prefix),), tokenizer="byte", split="98,1,1", cache_dir=scratch)
            memory, start = _own_memory_kib(), time.perf_counter()
            source, _ = _start(config)
            took = time.perf_counter() - start
            note = f"{(_own_memory_kib() - memory) / 1024:.1f} MiB of memory of its own"
            name = f"open {tokens / 1e12:g}T tokens in {shard_count:,} shards, no cache"
            yield MeasuredRow(name=name, ours=took, unit="wall s", at_most=limit, note=note)
            if shard_count == 100:
                start = time.perf_counter()
                source, _ = _start(config)
                source.fetch(np.arange(100_000_000, 100_000_064))
                took = time.perf_counter() - start
                yield MeasuredRow(
                    name="first batch of 64 after a resume at sample 1e8", ours=took, unit="wall s", at_most=1
                )


def _start(config: DataConfig) -> list[Samples]:
    """As training starts: every shard checked against its manifest, two splits cut."""
    prepared = prepare(config, lambda line: None)
    return [build_source(prepared, config, SEQ_LENGTH, 1, split) for split in ("train", "validation")]


def _sparse(folder: Path, count: int, tokens: int) -> Path:
    """Shards whose files are holes: one document of 10^7 tokens after another, with manifests as of real ones."""
    document = 10**7
    lengths = np.full(tokens // document, document, np.int32)
    blocks = -(-2 * int(lengths.sum(dtype=np.int64)) // BLOCK_BYTES)
    holes = BlockSums()
    holes.update(memoryview(bytes(BLOCK_BYTES)))
    hole = holes.result()
    files = {"bin": replace(hole, size=2 * int(lengths.sum(dtype=np.int64)), blocks=hole.blocks * blocks)}
    for number in range(count):
        prefix = folder / f"s-{number:05d}-of-{count:05d}"
        files["idx"] = write_index(shards.idx_path(prefix), lengths, np.dtype(np.uint16))
        with shards.bin_path(prefix).open("wb") as file:
            file.truncate(files["bin"].size)
        manifest_path(prefix).write_text(_manifest(lengths, files).dump())
    return folder / "s"


def _manifest(lengths: np.ndarray, files: dict[str, FileSum]) -> ShardManifest:
    byte = ByteTokenizer()
    return ShardManifest(
        tokens=int(lengths.sum(dtype=np.int64)), documents=len(lengths), dtype="uint16", vocab_size=byte.vocab_size,
        tokenizer="byte", tokenizer_fingerprint=byte.fingerprint, eod=byte.eod, append_eod=True, special_text="plain",
        files=files,
    )  # fmt: skip


def _own_memory_kib() -> int:
    """Without the pages of mapped shards, which the system takes back where it needs them (proc(5), RssAnon)."""
    status = read_text(Path("/proc/self/status"))
    return int(status.split("RssAnon:")[1].split()[0])


Found = tuple[float | None, str]
"""Samples for each CPU-second; or None, and why."""


def mosaic(source: Samples, folder: Path, samples: int) -> Found:
    """MosaicML Streaming, from local shards, sample by sample."""
    try:
        from streaming import MDSWriter, StreamingDataset
    except ImportError:
        return None, "peer missing: pip install mosaicml-streaming"
    except Exception as error:  # it does not import with every version of what it depends on
        return None, f"peer cannot be imported: {type(error).__name__}: {error}"
    local = folder / "mosaic"
    shutil.rmtree(local, ignore_errors=True)
    tokens = source.fetch(np.arange(samples))
    with MDSWriter(out=str(local), columns={"tokens": "ndarray:int32"}) as writer:
        for row in tokens:
            writer.write({"tokens": row})
    dataset = StreamingDataset(local=str(local), shuffle=True, batch_size=8)
    return samples / cpu_s(lambda: [dataset[index] for index in range(samples)]), ""


def litdata(source: Samples, folder: Path, samples: int) -> Found:
    """litdata's TokensLoader, from local chunks, sample by sample."""
    try:
        from litdata import StreamingDataset, TokensLoader
        from litdata.streaming import writer as chunks
    except ImportError:
        return None, "peer missing: pip install litdata"
    except Exception as error:
        return None, f"peer cannot be imported: {type(error).__name__}: {error}"
    import torch

    local = folder / "litdata"
    shutil.rmtree(local, ignore_errors=True)
    length = source.seq_length + 1
    binary = chunks.BinaryWriter(str(local), chunk_size=length * 1024, item_loader=TokensLoader(block_size=length))
    for number, row in enumerate(source.fetch(np.arange(samples))):
        binary[number] = torch.from_numpy(row)
    binary.done()
    binary.merge()
    dataset = StreamingDataset(str(local), item_loader=TokensLoader(block_size=length), shuffle=True)
    count = len(dataset)
    return count / cpu_s(lambda: [None for _ in dataset]), ""
