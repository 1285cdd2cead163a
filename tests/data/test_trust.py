"""What must not be trained on is refused at start: another tokenizer, files that a manifest does not describe."""

import json
import shutil
import tracemalloc

import numpy as np
import pytest

from data.config import DataConfig
from data.manifest import manifest_path
from data.prepare import prepare
from data.shard_writer import ShardWriter
from data.shards import Shard, bin_path, idx_path
from data.source import build_source
from program.errors import UserError
from tools.preprocess.__main__ import main


@pytest.fixture
def made(tmp_path):
    """Prefix of two shards with manifests."""
    lines = "".join(json.dumps({"text": f"document {number} " * 20}) + "\n" for number in range(40))
    (tmp_path / "in.jsonl").write_text(lines)
    flags = ["--output", str(tmp_path / "x"), "--tokenizer", "byte", "--unit_mb", "0.006"]
    assert main([str(tmp_path / "in.jsonl"), *flags]) == 0
    return tmp_path / "x"


def opened(prefix, tmp_path, **fields):
    lines = []
    config = DataConfig(**{"paths": (str(prefix),), "tokenizer": "byte", "cache_dir": str(tmp_path / "c"), **fields})
    return prepare(config, lines.append), lines


def first(prefix):
    return sorted(prefix.parent.glob("x-*.idx"))[0].with_suffix("")


def test_all_shards_of_a_prefix_are_opened_without_a_word(made, tmp_path):
    prepared, lines = opened(made, tmp_path, require_manifest=True)
    assert len(prepared.prefixes) > 1
    assert lines == []


def test_another_tokenizer_is_refused(made, tmp_path):
    with pytest.raises(
        UserError, match=r"x-00000-of-\d+ was made with tokenizer byte .*257 ids.*data.tokenizer is another"
    ):
        opened(made, tmp_path, tokenizer="builtin", builtin_vocab_size=600)


@pytest.mark.parametrize("name, value", [("reset_attention_mask", True), ("eod_mask_loss", True)])
def test_documents_that_nothing_ends_cannot_be_kept_apart(made, tmp_path, name, value):
    opened(made, tmp_path, **{name: value})
    flags = ["--output", str(tmp_path / "y"), "--tokenizer", "byte", "--no_append_eod"]
    assert main([str(tmp_path / "in.jsonl"), *flags]) == 0
    opened(tmp_path / "y", tmp_path)
    with pytest.raises(UserError, match=rf"data\.{name}: .*y-00000-of-00001 was made with --no_append_eod"):
        opened(tmp_path / "y", tmp_path, **{name: value})


def test_a_blend_without_manifests_is_one_warning(made, tmp_path):
    for path in made.parent.glob("x-*.json"):
        path.unlink()
    prefixes = [str(path.with_suffix("")) for path in made.parent.glob("x-*.idx")]
    _, lines = opened(made, tmp_path, paths=(), blend=dict.fromkeys(prefixes, 1.0))
    assert len(prefixes) > 1 and any(f"{len(prefixes)} of {len(prefixes)} shards" in line for line in lines)
    assert sum("no manifest" in line for line in lines) == 1


def test_what_two_sources_of_a_blend_share_is_told(made, tmp_path):
    one, other = (str(path.with_suffix("")) for path in sorted(made.parent.glob("x-*.idx"))[:2])
    (tmp_path / "link").symlink_to(tmp_path)
    again = str(tmp_path / "link" / one.rpartition("/")[2])
    _, lines = opened(made, tmp_path, paths=(), blend={one: 1.0, other: 1.0, again: 1.0})
    assert [line for line in lines if "are in both" in line] == [
        f"data: 1 file(s) or shards are in both {one} and {again}, the first {again}"
    ]


def test_a_shard_without_a_manifest_is_opened_with_one_warning_or_refused(made, tmp_path):
    for prefix in made.parent.glob("x-*.json"):
        prefix.unlink()
    prepared, lines = opened(made, tmp_path)
    assert len(lines) == 1
    assert "shards have no manifest (x-00000-of-" in lines[0]
    with pytest.raises(UserError, match=r"data\.require_manifest"):
        opened(made, tmp_path, require_manifest=True)
    assert len(prepared.prefixes) > 1


