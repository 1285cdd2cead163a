"""Best-fit packing: the plan against a plain best-fit-decreasing, and the samples that are read by it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import blend, packed_source
from data.cache import SEAL
from data.config import DataConfig
from data.order import rank_indices, sample_windows
from data.order_begin import source_keys
from data.packed_source import PackedSource
from data.packing import best_fit, planned, waste
from data.prepare import prepare
from data.prepared import NO_TOKEN
from data.shard_writer import ShardWriter
from data.source import BlendedSource, build_source
from data.transformed import Transformed
from program.errors import UserError

SEED = 3


def plainly(lengths: list[int], capacity: int) -> list[list[tuple[int, int]]]:
    """(start, size) of the pieces of each sample: best-fit-decreasing, one piece after another over all samples."""
    pieces, at = [], 0
    for length in lengths:
        pieces += [(at + cut, min(capacity, length - cut)) for cut in range(0, length, capacity)]
        at += length
    samples, room, came = list[list[tuple[int, int]]](), list[int](), list[int]()
    for step, piece in enumerate(sorted(pieces, key=lambda one: (-one[1], one[0]))):
        fitting = [number for number in range(len(samples)) if room[number] >= piece[1]]
        if not fitting:
            samples.append([])
            room.append(capacity)
            came.append(step)
            fitting = [len(samples) - 1]
        best = min(fitting, key=lambda number: (room[number], came[number]))
        samples[best].append(piece)
        room[best] -= piece[1]
        came[best] = step
    return samples


def drawn(kind: str, draw: np.random.Generator) -> np.ndarray:
    count = int(draw.integers(1, 150))
    if kind == "equal":
        return np.full(count, draw.integers(1, 40))
    if kind == "ties":
        return draw.integers(1, 33, 100)
    if kind == "few":
        return draw.choice([0, 3, 5, 8, 32, 33, 64], count)
    return np.minimum(draw.lognormal(2.3, 1.2, count).astype(np.int64), 500)


@pytest.mark.parametrize("kind", ["equal", "few", "ties", "natural"])
@pytest.mark.parametrize("capacity", [2, 9, 32])
def test_a_plan_is_that_of_plain_best_fit_decreasing(kind: str, capacity: int) -> None:
    draw = np.random.default_rng(capacity)
    for _ in range(4):
        lengths = drawn(kind, draw)
        plan, expected = best_fit(lengths, capacity), plainly(lengths.tolist(), capacity)
        pieces = list(zip(plan.starts.tolist(), plan.sizes.tolist(), strict=True))
        firsts = plan.firsts.tolist()
        assert [pieces[begin:end] for begin, end in itertools.pairwise(firsts)] == expected
        covered = np.concatenate([np.arange(start, start + size) for start, size in pieces] or [np.empty(0)])
        assert sorted(covered.tolist()) == list(range(int(lengths.sum())))
        held = waste(lengths, capacity)
        assert (held.samples, held.cut) == (len(expected), int((lengths > capacity).sum()))
        assert held.padding == len(expected) * capacity - lengths.sum()
        assert held.documents == np.count_nonzero(lengths)


def shard(prefix: Path, seed: int, count: int = 60) -> list[np.ndarray]:
    """Documents with an id of their own each, so that each token says whose it is; none can fill a sample alone but
    some. 256 ends them."""
    draw = np.random.default_rng(seed)
    found = [draw.integers(0, 256, draw.integers(1, 40)) for _ in range(count)]
    with ShardWriter(prefix, 257) as writer:
        for document in found:
            writer.add(np.append(document, 256))
            writer.end_document()
    return found


def config_of(tmp_path: Path, **fields: Any) -> DataConfig:
    return DataConfig(
        **{"tokenizer": "byte", "cache_dir": str(tmp_path / "cache"), "packing": "best_fit", "split": "1,0,0", **fields}
    )


def opened(config: DataConfig, split: Any = "train", length: int = 16, **prepared: Any) -> Any:
    given = dataclasses.replace(prepare(config, lambda text: None), **prepared)
    return build_source(given, config, length, SEED, split)


def documents_of(row: np.ndarray) -> list[list[int]]:
    """What ends with 256 in a sample, and what does not end in it."""
    text = row[row != NO_TOKEN].tolist()
    assert row.tolist() == text + [NO_TOKEN] * (len(row) - len(text))  # padding is behind all
    ends = [0, *(at + 1 for at, token in enumerate(text) if token == 256), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(ends) if end > begin]


def test_each_token_comes_once_an_epoch_and_short_documents_whole(tmp_path: Path) -> None:
    written = [*shard(tmp_path / "a-1", 1), *shard(tmp_path / "a-2", 2)]
    source = opened(config_of(tmp_path, paths=(str(tmp_path / "a-1"), str(tmp_path / "a-2"))))
    assert isinstance(source, PackedSource)
    count, expected = source.samples_per_epoch, sorted([*map(int, one), 256] for one in written)
    assert source.sources(2 * count)["data"].epochs == 2.0
    orders = []
    for epoch in range(2):
        rows = source.fetch(np.arange(count) + epoch * count)
        assert rows.dtype == np.int32 and (rows == NO_TOKEN).sum() == source.waste.padding
        order = np.argsort(sample_windows(np.arange(count) + epoch * count, count, str(SEED)))
        orders.append(rows[order].tolist())
        pieces = [one for row in rows for one in documents_of(row)]
        assert all(pieces.count(one) >= expected.count(one) for one in expected if len(one) <= 17)
        assert sorted(itertools.chain(*pieces)) == sorted(itertools.chain(*expected))
        long = [one for one in expected if len(one) > 17]
        assert source.waste.cut == len(long) > 5
        for one in long:  # whole samples, and one rest that is not cut again
            cuts = [one[at : at + 17] for at in range(0, len(one), 17)]
            assert all(cut in pieces for cut in cuts)
    assert orders[0] == orders[1]  # the same samples, in another order


@pytest.mark.parametrize("layout", [(1, 1), (2, 4), (1, 8)])
def test_the_order_is_the_same_in_any_layout_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, int]
) -> None:
    monkeypatch.setattr(blend, "PERIOD", 64)  # the real one takes a second to deal
    for number in range(2):
        shard(tmp_path / str(number), number)
    config = config_of(tmp_path, blend={str(tmp_path / "0"): 0.5, str(tmp_path / "1"): 0.5})
    source = opened(config)
    assert isinstance(source, BlendedSource) and all(isinstance(one, PackedSource) for one in source.opened)
    expected = source.fetch(np.arange(8 * 16))
    micro, ranks = layout
    for start in range(0, 128, 16):
        again = opened(config) if start == 64 else source
        shares = [again.fetch(rank_indices(start, 16 // micro // ranks, micro, rank, ranks).ravel())
                  for rank in range(ranks)]  # fmt: skip
        by_rank = np.stack(shares).reshape(ranks, -1, micro, 17).swapaxes(0, 1).reshape(16, 17)
        np.testing.assert_array_equal(by_rank, expected[start : start + 16])


def test_the_plan_is_of_the_documents_that_train_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = shard(tmp_path / "a", 1)
    config = config_of(tmp_path, paths=(str(tmp_path / "a"),), split="1,1,0")
    source = opened(config)
    first = source.fetch(np.arange(source.samples_per_epoch))
    tokens = sorted(token for row in first for token in row.tolist() if token != NO_TOKEN)
    assert tokens == sorted(itertools.chain(*([*map(int, one), 256] for one in written[:30])))
    assert planned(config, 16) == {"data.paths": source.waste}
    assert not isinstance(opened(config, "validation"), PackedSource)  # losses compare, however text is packed
    monkeypatch.setattr(packed_source, "best_fit", None)  # not again
    np.testing.assert_array_equal(opened(config).fetch(np.arange(8)), first[:8])
    monkeypatch.undo()
    for fields in ({"split": "2,1,0"}, {"length": 8}):
        length = fields.pop("length", 16)
        assert opened(dataclasses.replace(config, **fields), length=length).waste != source.waste
    shard(tmp_path / "a", 2)
    assert opened(config).waste != source.waste


def test_a_plan_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    shard(tmp_path / "a", 1)
    config = config_of(tmp_path, paths=(str(tmp_path / "a"),))
    first = opened(config).fetch(np.arange(20))
    (folder,) = (one for one in (tmp_path / "cache/packing").iterdir() if one.is_dir())
    (folder / "starts").write_bytes(bytes((folder / "starts").stat().st_size))
    np.testing.assert_array_equal(opened(config).fetch(np.arange(20)), first)
    assert (folder / SEAL).exists()


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    """In a sample's second piece, and a negative one, which is no padding."""
    shard(tmp_path / "a", 1, 40)
    (tmp_path / "a.json").unlink(missing_ok=True)
    config, raw = config_of(tmp_path, paths=(str(tmp_path / "a"),)), np.fromfile(tmp_path / "a.bin", np.uint16)
    place = int(np.flatnonzero(raw == 256)[20]) - 1
    raw[place] = 300
    raw.tofile(tmp_path / "a.bin")
    source = opened(config)
    with pytest.raises(UserError, match=rf"a\.bin holds token id 300 at token {place} \(sample \d+\)"):
        source.fetch(np.arange(source.samples_per_epoch))


