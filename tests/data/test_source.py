import numpy as np
import pytest

from data import blend
from data.config import DataConfig
from data.order import rank_indices, sample_windows
from data.prepare import prepare
from data.prepared import Prepared
from data.shard_writer import ShardWriter
from data.shards import Shard
from data.source import build_source
from data.tokenizers.base import ByteTokenizer
from program.errors import UserError

ALL_TRAIN = DataConfig(split="1,0,0")


def prepared(folder, *shards):
    """Shards of the given documents (lists of ids below 100,000)."""
    prefixes = []
    for number, documents in enumerate(shards):
        prefixes.append(folder / f"shard{number}")
        with ShardWriter(prefixes[-1], 100_000) as writer:
            for document in documents:
                writer.add(np.array(document))
                writer.end_document()
    return Prepared(tokenizer=ByteTokenizer(), shards=tuple(map(Shard, prefixes)), fingerprint="")


def test_samples_are_the_streams_windows_in_seeded_order(tmp_path):
    stream = np.arange(101) % 257
    source = build_source(prepared(tmp_path, [stream[:30], stream[30:]]), ALL_TRAIN, 10, 7, "train")
    assert source.samples_per_epoch == 10
    samples = np.arange(25)
    tokens = source.fetch(samples)
    assert tokens.dtype == np.int32
    for window, row in zip(sample_windows(samples, 10, 7), tokens, strict=True):
        np.testing.assert_array_equal(row, stream[window * 10 : window * 10 + 11])


def test_windows_cross_shards(tmp_path):
    stream = np.arange(101) % 257
    cut = prepared(tmp_path, [stream[:3]], [stream[3:5]], [stream[5:64]], [stream[64:]])
    (tmp_path / "whole").mkdir()
    whole = prepared(tmp_path / "whole", [stream])
    fetched = [build_source(either, ALL_TRAIN, 10, 0, "train").fetch(np.arange(10)) for either in (cut, whole)]
    np.testing.assert_array_equal(*fetched)


def test_splits_hold_their_documents_and_nothing_else(tmp_path):
    documents = [[number] * 20 for number in range(10)]
    given = prepared(tmp_path, documents, documents)
    config = DataConfig(split="7,2,1")
    for split, expected in (("train", range(7)), ("validation", range(7, 9)), ("test", range(9, 10))):
        source = build_source(given, config, 1, 0, split)
        assert source.token_count == 2 * 20 * len(expected)
        found = set(source.fetch(np.arange(source.samples_per_epoch)).ravel().tolist())
        assert found == set(expected)


def test_many_small_shards_train_on_what_the_split_says(tmp_path):
    """Three documents each, as of books: cut one by one, each shard would give away one to validate and one to test."""
    given = prepared(tmp_path, *[[[1] * 20] * 3] * 14)
    assert build_source(given, DataConfig(), 10, 0, "train").token_count == 20 * 40
    assert build_source(given, DataConfig(), 10, 0, "validation").token_count == 20


@pytest.mark.parametrize("bad", [257, 99_999])
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path, bad):
    given = prepared(tmp_path, [[0] * 11], [[0] * 4, [0, 0, bad, 0, 0, 0]])
    source = build_source(given, ALL_TRAIN, 10, 0, "train")
    samples = np.arange(2)
    guilty = int(np.flatnonzero(sample_windows(samples, 2, 0) == 1)[0])
    with pytest.raises(UserError) as caught:
        source.fetch(samples)
    for part in ("shard1.bin", f"token id {bad} at token 6", f"sample {guilty}", "257 ids"):
        assert part in str(caught.value)
    with pytest.raises(UserError):  # on every fetch, not only the first
        source.fetch(samples[guilty : guilty + 1])


def test_a_negative_id_is_refused(tmp_path):
    given = prepared(tmp_path, [[0] * 11])
    path = tmp_path / "shard0.bin"
    path.write_bytes(np.full(11, -1, np.int32).tobytes())
    with pytest.raises(UserError, match="token id -1"):
        build_source(given, ALL_TRAIN, 10, 0, "train").fetch(np.arange(1))


def test_ids_beyond_int32_do_not_wrap(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int64)
    builder.add_document(np.full(11, 2**32, np.int64), [11])
    builder.finalize(str(tmp_path / "x.idx"))
    given = Prepared(tokenizer=ByteTokenizer(), shards=(Shard(tmp_path / "x"),), fingerprint="")
    with pytest.raises(UserError, match=str(2**32)):
        build_source(given, ALL_TRAIN, 10, 0, "train").fetch(np.arange(1))


@pytest.mark.parametrize("split, held", [("train", "10 tokens in 1"), ("validation", "0 tokens in 0")])
def test_a_split_too_small_for_a_sample_is_refused(tmp_path, split, held):
    with pytest.raises(UserError, match=f"the {split} split holds {held}") as caught:
        build_source(prepared(tmp_path, [[1] * 10]), DataConfig(), 10, 0, split)
    assert "needs seq_length + 1 = 11" in str(caught.value)


def train(source, consumed, iterations, micro_batch_size, data_parallel_size, global_batch_size=16):
    """Every global batch [global_batch_size, s+1] that the ranks of a layout read between them."""
    micro = global_batch_size // micro_batch_size // data_parallel_size
    for start in range(consumed, consumed + iterations * global_batch_size, global_batch_size):
        shares = [
            source.fetch(rank_indices(start, micro, micro_batch_size, rank, data_parallel_size).ravel())
            for rank in range(data_parallel_size)
        ]
        by_rank = np.stack(shares).reshape(data_parallel_size, micro, micro_batch_size, -1)
        yield by_rank.swapaxes(0, 1).reshape(global_batch_size, -1)


@pytest.mark.parametrize("layout", [(1, 1), (4, 1), (1, 2), (2, 2), (2, 4), (1, 8), (2, 8)])
def test_same_batches_in_the_same_order_across_layouts_and_a_resume(tmp_path, layout):
    stream = np.random.default_rng(0).integers(0, 257, 1000)
    source = build_source(prepared(tmp_path, [stream]), ALL_TRAIN, 8, 3, "train")
    expected = np.concatenate(list(train(source, 0, 10, 1, 1)))
    first = list(train(source, 0, 4, *layout))
    resumed = list(train(source, 4 * 16, 6, 2, 4))
    np.testing.assert_array_equal(np.concatenate(first + resumed), expected)


@pytest.mark.parametrize("layout", [(1, 1), (4, 1), (2, 4), (1, 8)])
def test_a_blends_batches_do_not_depend_on_layout_global_batch_or_a_resume(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(blend, "PERIOD", 64)  # the real one takes a second to deal
    weights = {}
    for number, weight in enumerate((0.6, 0.3, 0.1)):
        with ShardWriter(tmp_path / str(number), 257) as writer:
            writer.add_documents(np.random.default_rng(number).integers(0, 257, 400), np.array([400]))
        weights[str(tmp_path / str(number))] = weight
    config = DataConfig(blend=weights, tokenizer="byte", cache_dir=str(tmp_path / "cache"), split="1,0,0")
    source = build_source(prepare(config, lambda line: None), config, 8, 3, "train")
    expected = np.concatenate(list(train(source, 0, 20, 1, 1, global_batch_size=8)))
    first = list(train(source, 0, 4, *layout))
    resumed = list(train(source, 4 * 16, 3, 2, 4, global_batch_size=32))
    np.testing.assert_array_equal(np.concatenate(first + resumed), expected)