def test_the_pair_of_another_shard_is_refused(made, tmp_path):
    one, other = (path.with_suffix("") for path in sorted(made.parent.glob("x-*.idx"))[:2])
    with ShardWriter(other, 257) as writer:  # whole, and not what the manifest says
        writer.add_documents(np.arange(100), np.array([60, 40]))
    with pytest.raises(UserError, match=r"are not the files that .*json describes: tokens 100, expected \d+"):
        opened(made, tmp_path)
    idx_path(other).write_bytes(idx_path(one).read_bytes())  # the .idx of another .bin
    with pytest.raises(UserError, match=r"200 bytes where .* promises"):
        opened(made, tmp_path)


def test_ids_of_another_width_are_refused(made, tmp_path):
    prefix = first(made)
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[17] = 3  # int16: as wide as uint16, so that all sizes fit
    idx_path(prefix).write_bytes(raw)
    with pytest.raises(UserError, match="dtype int16, expected uint16"):
        opened(made, tmp_path)


@pytest.mark.parametrize("first_token", [0, -100])
def test_tokens_that_were_overwritten_are_refused_though_their_size_is_right(made, tmp_path, first_token):
    """A copy that found the old manifest, or a power cut before the end of what was written reached the disk."""
    prefix = first(made)
    tokens = np.array(Shard(prefix).tokens)
    tokens[first_token:] = (tokens[first_token:] + 1) % 257
    bin_path(prefix).write_bytes(tokens.tobytes())
    refused_until_the_manifest_has_no_ends(made, tmp_path, bin_path(prefix))


def test_the_index_of_other_documents_is_refused_though_its_sizes_are_right(made, tmp_path):
    prefix = first(made)
    lengths = Shard(prefix).document_lengths()
    with ShardWriter(tmp_path / "one", 257) as writer:
        writer.add_documents(Shard(prefix).tokens, np.roll(lengths, 1))
    assert lengths[0] != lengths[-1]
    idx_path(prefix).write_bytes(idx_path(tmp_path / "one").read_bytes())
    refused_until_the_manifest_has_no_ends(made, tmp_path, idx_path(prefix))


