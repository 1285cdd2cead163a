"""Blends of streams and mixed documents: the samples that plain loops over numpy give, whoever reads them."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from campaign import some
from data import blend
from data.config import MOST_CURSORS, DataConfig
from data.order import permute, rank_indices
from data.order_begin import RUN_BEGIN, OrderBegin, read_until, source_keys, stream_keys
from data.prepare import prepare
from data.prepared import Prepared
from data.source import BlendedSource, build_part, build_source
from data.streaming import dealing, opening
from data.streaming.source import InterleavedStreams, StreamedSource
from data.streaming.stream import Cursor, documents
from data.streaming.turns import in_turn
from data.tokenizers.engines import BytesEngine
from program.errors import UserError
from training.batches import DEPTH
from training.checkpoint import stream_position

SEED = 3
SIZES = {"a": 260, "b": 140, "c": 90}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Three sources of documents that say whose they are, in units and batches as small as they."""
    monkeypatch.setattr(blend, "PERIOD", 64)
    monkeypatch.setattr(dealing, "SMALLEST_UNIT_BYTES", 1500)
    monkeypatch.setattr(opening, "BATCH_BYTES", 400)
    draw, found = random.Random(1), {}
    for name, count in SIZES.items():
        lines = (f'{{"text": "{name}{number} {"x" * draw.randrange(90)}"}}\n' for number in range(count))
        found[name] = str(tmp_path / f"{name}.jsonl")
        Path(found[name]).write_text("".join(lines))
    return found


@dataclass(frozen=True)
class Case:
    """A blend, and who reads it."""

    weights: dict[str, float]
    count: int
    shuffle: int
    seq_length: int

    def prepared(self, texts: dict[str, str], said: list[str] | None = None) -> tuple[Prepared, DataConfig]:
        named = {texts[name]: weight for name, weight in self.weights.items()}
        given = {"stream_blend": named} if len(named) > 1 else {"stream": tuple(named)}
        config = DataConfig(
            tokenizer="byte", split="1", stream_count=self.count, stream_shuffle=self.shuffle,
            cache_dir=str(Path(texts["a"]).parent / "cache"), **given,
        )  # fmt: skip
        return prepare(config, (said if said is not None else []).append), config

    def opened(self, prepared: Prepared, config: DataConfig, begin: OrderBegin = RUN_BEGIN) -> InterleavedStreams:
        source = build_source(prepared, config, self.seq_length, SEED, "train", begin)
        assert isinstance(source, InterleavedStreams)
        return source


def drawn(number: int) -> Case:
    draw = random.Random(number)
    names = draw.sample("abc", draw.choice((1, 2, 3, 3)))
    weights = {name: draw.choice((0.1, 1.0, 3.7, 10.0)) for name in names}
    return Case(weights, draw.choice((1, 3, 5, 8)), draw.choice((0, 1, 2, 7, 40, 1000)), draw.choice((16, 33)))


def tokens_of(source: StreamedSource, number: int, shuffle: int, order: str, least: int) -> np.ndarray:
    """Tokens of a stream over whole epochs: its documents group by group, each group permuted by its place."""
    found: list[np.ndarray] = []
    epoch = -1
    while sum(map(len, found)) <= least:
        epoch += 1
        plain = list(itertools.takewhile(lambda one: one[0].epoch == epoch,  # noqa: B023
                                         documents(source.shares[number], source.how, Cursor(epoch))))  # fmt: skip
        for start in range(0, len(plain), shuffle or 1):
            group = plain[start : start + (shuffle or 1)]
            at = group[0][0]
            key = f"triplane documents {order} {number} {epoch} {at.piece} {at.before + at.document}"
            found += [group[one][1] for one in permute(np.arange(len(group)), len(group), key)]
    return np.concatenate(found)


