"""Shards and text in a bucket give the samples that they give on a disk, whatever the bucket does meanwhile."""

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import buckets
from buckets import BUCKET, Failure, Request, Server
from data import block_cache, bucket_shards, loader
from data.block_cache import BlockCache, BlockTokens
from data.config import DataConfig
from data.prepare import prepare
from data.raw import inputs, units
from data.raw.documents import read
from data.raw.reading import ReadOptions, Rejects
from data.shard_writer import ShardWriter
from data.source import build_source
from program.buckets import client, transfer
from program.errors import UserError

URL = f"s3://{BUCKET}"
RNG = np.random.default_rng(0)


def write_shard(prefix: Path, documents: int, seed: int) -> None:
    """Ids of bytes, each document ended by 256."""
    rng = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(prefix, 257) as writer:
        for _ in range(documents):
            writer.add(np.append(rng.integers(0, 256, rng.integers(5, 4000)), 256))
            writer.end_document()


def put(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            transfer.upload(path, f"{url}/{path.relative_to(folder)}")


@pytest.fixture(scope="module")
def corpus(s3: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards in a folder, and the same in the bucket."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(2):
        write_shard(folder / f"web-{number:05d}-of-00002", 700, number)
    write_shard(folder / "wiki", 300, 7)
    with buckets.environment(s3):
        put(folder, f"{URL}/corpus")
    return folder


@pytest.fixture
def server(s3: Server) -> Iterator[Server]:
    with buckets.environment(s3):
        yield s3


def samples(config: DataConfig, count: int = 200) -> np.ndarray:
    return build_source(prepare(config, lambda _: None), config, 64, 3, "train").fetch(np.arange(count))


def config_of(cache: Path, **given: object) -> DataConfig:
    return DataConfig(tokenizer="byte", cache_dir=str(cache), **given)  # type: ignore[arg-type]


def test_samples_of_a_bucket_are_those_of_a_disk(server: Server, corpus: Path, tmp_path: Path) -> None:
    for there, here in (
        ({"paths": (f"{URL}/corpus/web", f"{URL}/corpus/wiki.bin")}, {"paths": (f"{corpus}/web", f"{corpus}/wiki")}),
        (
            {"blend": {f"{URL}/corpus/web": 2, f"{URL}/corpus/wi*": 1}},
            {"blend": {f"{corpus}/web": 2, f"{corpus}/wiki": 1}},
        ),
    ):
        found = samples(config_of(tmp_path / "there", **there))
        np.testing.assert_array_equal(found, samples(config_of(tmp_path / "here", **here)))


def test_a_first_step_reads_part_of_a_shard(server: Server, tmp_path: Path) -> None:
    write_shard(tmp_path / "large" / "x", 4000, 1)
    put(tmp_path / "large", f"{URL}/large")
    with buckets.proxied(server) as (before, proxy), buckets.environment(before):
        samples(config_of(tmp_path / "cache", paths=(f"{URL}/large/x",)), 3)
    bodies = [one for one in proxy.requests if one.method == "GET" and one.path.endswith("x.bin")]
    size = (tmp_path / "large" / "x.bin").stat().st_size
    blocks = list((tmp_path / "cache" / "buckets" / "blocks").rglob("0*"))
    assert 1 <= len(blocks) <= 3 < size // block_cache.BLOCK_BYTES and len(bodies) == len(blocks) + 2


def test_blocks_come_ahead_of_their_turn_once_for_all(server: Server, corpus: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, paths=(f"{URL}/corpus/web",))
    with buckets.proxied(server) as (before, proxy), buckets.environment(before):
        prepared = prepare(config, lambda _: None)
        proxy.requests.clear()
        sources = [build_source(prepared, config, 64, 3, "train") for _ in range(4)]
        requests = [np.arange(8) + 8 * number for number in range(40)]
        for source in sources:
            reader = loader.Prefetcher(source, iter(requests))
            found = np.concatenate([np.asarray(batch) for batch in reader])
            reader.close()
            np.testing.assert_array_equal(found, sources[0].fetch(np.arange(320)))
    reads = [one.path for one in proxy.requests if one.method == "GET"]
    blocks = list((tmp_path / "buckets" / "blocks").rglob("0*"))
    assert len(reads) == len(blocks) == sum(-(-path.stat().st_size // (1 << 20)) for path in corpus.glob("web*.bin"))


def test_blocks_are_fetched_before_their_turn(
    server: Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(loader, "AHEAD", 120)
    config = config_of(tmp_path, paths=(f"{URL}/corpus/web",))
    source = build_source(prepare(config, lambda _: None), config, 64, 3, "train")
    reader = loader.Prefetcher(source, iter([np.arange(4) + 4 * number for number in range(30)]))
    next(reader)
    blocks, deadline = tmp_path / "buckets" / "blocks", time.monotonic() + 30
    while len(list(blocks.rglob("0*"))) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(blocks.rglob("0*"))) >= 60, "three requests of four windows lie in 24 blocks at most"
    reader.close()


def test_the_cache_stays_within_its_bounds(
    server: Server, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(block_cache, "EVICT_EVERY", 4)
    monkeypatch.setattr(block_cache, "MOST_MAPPED", 12)
    blocks = tmp_path / "buckets" / "blocks"
    config = config_of(tmp_path, paths=(f"{URL}/corpus/web",), bucket_cache_gb=0.0005)
    source, most = build_source(prepare(config, lambda _: None), config, 64, 3, "train"), 0
    here = build_source(prepare(config_of(tmp_path, paths=(f"{corpus}/web",)), lambda _: None), config, 64, 3, "train")
    for number in range(60):
        wanted = np.arange(8) + 8 * number
        np.testing.assert_array_equal(source.fetch(wanted), here.fetch(wanted))
        most = max(most, sum(path.stat().st_size for path in blocks.rglob("0*")))
    assert 300_000 < most <= 500_000 + 5 * (1 << 16)
    tokens = [segment.shard.tokens for segment in source.segments]  # type: ignore[attr-defined]
    assert sum(one.map.is_mapped.sum() for one in tokens) <= 12 + 17, "and eight windows lie in 16 blocks"


def test_a_damaged_block_is_fetched_again(server: Server, corpus: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, paths=(f"{URL}/corpus/wiki",))
    expected = samples(config)
    for path in (tmp_path / "buckets" / "blocks").rglob("0*"):
        data = bytearray(path.read_bytes())
        data[1000:-1000] = bytes(len(data) - 2000)
        path.write_bytes(data)
    np.testing.assert_array_equal(samples(config), expected)
    for path in (tmp_path / "buckets" / "blocks").rglob("0*"):
        os.truncate(path, 100)
    np.testing.assert_array_equal(samples(config), expected)


@pytest.mark.parametrize("failure", ["500", "truncated", "short"])
def test_faults_on_the_way_change_nothing(
    server: Server, corpus: Path, tmp_path: Path, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    expected = samples(config_of(tmp_path / "here", paths=(f"{corpus}/web",)))

    def rule(request: Request) -> Failure | None:
        return failure if request.number % 3 else None

    with buckets.proxied(server, rule) as (before, proxy), buckets.environment(before):
        found = samples(config_of(tmp_path / "there", paths=(f"{URL}/corpus/web",)))
    np.testing.assert_array_equal(found, expected)
    assert len(proxy.failures) > 10


def test_shards_that_change_are_seen(server: Server, tmp_path: Path) -> None:
    """A block of another object is never read as one of the first; a new start takes the new one."""
    write_shard(tmp_path / "old" / "x", 900, 1)
    write_shard(tmp_path / "new" / "x", 950, 2)
    put(tmp_path / "old", f"{URL}/changing")
    config = config_of(tmp_path / "cache", paths=(f"{URL}/changing/x",))
    source = build_source(prepare(config, lambda _: None), config, 64, 3, "train")
    source.fetch(np.arange(1))
    put(tmp_path / "new", f"{URL}/changing")
    with pytest.raises(UserError, match=r"s3://triplane/changing/x\.bin: read bytes"):
        source.fetch(np.arange(200))
    expected = samples(config_of(tmp_path / "here", paths=(f"{tmp_path}/new/x",)))
    np.testing.assert_array_equal(samples(config), expected)
    data = bytearray((tmp_path / "new" / "x.bin").read_bytes())
    data[200_000:-200_000] = bytes(len(data) - 400_000)
    client.write(f"{URL}/changing/x.bin", bytes(data))  # of the same size and ends
    assert (samples(config) == 0).all(axis=1).sum() > 20


def test_a_corpus_that_was_made_again_in_other_parts(server: Server, corpus: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, paths=(f"{URL}/again/web",))
    for count, keep in ((2, range(2)), (1, range(1))):
        client.remove([one.url for one in client.listed(f"{URL}/again/")])
        for number in keep:
            for ending in ("bin", "idx"):
                name = f"web-{number:05d}-of-{count:05d}.{ending}"
                transfer.upload(corpus / f"web-{number:05d}-of-00002.{ending}", f"{URL}/again/{name}")
        assert len(prepare(config, lambda _: None).shards) == count


def test_what_is_missing_is_said(server: Server, corpus: Path, tmp_path: Path) -> None:
    for path, said in (
        (
            f"{URL}/corpus/wik",
            "no object or .bin/.idx prefix s3://triplane/corpus/wik; beginning so: wiki.bin, wiki.idx",
        ),
        (f"{URL}/corpus/nothing", "beginning so: nothing"),
        ("s3://no-such-bucket/x", "404 NoSuchBucket"),
        ("s3://KEY:HUSH@bucket/x", "credentials do not belong in a URL"),
    ):
        with pytest.raises(UserError) as caught:
            prepare(config_of(tmp_path, paths=(path,)), lambda _: None)
        assert said in str(caught.value) and "HUSH" not in str(caught.value)
    client.remove([f"{URL}/gone/x.idx"])
    transfer.upload(corpus / "wiki.idx", f"{URL}/gone/x.idx")
    with pytest.raises(UserError, match=r"s3://triplane/gone/x\.bin is missing"):
        prepare(config_of(tmp_path, paths=(f"{URL}/gone/x",)), lambda _: None)
    with pytest.raises(UserError, match="1 of the 2 shards of s3://triplane/part/web are missing"):
        transfer.upload(corpus / "web-00000-of-00002.idx", f"{URL}/part/web-00000-of-00002.idx")
        transfer.upload(corpus / "web-00000-of-00002.bin", f"{URL}/part/web-00000-of-00002.bin")
        prepare(config_of(tmp_path, paths=(f"{URL}/part/web",)), lambda _: None)


def test_globs_in_a_bucket(server: Server, corpus: Path, tmp_path: Path) -> None:
    """A shard that is lost is missed, an empty one is none, and text beside shards is not left out."""
    for number in (0, 2):
        for ending in ("bin", "idx"):
            at = f"{URL}/globs/web-{number:05d}-of-00003.{ending}"
            transfer.upload(corpus / f"web-{number // 2:05d}-of-00002.{ending}", at)
    config = config_of(tmp_path, blend={f"{URL}/globs/web-*": 1.0})
    with pytest.raises(UserError, match="1 of the 3 shards"):
        prepare(config, lambda _: None)
    client.write(f"{URL}/globs/web-00001-of-00003.empty.json", b"{}")
    assert len(prepare(config, lambda _: None).shards) == 2
    client.write(f"{URL}/globs/web-text.jsonl", b'{"text": "more"}\n' * 100)
    assert len(prepare(config, lambda _: None).shards) == 3
    client.write(f"{URL}/globs-text/train-00000-of-00002.json", b'{"text": "no manifest"}\n')
    assert read_all(f"{URL}/globs-text") == ["no manifest"]


def test_megatrons_order_reads_no_bucket(server: Server, corpus: Path, tmp_path: Path) -> None:
    from data.megatron_order import SamplePlan, open_splits

    config = config_of(tmp_path, paths=(f"{URL}/corpus/web",), order="megatron")
    with pytest.raises(UserError, match=r"megatron-core reads web-00000-of-00002\.bin itself"):
        open_splits(
            prepare(config, lambda _: None), config, 64, 3, SamplePlan(train=10, validation=0, test=0), lambda _: None
        )


@pytest.mark.parametrize("key", ["a/../../../x.idx", "a//x.idx", "./x.bin", ".."])
def test_a_key_that_leads_out_of_the_cache_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match="an empty part"):
        bucket_shards.local(f"{URL}/{key}", tmp_path)


def test_a_hole_is_not_read_as_tokens(server: Server, corpus: Path, tmp_path: Path) -> None:
    from data.shards import Shard

    prepare(config_of(tmp_path, paths=(f"{URL}/corpus/wiki",)), lambda _: None)
    copy = bucket_shards.local(f"{URL}/corpus/wiki", tmp_path)
    with pytest.raises(UserError, match=r"wiki\.bin stands for s3://triplane/corpus/wiki\.bin"):
        Shard(copy).tokens  # noqa: B018
    assert bucket_shards.local(f"{URL}/corpus/wiki.bin", tmp_path).stat().st_blocks * 512 < 300_000


def texts(folder: Path) -> None:
    lines = [json.dumps({"text": f"document {number} " + "x" * (number % 50)}) for number in range(500)]
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text("\n".join(lines[:200]) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[200:400]).encode()))
    (folder / "deep" / "c.csv").write_text("id,text\n" + "".join(f'{n},"row {n}"\n' for n in range(100)))
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [f"parquet {number}" for number in range(300)]})
    pyarrow.parquet.write_table(table, folder / "deep" / "d.parquet", row_group_size=100)
    (folder / "_hidden.jsonl").write_text("{}\n")


def read_all(*names: str) -> list[str]:
    reading = ReadOptions(
        jsonl_key="text", csv_column="text", on_bad_document="stop", max_document_bytes=10**6, max_expansion=200
    )
    found = inputs.find(names, csv_column="text")
    return [
        text for unit in units.divide(found, 1 << 14)
        for batch in read(unit, reading, Rejects("stop")) for text in batch.texts
    ]  # fmt: skip


def test_text_of_a_bucket_is_that_of_a_disk(server: Server, tmp_path: Path) -> None:
    texts(tmp_path / "raw")
    put(tmp_path / "raw", f"{URL}/raw")
    (tmp_path / "raw" / "_hidden.jsonl").unlink()
    expected = read_all(str(tmp_path / "raw"))
    assert len(expected) == 800 and read_all(f"{URL}/raw") == expected
    assert read_all(f"{URL}/raw/**/*.*") == read_all(*(str(path) for path in sorted((tmp_path / "raw").rglob("*.*"))))
    stream = config_of(tmp_path / "cache", stream=(f"{URL}/raw",), stream_count=4, csv_column="text")
    here = config_of(tmp_path / "cache", stream=(f"{tmp_path}/raw",), stream_count=4, csv_column="text")
    np.testing.assert_array_equal(samples(stream, 100), samples(here, 100))
    once = config_of(tmp_path / "cache", paths=(f"{URL}/raw/a.jsonl",))
    here = config_of(tmp_path / "cache", paths=(f"{tmp_path}/raw/a.jsonl",))
    np.testing.assert_array_equal(samples(once, 20), samples(here, 20))


def test_text_that_is_replaced_is_refused(server: Server, tmp_path: Path) -> None:
    client.write(f"{URL}/text/a.jsonl", b'{"text": "one"}\n' * 100)
    (found,) = inputs.find((f"{URL}/text/a.jsonl",))
    client.write(f"{URL}/text/a.jsonl", b'{"text": "two"}\n' * 100)
    (unit,) = units.divide([found], 1 << 20)
    reading = ReadOptions(jsonl_key="text", on_bad_document="stop", max_document_bytes=10**6, max_expansion=200)
    with pytest.raises(
        UserError, match=r"s3://triplane/text/a\.jsonl is no longer the file that was there at the start"
    ):
        list(read(unit, reading, Rejects("stop")))


def test_threads_and_forks_share_blocks(server: Server, tmp_path: Path) -> None:
    data = RNG.integers(0, 256, 5 << 20, np.uint8).tobytes()
    client.write(f"{URL}/shared", data)
    cache = BlockCache(tmp_path, 1 << 30)
    with buckets.proxied(server) as (before, proxy), buckets.environment(before):
        read_together(cache, data)
    reads = [one for one in proxy.requests if one.method == "GET"]
    assert len(reads) == 5, "a block is fetched once, whoever wants it"


def read_together(cache: BlockCache, data: bytes) -> None:
    """Threads and a forked process, each what it likes."""
    read_by = BlockTokens(cache, client.facts(f"{URL}/shared"), np.uint8)

    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            start = int(rng.integers(0, len(data) - 5000))
            read_by.ask_for(start, start + 5000)
            with cache:
                read_by.have(np.array([start]), 5000)
                assert read_by.array[start : start + 5000].tobytes() == data[start : start + 5000]

    child = os.fork()
    if not child:
        try:
            check(1)
            os._exit(0)
        finally:
            os._exit(1)
    failed: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            check(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in (2, 3, 4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert os.waitpid(child, 0)[1] == 0 and not failed