def refused_until_the_manifest_has_no_ends(made, tmp_path, path):
    """As manifests were before 2026-11-22, which are good all the same."""
    with pytest.raises(UserError, match=rf"{path} is not the file that .*json describes: its first or last 4096"):
        opened(made, tmp_path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    for one in manifest["files"].values():
        del one["ends"]
    path.with_suffix(".json").write_text(json.dumps(manifest))
    opened(made, tmp_path)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_an_id_beyond_the_vocabulary_is_damage_where_a_manifest_proves_the_tokenizer(made, tmp_path, has_manifest):
    prefix = first(made)
    tokens = np.array(Shard(prefix).tokens)
    assert len(tokens) > 2 * (4096 // 2) + 10
    tokens[2050] = 300  # where no start looks
    bin_path(prefix).write_bytes(tokens.tobytes())
    if not has_manifest:
        manifest_path(prefix).unlink()
    prepared, _ = opened(prefix, tmp_path)
    source = build_source(prepared, DataConfig(split="1,0,0"), 64, 0, "train")
    damaged = rf"is damaged: `python -m tools.preprocess verify {prefix}` names where"
    with pytest.raises(UserError, match=damaged if has_manifest else "Set data.tokenizer to the one that") as caught:
        source.fetch(np.arange(source.samples_per_epoch))
    assert f"{bin_path(prefix)} holds token id 300 at token 2050" in str(caught.value)
    assert ("Set data.tokenizer" in str(caught.value)) is not has_manifest


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_manifest_that_is_none_is_named(made, tmp_path, content):
    manifest_path(first(made)).write_text(content)
    with pytest.raises(UserError, match=r"x-00000-of-\d+\.json"):
        opened(made, tmp_path)


def test_the_fingerprint_follows_every_byte_through_the_manifest(made, tmp_path):
    prefix = first(made)
    before = Shard(prefix).fingerprint()
    said = json.loads(manifest_path(prefix).read_text())
    said["files"]["bin"]["blake2b"] = "0" * 32
    manifest_path(prefix).write_text(json.dumps(said))
    assert Shard(prefix).fingerprint() != before


@pytest.mark.campaign
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Sparse files: a hundred times the tokens and documents, and 1 MB is enough for either."""
    peaks = []
    for name, documents in (("first", 100), ("small", 3_000), ("large", 300_000)):  # the first one imports
        with ShardWriter(tmp_path / name, 257) as writer:
            writer.add_documents(np.zeros(documents, np.uint16), np.ones(documents, np.int64))
        with bin_path(tmp_path / name).open("r+b") as file:
            file.truncate(2 * documents)
        prepared, _ = opened(tmp_path / name, tmp_path)
        tracemalloc.start()
        source = build_source(prepared, DataConfig(split="1,0,0"), 64, 0, "train")
        source.fetch(np.arange(8))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks[1:]) < 1_000_000


def held(prefix, tmp_path):
    """Bytes that are in use after a start and a look at every shard."""
    tracemalloc.start()
    try:
        prepared, _ = opened(prefix, tmp_path, require_manifest=True)
        source = build_source(prepared, DataConfig(split="1,0,0"), 64, 0, "train")
        for shard in prepared.shards:
            assert shard.tokens[0] == 0
        assert source.samples_per_epoch  # what batches are read from is held, too
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def copied(prefix, count, documents, blocks, tmp_path):
    """Many shards with manifests of tools.preprocess, as of so many blocks of 64 MiB, and of so many inputs."""
    source = tmp_path / f"{prefix.name}.jsonl"
    source.write_text(json.dumps({"text": chr(0) * 100}) + "\n" + '{"text": "x"}\n' * documents)
    assert main([str(source), "--output", str(tmp_path / "one"), "--tokenizer", "byte", "--overwrite"]) == 0
    one = tmp_path / "one-00000-of-00001"
    said = json.loads(manifest_path(one).read_text())
    said["source"] *= blocks
    for sums in said["files"].values():
        sums["blocks"] = [f"{number:032x}" for number in range(blocks)]
    for index in range(count):
        target = prefix.with_name(f"{prefix.name}-{index:05d}-of-{count:05d}")
        shutil.copy(bin_path(one), bin_path(target))
        shutil.copy(idx_path(one), idx_path(target))
        manifest_path(target).write_text(json.dumps(said, indent=1))
    return prefix


def test_memory_does_not_grow_with_a_shards_size_and_little_with_their_number(tmp_path):
    """What a start keeps of 60 shards beyond what it keeps of one, of small ones and of larger ones. Their tokens'
    maps are a third of it; numbers above 256 are objects of their own."""
    a_shard = []
    for size, documents, blocks in (("a", 10, 1), ("b", 10, 1), ("c", 2_000, 100)):  # the first one imports
        few = copied(tmp_path / f"few-{size}", 1, documents, blocks, tmp_path)
        many = copied(tmp_path / f"many-{size}", 60, documents, blocks, tmp_path)
        a_shard.append((held(many, tmp_path) - held(few, tmp_path)) / 59)
    assert max(a_shard[1:]) < 4096
    assert a_shard[2] < a_shard[1] + 512


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: said["files"].update(iDx=said["files"].pop("idx")),
        lambda said: said["files"].pop("bin"),
        lambda said: said["files"]["bin"].update(blake2b=7),
        lambda said: said["files"]["bin"].update(blocks=[1]),
        lambda said: said["files"]["idx"].update(size="9"),
        lambda said: said.update(tokens="9"),
        lambda said: said.update(counts={"empty": None}),
        lambda said: said.update(source=[None]),
        lambda said: said.update(append_eod=1),
        lambda said: said.update(tokenizer_fingerprint=None),
    ],
)
def test_a_manifest_that_one_bit_made_another_is_refused_and_verified(made, tmp_path, capsys, damage):
    path = manifest_path(first(made))
    said = json.loads(path.read_text())
    damage(said)
    path.write_text(json.dumps(said))
    with pytest.raises(UserError, match="is not a shard's manifest"):
        opened(made, tmp_path)
    assert main(["verify", str(made)]) == 1
    assert "is not a shard's manifest" in capsys.readouterr().out