def expected_samples(
    case: Case, source: InterleavedStreams, orders: list[str], sequence: list[tuple[int, int, int]]
) -> np.ndarray:
    """Windows of (source, stream, number in it)."""
    length, most = case.seq_length, Counter[tuple[int, int]]()
    for name, stream, number in sequence:
        most[name, stream] = max(most[name, stream], number + 1)
    tokens = {
        one: tokens_of(source.opened[one[0]], one[1], case.shuffle, orders[one[0]], windows * length)
        for one, windows in most.items()
    }
    return np.stack([tokens[name, stream][at * length : at * length + length + 1] for name, stream, at in sequence])


def assigned(
    case: Case, units: tuple[int, ...], samples: int, read: Counter[tuple[int, int]], turn: int = 0
) -> list[tuple[int, int, int]]:
    """What each sample is, counted one by one; ``read`` counts on. turn: the stream that comes first."""
    table, found = blend.schedule(units).tolist(), []
    for number in range(samples):
        turns, stream = divmod(number + turn, case.count)
        source = table[(turns + stream) % len(table)]
        found.append((source, stream, read[source, stream]))
        read[source, stream] += 1
    return found


def units_of(prepared: Prepared) -> tuple[int, ...]:
    return (blend.PERIOD,) if prepared.blend is None else prepared.blend.units