def test_another_packing_is_another_count_of_a_source(tmp_path: Path) -> None:
    shard(tmp_path / "a", 1)
    config = config_of(tmp_path, paths=(str(tmp_path / "a"),))
    given = prepare(config, lambda text: None)
    plain = dataclasses.replace(config, packing="concatenate")
    assert source_keys(given, config, 16) != source_keys(given, plain, 16)
    assert source_keys(given, plain, 16)[0].endswith("16 1,0,0")  # as checkpoints of earlier versions have it


def test_what_cannot_be_packed_is_refused() -> None:
    for fields in ({"stream": ("x.jsonl",)}, {"order": "megatron"}):
        (problem,) = DataConfig(packing="best_fit", **fields).problems()  # type: ignore[arg-type]
        assert 'data.packing = "best_fit"' in problem and "data.paths" in problem
    assert not DataConfig(packing="best_fit").problems()


def test_a_transformation_sees_packed_samples(tmp_path: Path) -> None:
    """What it masks has no loss, and what it returns is checked."""
    shard(tmp_path / "a", 1)
    config = config_of(tmp_path, paths=(str(tmp_path / "a"),), transform="mine:function")
    plain = opened(dataclasses.replace(config, transform=None)).fetch(np.arange(12))

    def function(tokens: np.ndarray, sample: int, rng: np.random.Generator) -> Any:
        return {
            5: lambda: tokens[:-1],
            6: lambda: tokens.astype(np.int64),
            7: lambda: np.where(tokens == tokens[3], 257, tokens).astype(np.int32),
            8: lambda: tokens.tolist(),
            9: lambda: tokens,
            10: lambda: (tokens.fill(7), tokens)[1],
        }.get(sample, lambda: np.where(rng.random(17) < 0.5, ~np.abs(tokens), tokens).astype(np.int32))()

    source = opened(config, transform=function)
    assert isinstance(source, Transformed)
    found = source.fetch(np.array([0, 1, 9, 10]))
    assert source.counted[-1] == {"transformed_samples": 3} and set(found[3].tolist()) == {7}
    for row, sample in zip(found, (0, 1, 9), strict=False):
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(SEED, spawn_key=(0, 0, sample))))
        np.testing.assert_array_equal(row, function(plain[sample], sample, draw))
    np.testing.assert_array_equal(source.fetch(np.array([1])), found[1:2])
    for sample, said in {
        5: "found int32 [16]", 6: "found int64 [17]", 7: "found 257 at token", 8: "found list",
    }.items():  # fmt: skip
        with pytest.raises(UserError) as caught:
            source.fetch(np.array([sample]))
        assert f'data.transform "mine:function": sample {sample}: expected' in str(caught.value)
        assert said in str(caught.value)
    assert not isinstance(opened(config, "train"), Transformed)  # a program that reads no training text loads nothing
