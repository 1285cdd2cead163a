"""Logical streams: the same samples for any layout and after any resume, whatever kind of input they come from."""

import csv
import gzip
import json
import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from campaign import some
from data.config import DataConfig
from data.gaps import Gaps
from data.order import rank_indices
from data.prepare import prepare
from data.source import build_source
from data.streaming import dealing
from data.streaming.source import REMEMBERED, InterleavedStreams, StreamedSource
from data.streaming.stream import Cursor, documents
from data.tokenizers.engines import BytesEngine
from program.errors import UserError
from training.batches import DEPTH

draw = random.Random(5)
TEXTS = [f"{number} " + "x" * draw.randrange(400) + "é" for number in range(300)]
KINDS = ("jsonl", "gz", "zst", "parquet", "texts", "saved", "hub", "csv", "mixed")
SUITE = ("jsonl", "zst", "parquet", "hub", "mixed")
SEQ_LENGTH = 32


def lines(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def parquet(path, texts=TEXTS):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=70)
    return path


def made(kind, folder):
    """All TEXTS, as one kind of input: what data.stream is then."""
    if kind == "jsonl":
        return (str(lines(folder / "a.jsonl")),)
    if kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(folder / "a").read_bytes()))
        return (str(folder / "a.jsonl.gz"),)
    if kind == "zst":
        import zstandard

        (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines(folder / "a").read_bytes()))
        return (str(folder / "a.jsonl.zst"),)
    if kind == "parquet":
        return (str(parquet(folder / "a.parquet")),)
    if kind == "texts":
        (folder / "in").mkdir()
        for number, text in enumerate(TEXTS):
            (folder / "in" / f"{number:03}.txt").write_text(text)
        return (str(folder / "in"),)
    if kind == "csv":
        with (folder / "a.csv").open("w") as file:
            csv.writer(file).writerows([["text", "n"], *([text, "\n"] for text in TEXTS)])
        return (str(folder / "a.csv"),)
    if kind == "saved":
        import datasets

        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "set")
        return (str(folder / "set"),)
    if kind == "hub":  # a folder where `load_dataset(streaming=True)` takes an id of the Hub
        (folder / "hub").mkdir()
        for number in range(3):
            parquet(folder / "hub" / f"train-{number:05}-of-00003.parquet", TEXTS[number::3])
        return (f"hf://{folder / 'hub'}",)
    (folder / "mixed").mkdir()
    lines(folder / "mixed/a.jsonl", TEXTS[:200])
    parquet(folder / "mixed/b.parquet", TEXTS[200:])
    return (str(folder / "mixed"),)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Units and batches of a corpus of any size; and no look at the network."""
    import datasets.config

    from data.raw import documents as raw_documents
    from data.raw import hub
    from data.streaming import opening

    monkeypatch.setattr(dealing, "SMALLEST_UNIT_BYTES", 1000)
    monkeypatch.setattr(opening, "BATCH_BYTES", 500)  # two documents
    monkeypatch.setattr(raw_documents, "BATCH_ROWS", 20)
    monkeypatch.setattr(hub, "ROWS", 40)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def configured(stream, **changes):
    return DataConfig(**{"stream": stream, "stream_count": 8, "tokenizer": "byte", "split": "1,0,0"} | changes)


def opened(config, seed=3, split="train", said=None):
    """A fresh source, as a rank of its own has it."""
    source = build_source(prepare(config, (said if said is not None else []).append), config, SEQ_LENGTH, seed, split)
    assert isinstance(source, InterleavedStreams if split == "train" else StreamedSource)
    return source


def alone(source):
    """The streams of the one source that there is."""
    [only] = source.opened if isinstance(source, InterleavedStreams) else [source]
    return only


def epoch_texts(source, share, epoch=0):
    """Texts of one epoch of a stream, in its order."""
    found, source = [], alone(source)
    for cursor, ids in documents(share, source.how, Cursor(epoch)):
        if cursor.epoch > epoch:
            break
        assert ids[-1] == 256
        found.append(bytes(ids[:-1].astype(np.uint8)).decode())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_in_one_stream_once_an_epoch(tmp_path, kind):
    source = opened(configured(made(kind, tmp_path)))
    by_stream = [epoch_texts(source, share) for share in alone(source).shares]
    assert all(by_stream)
    assert Counter(text for texts in by_stream for text in texts) == Counter(TEXTS)


@pytest.mark.parametrize("kind", some(KINDS, SUITE))
def test_a_sample_is_a_window_of_its_streams_packed_documents(tmp_path, kind):
    source = opened(configured(made(kind, tmp_path)))
    samples, epochs = (240, 2) if kind in ("hub", "saved") else (2000, 3)  # of which opening takes long
    fetched = source.fetch(np.arange(samples))
    assert fetched.dtype == np.int32
    for number, share in enumerate(alone(source).shares):
        texts = [text for epoch in range(epochs) for text in epoch_texts(source, share, epoch)]
        tokens = np.array([byte for text in texts for byte in (*text.encode(), 256)])
        for sample, window in enumerate(fetched[number::8]):
            expected = tokens[sample * SEQ_LENGTH : sample * SEQ_LENGTH + SEQ_LENGTH + 1]
            np.testing.assert_array_equal(window, expected)


def train(config, consumed, iterations, micro_batch_size, data_parallel_size, global_batch_size=16, position=None):
    """Global batches [global_batch_size, s+1] that ranks read, each with a source of its own, up to two iterations
    ahead; and the position that they note after the last.
    """
    ranks = [opened(config) for _ in range(data_parallel_size)]
    for source in ranks:
        source.resume([position or {}])
    micro = global_batch_size // micro_batch_size // data_parallel_size
    batches = []
    for iteration in range(iterations + DEPTH):
        start = consumed + iteration * global_batch_size
        own = [rank_indices(start, micro, micro_batch_size, r, data_parallel_size) for r in range(data_parallel_size)]
        read = [source.fetch(indices.ravel()) for source, indices in zip(ranks, own, strict=True)]
        by_rank = np.stack(read).reshape(data_parallel_size, micro, micro_batch_size, -1)
        batches.append(by_rank.swapaxes(0, 1).reshape(global_batch_size, -1))
    end = consumed + iterations * global_batch_size
    noted = [item for source in ranks for item in source.position(end)[0].items()]
    assert len(set(noted)) == len({(number, text.split()[0]) for number, text in noted})
    # of several ranks' the farthest, as in a checkpoint
    return np.concatenate(batches[:iterations]), dict(sorted(noted, key=lambda one: int(one[1].split()[0])))


@pytest.mark.parametrize("layout", [(1, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("global_batch_size", [8, 32])
def test_the_order_does_not_depend_on_layout_or_batch_sizes(tmp_path, layout, global_batch_size):
    config = configured(made("mixed", tmp_path))
    expected = opened(config).fetch(np.arange(192))
    found, _ = train(config, 0, 192 // global_batch_size, *layout, global_batch_size=global_batch_size)
    np.testing.assert_array_equal(found, expected)


def test_streams_that_do_not_divide_over_the_ranks_give_the_same(tmp_path):
    config = configured(made("mixed", tmp_path), stream_count=10)
    expected = opened(config).fetch(np.arange(24 * 8))
    found, position = train(config, 0, 4, 2, 3, global_batch_size=24)
    np.testing.assert_array_equal(found, expected[:96])
    rest, _ = train(config, 96, 4, 1, 4, global_batch_size=24, position=position)
    np.testing.assert_array_equal(rest, expected[96:])


@pytest.mark.parametrize("kind", some(KINDS, SUITE))
def test_a_resume_in_another_layout_goes_on_at_once(tmp_path, kind, monkeypatch):
    config = configured(made(kind, tmp_path))
    expected = opened(config).fetch(np.arange(2000))
    tokenised = []
    plain = BytesEngine.encode_batch
    monkeypatch.setattr(
        BytesEngine, "encode_batch", lambda self, texts: tokenised.append(len(texts)) or plain(self, texts)
    )
    position, consumed = {}, 0
    for iterations, layout in ((3, (1, 2)), (50, (2, 4)), (1, (1, 1)), (40, (4, 2)), (20, (1, 4))):
        tokenised.clear()
        found, position = train(config, consumed, iterations, *layout, position=position)
        np.testing.assert_array_equal(found, expected[consumed : consumed + 16 * iterations])
        consumed += 16 * iterations
        assert set(position) == set(range(8))
        if iterations == 1:  # 48 windows of 33 tokens from 8 streams, out of 53 iterations' 200 documents
            assert sum(tokenised) < 8 * 20


def test_samples_in_gaps_are_passed_and_not_read_again(tmp_path, monkeypatch):
    """A checkpoint notes streams that stand in a gap or before it: a resume goes on there."""
    config, gaps = configured(made("jsonl", tmp_path)), Gaps([(40, 43), (64, 75), (990, 1200)])
    expected = opened(config).fetch(gaps.positions(np.arange(1200)))
    tokenised, plain = [], BytesEngine.encode_batch
    monkeypatch.setattr(
        BytesEngine, "encode_batch", lambda self, texts: tokenised.append(len(texts)) or plain(self, texts)
    )
    for consumed in (41, 60, 64, 976, 1000):
        source = opened(config)
        for first in range(0, consumed, 8):
            source.fetch(gaps.positions(np.arange(first, min(first + 8, consumed))))
        [noted] = source.position(gaps.behind(consumed))
        assert set(noted) == set(range(8))
        resumed = opened(config)
        resumed.resume([noted])
        tokenised.clear()
        found = resumed.fetch(gaps.positions(np.arange(consumed, consumed + 16)))
        np.testing.assert_array_equal(found, expected[consumed : consumed + 16])
        assert sum(tokenised) < 50  # documents: from what is nearest


def test_without_a_position_what_was_before_is_passed_over(tmp_path):
    config = configured(made("gz", tmp_path))
    expected = opened(config).fetch(np.arange(200))
    np.testing.assert_array_equal(opened(config).fetch(np.arange(160, 200)), expected[160:])
    source = opened(config)
    source.fetch(np.arange(100))
    np.testing.assert_array_equal(source.fetch(np.arange(40)), expected[:40])  # and back again


def test_positions_are_kept_while_a_reader_is_ahead():
    assert REMEMBERED > DEPTH + 2


def test_other_seeds_give_other_orders(tmp_path):
    config = configured(made("jsonl", tmp_path))
    assert not np.array_equal(opened(config, 1).fetch(np.arange(8)), opened(config, 2).fetch(np.arange(8)))


def test_a_share_begins_anew_and_says_so(tmp_path):
    config, said = configured((str(lines(tmp_path / "a.jsonl")),)), []
    source = opened(config, said=said)
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    source.fetch(np.arange(2 * tokens // SEQ_LENGTH))
    assert 1.5 < source.sources(0)["data"].epochs <= 2.1
    assert len([line for line in said if "has gone through its share 1 time(s)" in line]) == 1
    orders = [epoch_texts(source, alone(source).shares[0], epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_splits_share_no_document_and_follow_the_text(tmp_path):
    (tmp_path / "b").mkdir()
    lines(tmp_path / "b/a.jsonl", TEXTS)
    lines(tmp_path / "b/b.jsonl", TEXTS[::-1])  # each text twice
    config = configured((str(tmp_path / "b"),), split="80,15,5", stream_count=2)
    held = {}
    for split in ("train", "validation", "test"):
        source = opened(config, split=split)
        found = Counter(text for share in alone(source).shares for text in epoch_texts(source, share))
        assert set(found.values()) == {2}
        held[split] = set(found)
    assert set.union(*held.values()) == set(TEXTS)
    assert sum(map(len, held.values())) == len(TEXTS)
    assert 0.7 < len(held["train"]) / len(TEXTS) < 0.9
    with pytest.raises(UserError, match=r'data.split = "1,0,0" leaves nothing of data.stream for the validation split'):
        opened(replace(config, split="1,0,0"), split="validation")


def test_what_a_source_is_does_not_depend_on_where_it_lies(tmp_path):
    config = configured((str(lines(tmp_path / "a.jsonl")),))
    before = prepare(config, lambda line: None)
    status = (tmp_path / "a.jsonl").stat()
    (tmp_path / "there").mkdir()
    moved = tmp_path / "there/a.jsonl"
    moved.write_bytes((tmp_path / "a.jsonl").read_bytes())
    os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare(configured((str(moved),)), lambda line: None).fingerprint == before.fingerprint
    for changes in ({"stream_count": 4}, {"jsonl_key": "text", "max_document_mb": 1.0}, {"on_bad_document": "skip"}):
        assert prepare(replace(config, **changes), lambda line: None).fingerprint != before.fingerprint
    lines(tmp_path / "a.jsonl", ["other"] * 300)
    assert prepare(config, lambda line: None).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    "content, printed",
    [
        (b"", "data.stream: empty: 1 file(s) with 0 bytes"),
        (b"\n \n", "data.stream: no document with text"),
        (b'{"txt": "x"}\n', ':1 (byte 0): no field "text"; found: txt. Set data.jsonl_key. data.on_bad_document skip'),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ":2 (byte 14): byte 10 of the line is not UTF-8 text"),
        (b'{"text": "a"}\n{"text": 1\n', ":2 (byte 14): not JSON"),
    ],
)
def test_bad_input_is_named_before_ranks_start(tmp_path, content, printed):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare(configured((str(path),)), lambda line: None)
    assert printed in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "*.gz", "hf://no/such"])
def test_what_is_missing_is_named(tmp_path, name):
    given = name if name.startswith("hf:") else str(tmp_path / name)
    with pytest.raises(UserError, match=r"^data\.stream: .*" + name.removeprefix("hf://").replace("*", r"\*")):
        prepare(configured((given,)), lambda line: None)


def test_a_bad_line_met_later_is_named_or_left_out(tmp_path):
    path = lines(tmp_path / "x.jsonl")
    raw = path.read_bytes().splitlines(keepends=True)
    raw[150] = b"{]\n"
    path.write_bytes(b"".join(raw))
    said = []
    with pytest.raises(UserError, match=rf"x\.jsonl:151 \(byte {sum(map(len, raw[:150]))}\): not JSON"):
        opened(configured((str(path),))).fetch(np.arange(4000))
    source = opened(configured((str(path),), on_bad_document="skip"), said=said)
    source.fetch(np.arange(4000))
    assert [line for line in said if "x.jsonl:151" in line]
    assert alone(source).how.rejects.count


def test_too_little_text_for_so_many_streams_is_refused(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("word " * 100)
    with pytest.raises(UserError, match=r"divided into 5 parts only .* Set data.stream_count to 5 or less"):
        opened(configured((str(tmp_path / "*.txt"),)))
    small = configured((str(lines(tmp_path / "a.jsonl", ["short"] * 8)),))
    with pytest.raises(UserError, match=r"stream \d holds fewer than model.seq_length \+ 1 = 33 tokens"):
        opened(small).fetch(np.arange(8))
    lines(tmp_path / "a.jsonl", ["long " * 20] * 8)
    with pytest.raises(UserError, match=r"stream \d+ holds no document with text of the train split"):
        opened(replace(small, stream_count=12)).fetch(np.arange(12))


@pytest.mark.parametrize(
    "changes, printed",
    [
        ({"paths": ("x",)}, "data.paths and data.stream each say what to train on"),
        ({"blend": {"x": 1.0}}, "data.blend and data.stream each say what to train on"),
        ({"blend_file": "x"}, "data.blend_file and data.stream each say what to train on"),
        ({"order": "megatron"}, 'data.order = "megatron" orders the samples of shards'),
        ({"require_manifest": True}, "data.require_manifest asks for the manifests of shards"),
        ({"stream": ("a", "")}, "data.stream holds an empty string"),
        ({"stream_count": 0}, "data.stream_count = 0: expected 1 to 65536"),
        ({"max_expansion": 0.0}, "data.max_expansion must be above 0"),
    ],
)
def test_what_cannot_go_together_is_one_message(changes, printed):
    assert configured(("corpus",)).problems() == []
    [message] = replace(configured(("corpus",)), **changes).problems()
    assert printed in message
