import struct
from dataclasses import replace

import numpy as np
import pytest

from campaign import param
from data.config import DataConfig
from data.manifest import ShardManifest
from data.prepared import Prepared
from data.shard_writer import ShardWriter
from data.shards import HEADER, Shard, bin_path, idx_path, token_dtype
from data.source import build_source
from data.split import SPLITS, split_documents
from data.tokenizers.base import ByteTokenizer
from program.errors import UserError
from tools.preprocess.verify import verify

SPLIT = "90,9,1"


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


COUNT = 500
BOUNDARIES = [split_documents(COUNT, SPLIT)[name].start for name in SPLITS[1:]]


def manifest_of(writer, files):
    """As manifests were before they held the ends of files: those would hide what the index tells by itself."""
    files = {name: replace(one, ends="") for name, one in files.items()}
    return ShardManifest(
        tokens=writer.token_count, documents=writer.document_count, dtype=writer.dtype.name, vocab_size=257,
        tokenizer="byte", tokenizer_fingerprint="", eod=256, append_eod=True, special_text="plain", files=files,
    )  # fmt: skip


def write_many(prefix, describe=None):
    """COUNT documents of one sequence each; returns the bytes of the index."""
    with ShardWriter(prefix, 257, describe) as writer:
        for document in random_documents(COUNT, 257):
            writer.add(document)
            writer.end_document()
    return idx_path(prefix).read_bytes()


def splits_of(prefix):
    """First and last token of every split, opened as training opens them."""
    prepared = Prepared(tokenizer=ByteTokenizer(), shards=(Shard(prefix),), fingerprint="")
    sources = [build_source(prepared, DataConfig(split=SPLIT), 16, 0, name) for name in SPLITS]
    return [(segment.start, segment.stop) for source in sources for segment in source.segments]


def starts_of(prefix):
    shard = Shard(prefix)
    return [shard.document_start(number) for number in range(shard.document_count + 1)]


def flips(sequences, entries, boundaries):
    """(byte, mask): every byte of the entries around the boundaries and at the ends of the arrays, and 90 others."""
    draw = np.random.default_rng(1)
    arrays = [(HEADER.size, 4, sequences), (HEADER.size + 4 * sequences, 8, sequences)]
    arrays.append((HEADER.size + 12 * sequences, 8, entries))
    for start, width, count in arrays:
        near = {number + step for number in (0, *boundaries, count - 1) for step in (-1, 0, 1)}
        for number in sorted(near & set(range(count))):
            places = range(start + width * number, start + width * (number + 1))
            yield from ((place, mask) for place in places for mask in (128, int(draw.integers(1, 256))))
        for place in draw.integers(start, start + width * count, 30).tolist():
            yield place, int(draw.integers(1, 256))


def flip(path, raw, place, mask):
    path.write_bytes(raw[:place] + bytes([raw[place] ^ mask]) + raw[place + 1 :])


@pytest.mark.parametrize("describe", [param(None), manifest_of])
def test_no_flipped_byte_of_an_index_moves_a_split(tmp_path, describe, capsys):
    """What opening in O(1) cannot see is seen by verify, or where there are no checksums when it is read."""
    raw = write_many(tmp_path / "x", describe)
    before = splits_of(tmp_path / "x")
    refused = unseen = 0
    for place, mask in flips(COUNT, COUNT + 1, BOUNDARIES):
        flip(idx_path(tmp_path / "x"), raw, place, mask)
        try:
            assert splits_of(tmp_path / "x") == before, (place, mask)
        except UserError as error:
            assert str(idx_path(tmp_path / "x")) in str(error) or "x.idx promises" in str(error)
            refused += 1
            continue
        unseen += 1
        if describe:
            assert verify(tmp_path / "x"), (place, mask)
        with pytest.raises(UserError, match=r"x\.idx has"):
            starts_of(tmp_path / "x")
    assert refused > 200
    assert unseen > 50


def test_a_flipped_byte_moves_no_split_of_megatrons_beyond_its_neighbours(tmp_path):
    """Documents of none to four sequences: an entry between its neighbours may be any; nothing else moves."""
    raw = write_many(tmp_path / "x")
    ends = np.sort(np.random.default_rng(2).integers(0, COUNT, 199))
    entries = np.array([0, *ends, COUNT], np.int64)
    raw = raw[:26] + struct.pack("<Q", len(entries)) + raw[34 : 34 + 12 * COUNT] + entries.tobytes()
    idx_path(tmp_path / "x").write_bytes(raw)
    before, starts = splits_of(tmp_path / "x"), starts_of(tmp_path / "x")
    boundaries = [split_documents(200, SPLIT)[name].start for name in SPLITS[1:]]
    near = [*boundaries, *entries[boundaries].tolist()]
    for place, mask in flips(COUNT, len(entries), near):
        flip(idx_path(tmp_path / "x"), raw, place, mask)
        try:
            found = splits_of(tmp_path / "x")
        except UserError:
            continue
        for document, (start, _) in zip(boundaries, found[1:], strict=True):
            assert starts[document - 1] <= start <= starts[document + 1], (place, mask)
        assert found == before or place >= HEADER.size + 12 * COUNT, (place, mask)


@pytest.mark.parametrize("describe, fix", [(None, "Copy or"), (manifest_of, "tools.preprocess verify")])
def test_a_boundary_that_was_changed_names_file_place_and_way_out(tmp_path, describe, fix):
    raw = bytearray(write_many(tmp_path / "x", describe))
    place = HEADER.size + 12 * COUNT + 8 * 450
    raw[place : place + 8] = struct.pack("<q", 100)
    idx_path(tmp_path / "x").write_bytes(raw)
    with pytest.raises(UserError) as caught:
        splits_of(tmp_path / "x")
    for part in ("x.idx has documents 449 to 451 at sequences [449, 100, 451], expected each its own number", fix):
        assert part in str(caught.value)


@pytest.mark.parametrize("describe", [None, manifest_of])
@pytest.mark.parametrize("place", [HEADER.size + 4 * 77 + 3, HEADER.size + 12 * COUNT + 8 * 77 + 7])
def test_lengths_that_cannot_be_are_refused(tmp_path, describe, place):
    flip(idx_path(tmp_path / "x"), write_many(tmp_path / "x", describe), place, 128)
    with pytest.raises(UserError, match=r"x\.idx has .*: damaged"):
        Shard(tmp_path / "x").document_lengths()
