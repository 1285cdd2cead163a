import struct

import numpy as np
import pytest

from data.shard_writer import ShardWriter
from data.shards import Shard, bin_path, idx_path, token_dtype
from parallel.errors import UserError


def random_documents(count, vocab_size, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocab_size, draw.integers(1, 50)) for _ in range(count)]


def write(prefix, documents, vocab_size=257):
    with ShardWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()


@pytest.fixture
def shard_prefix(tmp_path):
    write(tmp_path / "x", [np.arange(10), np.arange(7)])
    return tmp_path / "x"


def test_what_is_written_is_read_back(tmp_path):
    documents = random_documents(100, 257)
    write(tmp_path / "a.b", documents)
    shard = Shard(tmp_path / "a.b")
    assert shard.document_count == 100
    np.testing.assert_array_equal(shard.tokens, np.concatenate(documents))
    starts = [shard.document_start(number) for number in range(101)]
    assert starts == [0, *np.cumsum([len(document) for document in documents])]


def test_a_document_may_be_added_in_pieces(tmp_path):
    write(tmp_path / "whole", [np.arange(10)])
    with ShardWriter(tmp_path / "pieces", 257) as writer:
        writer.add(np.arange(4))
        writer.add(np.arange(4, 10))
        writer.end_document()
    for half in (bin_path, idx_path):
        assert half(tmp_path / "pieces").read_bytes() == half(tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("vocab_size, name", [(65499, "uint16"), (65500, "int32"), (200_000, "int32")])
def test_token_width_follows_megatrons_rule(vocab_size, name):
    assert token_dtype(vocab_size).name == name


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500])
def test_bytes_equal_megatrons(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    documents = random_documents(50, vocab_size)
    write(tmp_path / "ours", documents, vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for half in (bin_path, idx_path):
        assert half(tmp_path / "ours").read_bytes() == half(tmp_path / "theirs").read_bytes()


def test_megatron_reads_ours(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = random_documents(50, 70_000)
    write(tmp_path / "ours", documents, 70_000)
    theirs = IndexedDataset(str(tmp_path / "ours"))
    assert len(theirs) == 50
    for number, document in enumerate(documents):
        np.testing.assert_array_equal(theirs[number], document)
    np.testing.assert_array_equal(theirs.document_indices, np.arange(51))


@pytest.mark.parametrize("multimodal", [False, True])
def test_we_read_megatrons_documents_of_several_sequences(tmp_path, multimodal):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32, multimodal=multimodal)
    builder.add_document(np.arange(10), [4, 6], [0, 0] if multimodal else None)
    builder.add_document(np.arange(3), [3], [0] if multimodal else None)
    builder.finalize(str(tmp_path / "x.idx"))
    shard = Shard(tmp_path / "x")
    assert shard.document_count == 2
    assert [shard.document_start(number) for number in range(3)] == [0, 10, 13]


def test_an_index_without_documents_makes_each_sequence_one(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    builder.add_item(torch.arange(5))
    builder.add_item(torch.arange(2))
    builder.finalize(str(tmp_path / "x.idx"))
    shard = Shard(tmp_path / "x")
    assert [shard.document_start(number) for number in range(shard.document_count + 1)] == [0, 5, 7]


def test_truncated_bin_names_file_and_sizes(shard_prefix):
    path = bin_path(shard_prefix)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError) as caught:
        Shard(shard_prefix)
    for part in (str(path), "31 bytes", "promises 34"):
        assert part in str(caught.value)


def test_truncated_idx_names_file_and_sizes(shard_prefix):
    path = idx_path(shard_prefix)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"x\.idx has 74 bytes where its header promises 82"):
        Shard(shard_prefix)


@pytest.mark.parametrize(
    "offset, replacement, message",
    [
        (0, b"PK", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2"),
        (17, b"\x07", "dtype code 7"),
        (74, struct.pack("<Q", 1), "ends its documents at sequence 1 and holds 2"),
    ],
)
def test_damaged_index_is_refused(shard_prefix, offset, replacement, message):
    raw = bytearray(idx_path(shard_prefix).read_bytes())
    raw[offset : offset + len(replacement)] = replacement
    idx_path(shard_prefix).write_bytes(raw)
    with pytest.raises(UserError, match=message):
        Shard(shard_prefix)


def test_empty_shard_is_an_empty_corpus(tmp_path):
    write(tmp_path / "x", [])
    with pytest.raises(UserError, match="empty corpus"):
        Shard(tmp_path / "x")


@pytest.mark.parametrize("half", [bin_path, idx_path])
def test_half_a_pair_names_the_missing_file(shard_prefix, half):
    half(shard_prefix).unlink()
    with pytest.raises(UserError, match=half(shard_prefix).name):
        Shard(shard_prefix)


def test_a_failed_write_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 257"), ShardWriter(tmp_path / "x", 257) as writer:
        writer.add(np.array([1, 257]))
    assert list(tmp_path.iterdir()) == []


def test_nothing_has_its_name_before_the_end(tmp_path):
    with ShardWriter(tmp_path / "x", 257) as writer:
        writer.add(np.arange(3))
        writer.end_document()
        assert not bin_path(tmp_path / "x").exists()
        assert not idx_path(tmp_path / "x").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.idx"}


def test_fingerprint_follows_content_not_name(shard_prefix, tmp_path):
    write(tmp_path / "same", [np.arange(10), np.arange(7)])
    write(tmp_path / "other", [np.arange(10), np.arange(1, 8)])
    assert Shard(tmp_path / "same").fingerprint() == Shard(shard_prefix).fingerprint()
    assert Shard(tmp_path / "other").fingerprint() != Shard(shard_prefix).fingerprint()
