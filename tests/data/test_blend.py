import itertools
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import blend, cache
from data.config import DataConfig
from data.prepare import prepare
from data.shard_writer import ShardWriter
from data.source import build_source
from data.sources import named, read_weights
from program.errors import UserError
from training.config.recipe import dump, load


@pytest.fixture
def short_period(monkeypatch):
    """A period that a test can make many of."""
    monkeypatch.setattr(blend, "PERIOD", 512)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_rounded_weights_sum_to_one_and_are_near(weights):
    units = blend.rounded(weights)
    assert sum(units) == 2**20
    assert min(units) >= 1
    exact = np.array(weights) / sum(weights) * 2**20
    assert np.abs(np.array(units) - exact)[exact >= 1].max(initial=0) <= 1 + sum(exact < 1)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_every_prefix_is_within_one_sample_of_the_weights(weights):
    original, blend.PERIOD = blend.PERIOD, 512
    try:
        units = blend.rounded(weights)
        table = blend.schedule(units)
    finally:
        blend.PERIOD = original
    lengths = np.arange(1, len(table) + 1)
    for source, unit in enumerate(units):
        assert np.abs(np.cumsum(table == source) - lengths * unit / 512).max() <= 1


@pytest.mark.parametrize("weights", [[1e308, 1e308, 1e-300], [1.0] + [1e-9] * 60_000])
def test_absurd_weights_are_rounded_at_once(weights):
    units = blend.rounded(weights)
    assert sum(units) == 2**20 and min(units) == 1


def damaged(path):
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")


def shorter(path):
    path.write_bytes(path.read_bytes()[:-3])


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def link_loop(path):
    path.unlink()
    path.symlink_to(path.name)


def file_for_folder(path):
    shutil.rmtree(path.parent)
    path.parent.write_text("")


@pytest.mark.usefixtures("short_period")
@pytest.mark.parametrize("damage", [damaged, shorter, fifo, link_loop, file_for_folder])
def test_a_damaged_table_is_made_again(tmp_path, damage):
    units = blend.rounded([0.6, 0.3, 0.1])
    expected = blend.load(units, tmp_path, print).table.tolist()
    (path,) = (tmp_path / "blends").glob("*/table*")
    damage(path)
    assert blend.load(units, tmp_path, print).table.tolist() == expected


@pytest.mark.usefixtures("short_period")
@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"\0" * 99])
def test_a_table_of_another_blend_is_refused(tmp_path, content):
    """Whoever put it there, with the right seal."""
    units = blend.rounded([0.6, 0.3, 0.1])
    blend.load(units, tmp_path, print)
    (path,) = (tmp_path / "blends").glob("*/table*")
    shutil.rmtree(path.parent)
    cache.build_once(path.parent, lambda part: (part / path.name).write_bytes(content) and None, print)
    with pytest.raises(UserError, match=r"data\.cache_dir: .* Remove "):
        blend.load(units, tmp_path, print)


def test_a_real_period_is_within_one_sample_of_the_weights(tmp_path):
    units = blend.rounded([0.5, 0.3, 0.15, 0.04, 0.01])
    made = blend.load(units, tmp_path, print)
    lengths = np.arange(1, len(made.table) + 1)
    for source, unit in enumerate(units):
        assert np.abs(np.cumsum(made.table == source) - lengths * unit / 2**20).max() <= 1
    again = blend.load(units, tmp_path, print)
    np.testing.assert_array_equal(again.table, made.table)


@pytest.mark.usefixtures("short_period")
def test_each_sources_own_samples_come_in_order_over_periods(tmp_path):
    made = blend.load(blend.rounded([0.6, 0.3, 0.1]), tmp_path, print)
    sources, indices = made.assign(np.arange(2000))
    for source in range(3):
        own = indices[sources == source]
        np.testing.assert_array_equal(own, np.arange(len(own)))
    for samples in (0, 1, 511, 512, 513, 1999):
        np.testing.assert_array_equal(made.counts(samples), np.bincount(sources[:samples], minlength=3))
    some = np.array([1999, 3, 700])
    np.testing.assert_array_equal(made.assign(some)[1], indices[some])


def shard(prefix, first, count=100):
    """`count` documents of ids that only this shard has."""
    with ShardWriter(prefix, 100_000) as writer:
        for number in range(count):
            writer.add(np.full(9, first + number % 10))
            writer.end_document()
    return str(prefix)


