"""A full pass predicts every token but each source's first one, once."""

import numpy as np
import pytest

from data.blend import Blend, rounded, schedule
from data.config import DataConfig
from data.full_pass import NO_TOKEN, FullPass
from data.prepared import Prepared, PreparedSource
from data.shard_writer import ShardWriter
from data.shards import Shard
from data.source import build_source
from data.tokenizers.base import ByteTokenizer
from program.errors import UserError

ALL = DataConfig(split="1,0,0")


def shard(folder, name, tokens):
    with ShardWriter(folder / name, 100_000) as writer:
        writer.add(np.array(tokens))
        writer.end_document()
    return Shard(folder / name)


def predicted(rows):
    """What the rows predict, one after another."""
    return [token for row in rows for token in row[1:].tolist() if token != NO_TOKEN]


@pytest.mark.parametrize("size", [11, 12, 20, 21, 22, 101])
def test_each_token_is_predicted_once(tmp_path, size):
    text = np.arange(size) % 257
    given = Prepared(tokenizer=ByteTokenizer(), shards=(shard(tmp_path, "a", text),), fingerprint="")
    whole = FullPass(build_source(given, ALL, 10, 7, "train"))
    assert whole.count == -(-(size - 1) // 10)
    assert predicted(whole.fetch(np.arange(whole.count))) == text[1:].tolist()
    assert predicted(whole.fetch(np.array([whole.count - 1]))) == text[10 * (whole.count - 1) + 1 :].tolist()
    assert whole.fetch(np.array([], np.int64)).shape == (0, 11)


def test_sources_follow_one_another(tmp_path):
    texts = [np.arange(25) % 257, 100 + np.arange(33)]
    shards = [shard(tmp_path, str(number), text) for number, text in enumerate(texts)]
    units = rounded([3.0, 1.0])
    sources = [
        PreparedSource(name=f"source {number}", shards=(one,), units=units[number], fingerprint="", tokens=0)
        for number, one in enumerate(shards)
    ]
    blend = Blend(units, schedule(units), np.zeros(1, np.int32))
    given = Prepared(
        tokenizer=ByteTokenizer(), shards=tuple(shards), fingerprint="", sources=tuple(sources), blend=blend
    )
    whole = FullPass(build_source(given, ALL, 10, 7, "train"))
    order = np.array([4, 0, 6, 3, 1, 2, 5])
    assert whole.source_of(order).tolist() == [1, 0, 1, 1, 0, 0, 1] and whole.count == 7
    rows = whole.fetch(order)
    assert predicted(rows[np.argsort(order)]) == [*texts[0][1:].tolist(), *texts[1][1:].tolist()]


def test_an_id_beyond_the_vocabulary_is_found_behind_the_last_window(tmp_path):
    text = [*range(22), 300]
    given = Prepared(tokenizer=ByteTokenizer(), shards=(shard(tmp_path, "a", text),), fingerprint="")
    whole = FullPass(build_source(given, ALL, 10, 7, "train"))
    with pytest.raises(UserError, match=r"token id 300 at token 22 .*257 ids"):
        whole.fetch(np.array([2]))
