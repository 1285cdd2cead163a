"""Samples from shards in a bucket of a SeaweedFS on this machine, against the same shards on its disk."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data import shards
from data.bucket_shards import FOLDER
from data.config import DataConfig
from data.manifest import manifest_path
from data.prepare import prepare
from data.prepared import Samples
from data.source import build_source
from program.buckets import client, transfer
from tests.benchmarks.data.loading import SAMPLES, SEQ_LENGTH, corpus
from tests.benchmarks.data.table import MeasuredRow
from tests.support import buckets

ROUNDS = 7
URL = f"s3://{buckets.BUCKET}/corpus"


def rows(folder: Path) -> Iterator[MeasuredRow]:
    """The table's rows on buckets. Wall seconds: what a bucket costs is waiting."""
    prefix = corpus(folder)
    files = [shards.bin_path(prefix), shards.idx_path(prefix), *filter(Path.exists, [manifest_path(prefix)])]
    with buckets.seaweed(folder / "seaweed") as server, buckets.environment(server):
        for file in files:
            transfer.upload(file, f"{URL}/{file.name}")
        shutil.rmtree(folder / "cache" / FOLDER, ignore_errors=True)
        start = time.perf_counter()
        there = _opened(folder, f"{URL}/{prefix.name}")
        there.fetch(np.arange(8))
        first_s, start = time.perf_counter() - start, time.perf_counter()
        for file in files:
            transfer.download(client.facts(f"{URL}/{file.name}"), folder / "copy")
        whole_s = time.perf_counter() - start
        size = files[0].stat().st_size
        yield MeasuredRow(
            name="first batch of 8 out of a bucket, against the whole shard's download", ours=first_s, theirs=whole_s,
            unit="wall s", at_least=1, note=f"{size / 1e6:.0f} MB; docs/buckets.md",
        )  # fmt: skip
        here = _opened(folder, str(prefix))
        for batch in (8, 64):
            ours, theirs = _paired(there, here, batch)
            yield MeasuredRow(
                name=f"blocks of a bucket once on the disk, batch {batch}, against the disk", ours=ours, theirs=theirs,
                unit="samples/s", at_least=0.9, is_rate=True, note=f"medians of {ROUNDS} pairs",
            )  # fmt: skip


def _opened(folder: Path, path: str) -> Samples:
    config = DataConfig(paths=(path,), tokenizer="byte", cache_dir=str(folder / "cache"), split="1,0,0")
    source = build_source(prepare(config, lambda _: None), config, SEQ_LENGTH, 1, "train")
    source.vocab_size = 32_000  # type: ignore[attr-defined]
    return source


def _paired(there: Samples, here: Samples, batch: int) -> tuple[float, float]:
    """Samples a second of both, medians of rounds in turns, after one that fetches what is missing."""
    took: dict[str, list[float]] = {"there": [], "here": []}
    for number in range(ROUNDS + 1):
        for name, source in (("there", there), ("here", here)):
            start = time.perf_counter()
            for first in range(0, SAMPLES, batch):
                source.fetch(np.arange(first, first + batch))
            if number:
                took[name].append(time.perf_counter() - start)
    return SAMPLES / float(np.median(took["there"])), SAMPLES / float(np.median(took["here"]))