def blended(tmp_path, **fields):
    config = DataConfig(tokenizer="byte", cache_dir=str(tmp_path / "cache"), split="1,0,0", **fields)
    return prepare(config, lambda line: None), config


def test_samples_of_a_blend_have_its_proportions_and_each_its_own_epochs(tmp_path):
    weights = {shard(tmp_path / "a", 0): 3.0, shard(tmp_path / "b", 100, 50): 1.0}
    prepared, config = blended(tmp_path, blend=weights)
    source = build_source(prepared, config, 8, 1, "train")
    tokens = source.fetch(np.arange(800))
    assert tokens.shape == (800, 9)
    assert (tokens[:, 0] >= 100).sum() == 200
    assert source.sources(800) == {str(tmp_path / "a"): (600, 600 / 112), str(tmp_path / "b"): (200, 200 / 56)}
    own = tokens[tokens[:, 0] >= 100][:56]  # one epoch of b: each of its windows once
    alone, alone_config = blended(tmp_path, paths=(str(tmp_path / "b"),))
    every = build_source(alone, alone_config, 8, 5, "train").fetch(np.arange(56))
    assert sorted(map(tuple, own.tolist())) == sorted(map(tuple, every.tolist()))


@pytest.mark.usefixtures("short_period")
def test_a_blend_is_the_same_sample_by_sample_however_it_is_asked_for(tmp_path):
    weights = {shard(tmp_path / "a", 0): 0.7, shard(tmp_path / "b", 100): 0.2, shard(tmp_path / "c", 200): 0.1}
    prepared, config = blended(tmp_path, blend=weights)
    whole = build_source(prepared, config, 8, 1, "train").fetch(np.arange(5000))
    again = build_source(prepared, config, 8, 1, "train")
    for start in (4990, 0, 4093, 17):
        np.testing.assert_array_equal(again.fetch(np.arange(start, start + 8)), whole[start : start + 8])


def test_weights_from_a_table_a_file_and_globs(tmp_path):
    for name in ("web-0", "web-1", "code"):
        shard(tmp_path / name, 0)
    (tmp_path / "blend.toml").write_text(f'"{tmp_path}/web-*" = 0.75\n"{tmp_path}/code" = 0.25\n')
    (tmp_path / "blend.txt").write_text(f"3 {tmp_path}/web-*\n1 {tmp_path}/code\n")
    table = {f"{tmp_path}/web-*": 3, f"{tmp_path}/code": 1}
    ways = ({"blend": table}, {"blend_file": str(tmp_path / "blend.toml")}, {"blend_file": str(tmp_path / "blend.txt")})
    found = [blended(tmp_path, **way)[0] for way in ways]
    assert [len(source.prefixes) for source in found[0].sources] == [2, 1]
    assert [source.units for source in found[0].sources] == [3 * 2**18, 2**18]
    for one, other in itertools.pairwise(found):
        assert (one.fingerprint, one.prefixes) == (other.fingerprint, other.prefixes)


def test_a_glob_leaves_out_what_a_killed_writer_leaves(tmp_path):
    shard(tmp_path / "web-0", 0)
    for name in ("web-1.bin.tmp-999-abc", "web-1.idx.tmp-999-abc", "web-1.json.tmp-999"):
        (tmp_path / name).write_bytes(b"half")
    (source,) = named(DataConfig(blend={f"{tmp_path}/web-*": 1.0}))
    assert source.paths == (f"{tmp_path}/web-0",)


def test_lost_shards_behind_a_glob_are_refused_as_behind_a_prefix(tmp_path, monkeypatch):
    """In a folder that holds those of others too, which number theirs from 1; an empty unit has no pair."""
    monkeypatch.chdir(tmp_path)
    for name in ("code-00000-of-00004", "code-00002-of-00004", "code-00003-of-00004", "web-00001-of-00002",
                 "web-00002-of-00002", "book-00001-of-00002"):  # fmt: skip
        shard(tmp_path / name, 0)
    (tmp_path / "code-00001-of-00004.empty.json").touch()
    (tmp_path / "raw-00001-of-00002.jsonl").touch()

    def found(name):
        return named(DataConfig(blend={name: 0.3}))[0].paths

    assert len(found("code-*")) == len(found(f"{tmp_path}/code-*.idx")) == 3
    assert len(found("web-*")) == 2 and len(found("raw-*")) == 1
    with pytest.raises(UserError, match=r"1 of the 2 shards of .*/book are missing, the first book-00000-of-00002.idx"):
        found("*")
    (tmp_path / "code-00001-of-00004.empty.json").unlink()
    (tmp_path / "code-00003-of-00004.idx").unlink()
    for name in ("code-*", "**/code-*.bin", "[cw]*"):
        with pytest.raises(UserError, match=r"2 of the 4 shards of .*/code are missing, the first code-00001-of-00004"):
            found(name)