@pytest.mark.parametrize("number", some(range(40), range(6)))
def test_samples_are_those_of_plain_loops_in_every_layout_and_from_every_position(
    number: int, texts: dict[str, str]
) -> None:
    case, draw = drawn(number), random.Random(number)
    prepared, config = case.prepared(texts)
    whole = case.opened(prepared, config)
    samples = 24 * 16
    orders = [str(SEED)] if prepared.blend is None else [f"{SEED} source {one}" for one in range(len(case.weights))]
    sequence = assigned(case, units_of(prepared), samples, Counter())
    expected = expected_samples(case, whole, orders, sequence)
    np.testing.assert_array_equal(whole.fetch(np.arange(samples)), expected)
    position: list[dict[int, str]] = [{} for _ in case.weights]
    consumed = 0
    while consumed < samples - 24 * DEPTH:
        micro, replicas = draw.choice(((1, 1), (2, 2), (3, 4), (4, 3), (1, 8), (6, 2)))
        iterations = draw.randrange(1, 4)
        ranks = [case.opened(prepared, config) for _ in range(replicas)]
        for source in ranks:
            source.resume(position)
        for iteration in range(iterations + DEPTH):  # as far ahead as a reader is
            start = consumed + 24 * iteration
            for rank, source in enumerate(ranks if start < samples else ()):
                indices = rank_indices(start, 24 // micro // replicas, micro, rank, replicas).ravel()
                np.testing.assert_array_equal(source.fetch(indices), expected[indices])
        consumed += 24 * iterations
        noted = [source.position(consumed) for source in ranks]
        position = [{} for _ in case.weights]
        for found in noted:
            for own, other in zip(position, found, strict=True):
                for stream, text in other.items():  # the farthest counts: of the same sample they say the same
                    here, there = (int(one.split()[0]) for one in (own.get(stream, text), text))
                    assert here != there or own.get(stream, text) == text
                    own[stream] = max(own.get(stream, text), text, key=lambda one: int(one.split()[0]))
        read = Counter((source, stream) for source, stream, _ in sequence[:consumed])
        assert {(source, stream) for source, own in enumerate(position) for stream in own} == read.keys()
        assert [one.samples for one in ranks[0].sources(consumed).values()] == [
            sum(count for (name, _), count in read.items() if name == source) for source in range(len(case.weights))
        ]


def test_each_source_goes_on_where_it_was_whatever_its_weight_and_the_length_of_samples(texts: dict[str, str]) -> None:
    plan = [({"a": 1.0}, 37, 16), ({"b": 3.0, "a": 1.0}, 90, 16), ({"c": 1.0, "a": 2.0}, 71, 33), ({"a": 1.0}, 45, 33),
            ({"a": 1.0}, 12, 48), ({"b": 1.0, "c": 5.0, "a": 1.0}, 80, 16), ({"b": 1.0}, 20, 100),
            ({"a": 1.0}, 30, 33)]  # fmt: skip
    orders, begin = {"a": str(SEED), "b": f"{SEED} source 0", "c": f"{SEED} source 0"}, RUN_BEGIN
    tokens = {name: np.zeros(5, np.int64) for name in SIZES}
    kept: dict[str, dict[int, str]] = {}
    for weights, samples, seq_length in plan:
        case = Case(weights, 5, 4, seq_length)
        prepared, config = case.prepared(texts)
        source, names = case.opened(prepared, config, begin), list(weights)
        keys = stream_keys(prepared, config, seq_length, SEED, begin)
        places = stream_position.found({"streams": {"cursors": kept}}, True, keys, 5)
        read = {name: -(-tokens[name] // seq_length) for name in names}  # a sample that was begun is not begun again
        assert [{stream: int(text.split()[0]) for stream, text in own.items()} for own in places] == [
            {stream: int(count) for stream, count in enumerate(read[name]) if count} for name in names
        ], "no stream is read from its beginning"
        source.resume(places)
        first = read[names[0]]
        in_turns = len(names) == 1 and (first == in_turn(first.sum(), 5)).all()
        turn = int(first.sum()) % 5 if in_turns else 0  # goes on with the stream whose turn it is
        counted = Counter({(one, stream): int(read[name][stream]) for one, name in enumerate(names)
                           for stream in range(5)})  # fmt: skip
        sequence = assigned(case, units_of(prepared), samples, counted, turn)
        end = begin.samples + samples
        expected = expected_samples(case, source, [orders[name] for name in names], sequence)
        np.testing.assert_array_equal(source.fetch(np.arange(begin.samples, end)), expected)
        own = [[counted[one, stream] for stream in range(5)] for one in range(len(names))]
        assert [one.samples for one in source.sources(end).values()] == [sum(one) for one in own]
        tokens |= {name: np.array(one) * seq_length for name, one in zip(names, own, strict=True)}
        kept.update((key, {str(number): text for number, text in found.items()})
                    for key, found in zip(keys, source.position(end), strict=True))  # fmt: skip
        begin = OrderBegin(samples=end, read=read_until(prepared, config, seq_length, SEED, begin, end))
        assert {one.streams for one in begin.read.values()} >= {()} or len(begin.read) > 1


def test_weights_hold_within_two_in_every_stream_and_batch(texts: dict[str, str]) -> None:
    case = Case({"a": 5.0, "b": 2.0, "c": 1.0}, 8, 0, 16)
    prepared, config = case.prepared(texts)
    shares = np.array(units_of(prepared)) / blend.PERIOD
    source = case.opened(prepared, config)
    sources = source.turns.assign(np.arange(8 * 100))[0].reshape(100, 8)
    hot = (sources[..., None] == np.arange(3)).astype(int)
    for by_stream in hot.swapaxes(0, 1):
        assert np.abs(by_stream.cumsum(0) - np.outer(np.arange(1, 101), shares)).max() < 2
    assert np.abs(hot.cumsum(1) - (np.arange(1, 9)[:, None] * shares)).max() < 2
    assert source.turns.ends(800).sum(1).tolist() == np.bincount(sources.ravel()).tolist()


def test_a_resume_tokenises_one_group_of_each_stream_again(
    texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case({"a": 1.0}, 2, 20, 16)
    prepared, config = case.prepared(texts)
    first = case.opened(prepared, config)
    expected = first.fetch(np.arange(322))
    position, tokenised = first.position(320), []
    plain = BytesEngine.encode_batch
    monkeypatch.setattr(
        BytesEngine, "encode_batch", lambda self, given: tokenised.append(len(given)) or plain(self, given)
    )
    second = case.opened(prepared, config)
    second.resume(position)
    np.testing.assert_array_equal(second.fetch(np.arange(320, 322)), expected[320:])
    assert sum(tokenised) <= 2 * (2 * 20 + 16)  # a window may end in the next group; 16 are tokenised at a time
    assert max(len(str(own).split()) for own in position[0].values()) == 9


def test_mixing_is_of_training_alone_and_of_neighbours(texts: dict[str, str]) -> None:
    plain, mixed = (replace(Case({"a": 1.0}, 2, 0, 16), shuffle=shuffle) for shuffle in (0, 8))
    orders = []
    for case in (plain, mixed):
        prepared, config = case.prepared(texts)
        config = replace(config, split="1,1")
        held = build_source(prepared, config, 16, SEED, "validation").fetch(np.arange(8))
        orders.append((case.opened(prepared, config).fetch(np.arange(8)), held, prepared.fingerprint))
    assert not np.array_equal(orders[0][0], orders[1][0])
    np.testing.assert_array_equal(orders[0][1], orders[1][1])
    assert orders[0][2] != orders[1][2]


def test_a_source_is_the_same_alone_and_in_a_blend(texts: dict[str, str]) -> None:
    alone, config = Case({"b": 1.0}, 4, 0, 16).prepared(texts)
    blended, other = Case({"a": 1.0, "b": 1.0}, 4, 0, 16).prepared(texts)
    assert source_keys(alone, config, 16) == source_keys(blended, other, 16)[1:]
    weighted, _ = Case({"a": 1.0, "b": 2.0}, 4, 0, 16).prepared(texts)
    assert source_keys(weighted, other, 16) == source_keys(blended, other, 16)
    assert weighted.fingerprint != blended.fingerprint
    config, other = (replace(one, split="1,1") for one in (config, other))
    held = build_source(blended, other, 16, SEED, "validation")
    assert isinstance(held, BlendedSource) and blended.blend is not None
    sources, numbers = blended.blend.assign(np.arange(20))
    for number, part in enumerate(held.opened):
        own = np.flatnonzero(sources == number)
        np.testing.assert_array_equal(held.fetch(own), part.fetch(numbers[own]))
        assert held.source_of(own).tolist() == [number] * len(own)
    by_itself = build_part(blended, other, 16, SEED, "validation", 1).fetch(np.arange(20))
    np.testing.assert_array_equal(by_itself, build_source(alone, config, 16, SEED, "validation").fetch(np.arange(20)))


def test_what_is_said_of_the_shares(texts: dict[str, str]) -> None:
    said: list[str] = []
    case = Case({"a": 3.0, "b": 1.0}, 2, 0, 16)
    case.opened(*case.prepared(texts, said)).fetch(np.arange(2000))
    assert any("0.7500000 of the samples" in line and texts["a"] in line for line in said)
    assert any(f"of 2 of {texts['b']} has gone through its share" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"stream": ("x",)}, "data.stream and data.stream_blend each say what to train on"),
        ({"stream_blend": {"a": 0.0}}, 'data.stream_blend: "a" = 0.0: expected a source and a weight above 0'),
        ({"order": "megatron"}, "orders the samples of shards, and data.stream_blend has none"),
        ({"require_manifest": True}, "manifests of shards, and data.stream_blend has none"),
        ({"stream_shuffle": -1}, "data.stream_shuffle = -1: expected 0 (as documents stand) or more"),
        ({"stream_count": 1 << 16, "stream_blend": {str(one): 1.0 for one in range(17)}}, f"at most {MOST_CURSORS:,}"),
    ],
)
def test_what_cannot_be_is_one_message(changes: dict, printed: str) -> None:
    [message] = replace(DataConfig(stream_blend={"a": 1.0, "b": 2.0}), **changes).problems()
    assert printed in message


def test_sources_that_cannot_be_are_named(texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    config = DataConfig(tokenizer="byte", stream_count=2, cache_dir=str(tmp_path / "cache"))
    for other, printed in (
        (str(tmp_path / "empty.jsonl"), r"^data.stream_blend: .*empty.jsonl holds no text"),
        (str(tmp_path / "none.jsonl"), r"^data.stream_blend: no file, folder or glob .*none.jsonl"),
        (str(tmp_path / "[a]*.jsonl"), r"^data.stream_blend: .*a.jsonl is named more than once"),
    ):
        with pytest.raises(UserError, match=printed):
            prepare(replace(config, stream_blend={texts["a"]: 1.0, other: 1.0}), lambda line: None)
