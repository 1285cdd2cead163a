"""Orders that follow one another: each source goes on where it was left, whatever its weight was."""

from pathlib import Path

import numpy as np
import pytest

from data import blend, order
from data.config import DataConfig
from data.order_begin import RUN_BEGIN, OrderBegin, read_until, source_keys
from data.prepare import prepare
from data.prepared import Prepared
from data.shard_writer import ShardWriter
from data.source import build_source

LENGTH, SEED, SPLIT = 7, 5, "1"
TOKENS = {"a": 20 * LENGTH + 1, "b": 50 * LENGTH + 1, "c": 30 * LENGTH + 1}


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Three sources whose tokens say whose they are and where: source s has ids 80 s .. 80 s + 79, over and over."""
    monkeypatch.setattr(blend, "PERIOD", 64)
    found = {}
    for number, (name, count) in enumerate(TOKENS.items()):
        found[name] = str(tmp_path / name)
        with ShardWriter(tmp_path / name, 257) as writer:
            writer.add(80 * number + np.arange(count) % 80)
            writer.end_document()
    return found


def prepared_blend(weights: dict[str, float], shards: dict[str, str], cache: Path) -> tuple[Prepared, DataConfig]:
    named = {shards[name]: weight for name, weight in weights.items()}
    config = DataConfig(tokenizer="byte", split=SPLIT, cache_dir=str(cache), blend=named)
    if len(weights) == 1:
        config = DataConfig(tokenizer="byte", split=SPLIT, cache_dir=str(cache), paths=tuple(named))
    return prepare(config, lambda text: None), config


def test_no_window_is_read_again_before_all_are(shards: dict[str, str], tmp_path: Path) -> None:
    plan = [({"a": 1.0}, 13), ({"b": 3.0, "a": 1.0}, 40), ({"c": 1.0, "b": 1.0, "a": 2.0}, 31), ({"b": 1.0}, 9)]
    begin, read = RUN_BEGIN, {name: list[np.ndarray]() for name in TOKENS}
    for weights, samples in plan:
        prepared, config = prepared_blend(weights, shards, tmp_path)
        source = build_source(prepared, config, LENGTH, SEED, "train", begin)
        indices = np.arange(begin.samples, begin.samples + samples)
        windows = source.fetch(indices)
        # the same whoever asks for which of them
        some = np.random.default_rng(0).permutation(indices)[:5]
        np.testing.assert_array_equal(source.fetch(some), windows[some - begin.samples])
        for window in windows:
            read["abc"[int(window[0]) // 80]].append(window)
        end = begin.samples + samples
        counted = {one.samples for one in source.sources(end).values()}
        assert counted == {len(read[name]) for name in weights}  # one counter for each source, over all orders
        begin = OrderBegin(samples=end, read=read_until(prepared, config, LENGTH, SEED, begin, end))
    orders = {"a": str(SEED), "b": f"{SEED} source 0", "c": f"{SEED} source 0"}  # as where they came first
    for number, (name, found) in enumerate(read.items()):
        per_epoch = (TOKENS[name] - 1) // LENGTH
        expected = order.sample_windows(np.arange(len(found)), per_epoch, orders[name])
        tokens = 80 * number + (expected[:, None] * LENGTH + np.arange(LENGTH + 1)) % 80
        np.testing.assert_array_equal(np.stack(found), tokens)
    assert len(read["a"]) > 20  # more than an epoch, so that one had to end


def test_a_source_is_known_by_its_tokens_and_the_length_of_samples(shards: dict[str, str], tmp_path: Path) -> None:
    alone, config = prepared_blend({"a": 1.0}, shards, tmp_path)
    blended, other = prepared_blend({"b": 1.0, "a": 2.0}, shards, tmp_path)
    assert source_keys(alone, config, 7) == source_keys(blended, other, 7)[1:]
    assert source_keys(alone, config, 8) != source_keys(alone, config, 7)
    read = read_until(alone, config, 7, SEED, RUN_BEGIN, 12)
    longer = OrderBegin(samples=12, read=read)
    first = build_source(alone, config, 14, SEED, "train", longer).fetch(np.array([12]))
    fresh = build_source(alone, config, 14, SEED, "train").fetch(np.array([0]))
    np.testing.assert_array_equal(first, fresh)