def test_a_corpus_spread_over_folders_and_one_of_two_generations_are_whole(tmp_path):
    def found(name):
        return named(DataConfig(blend={f"{tmp_path}/{name}": 0.3}))[0].paths

    for name in ("d1/p-00000-of-00002", "d2/p-00001-of-00002", "w-00000-of-00001", "w-00000-of-00002",
                 "w-00001-of-00002", "e1/q-00000-of-00002", "e1/q-00001-of-00002", "e2/q-00000-of-00002"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shard(tmp_path / name, 0)
    assert len(found("*/p-*")) == 2
    assert len(found("w-*-of-00002*")) == 2
    with pytest.raises(UserError, match=r"1 of the 2 shards of .*/e2/q are missing, the first q-00001-of-00002.idx"):
        found("*/q-*")  # two corpora of one name: neither has what the other lacks
    with pytest.raises(UserError, match=r"1 of the 2 shards of .*/d1/p are missing"):
        found("d1/p-*")


def test_a_recipe_holds_a_blend(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[data.blend]\n"a/b.c" = 0.5\n"d-*" = 1\n')
    config = load(path)
    assert config.data.blend == {"a/b.c": 0.5, "d-*": 1}
    path.write_text(dump(config))
    assert load(path) == config


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"blend": {"a": 0.0}}, "expected a source and a weight above 0"),
        ({"blend": {"a": float("inf")}}, "weight above 0"),
        ({"blend": {"a": 1.0}, "paths": ("b",)}, "data.paths and data.blend each say"),
    ],
)
def test_blends_that_cannot_be(fields, reason):
    assert reason in "\n".join(DataConfig(**fields).problems())


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("x.toml", '"a" = true', "expected a (number|weight)"),
        ("x.toml", "[", "not valid TOML"),
        ("x.txt", "0.5 a 0.5", "expected"),
        ("x.txt", "half a", "expected"),
        ("x.txt", "1 a 1 a", "named twice"),
        ("x.txt", "-1 a", "weight above 0"),
        ("x.txt", "", "no source"),
    ],
)
def test_files_of_weights_that_cannot_be(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=reason):
        named(DataConfig(blend_file=str(tmp_path / name)))


def test_a_glob_that_finds_nothing(tmp_path):
    with pytest.raises(UserError, match="nothing fits"):
        named(DataConfig(blend={f"{tmp_path}/*": 1.0}))


def test_a_source_of_a_blend_that_fills_no_sample_is_named(tmp_path):
    prepared, config = blended(tmp_path, blend={shard(tmp_path / "a", 0): 1.0, shard(tmp_path / "b", 0, 1): 1.0})
    with pytest.raises(UserError, match=rf"the train split of {tmp_path}/b holds 9 tokens"):
        build_source(prepared, config, 10, 0, "train")


def test_a_source_may_have_brackets_in_its_name(tmp_path):
    """What lies there under the very name is meant, not what a glob would make of it."""
    for name in ("a[1]", "a1"):
        with ShardWriter(tmp_path / name, 257) as writer:
            writer.add(np.arange(9))
            writer.end_document()
    found = named(DataConfig(blend={str(tmp_path / "a[1]"): 1.0, str(tmp_path / "a?.bin"): 1.0}))
    assert [source.paths for source in found] == [(str(tmp_path / "a[1]"),), (str(tmp_path / "a1"),)]


def test_weights_that_are_no_text_are_refused(tmp_path):
    for ending in ("toml", "txt"):
        path = tmp_path / f"blend.{ending}"
        path.write_bytes(b"0.5 \xff\xfe")
        with pytest.raises(UserError, match="byte 4: expected UTF-8 text"):
            read_weights(path)
