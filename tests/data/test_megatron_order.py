"""megatron-core's own order: its samples, its plan, and what its cache gets wrong."""

import numpy as np
import pytest

from data import shards
from data.cache import SEAL
from data.config import DataConfig
from data.megatron_order import SamplePlan, open_splits
from data.prepare import prepare
from data.shard_writer import ShardWriter
from program.errors import UserError
from training.config.run_config import RunConfig
from training.config.schedules import batch_schedule
from training.config.train_config import TrainConfig
from training.start.prepare import with_megatrons_order

PLAN = SamplePlan(train=60, validation=8, test=0)


def shard(prefix, seed, documents=200):
    draw = np.random.default_rng(seed)
    with ShardWriter(prefix, 257) as writer:
        for _ in range(documents):
            writer.add(draw.integers(0, 256, draw.integers(5, 60)))
            writer.end_document()
    return str(prefix)


def opened(tmp_path, plan=PLAN, **fields):
    config = DataConfig(tokenizer="byte", cache_dir=str(tmp_path / "cache"), split="8,1,1", **fields)
    return open_splits(prepare(config, lambda line: None), config, 32, 5, plan, lambda line: None)


def theirs(tmp_path, blend, plan=PLAN):
    """megatron-core as Megatron-LM calls it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 257, 256, -1, {"any": 1}

    config = GPTDatasetConfig(
        random_seed=5, sequence_length=32, blend=blend, split="8,1,1", tokenizer=Tokenizer(),
        path_to_cache=str(tmp_path / "theirs"), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    sizes = [plan.train, plan.validation, 8]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@pytest.mark.parametrize("is_blend", [False, True])
def test_samples_are_megatrons_of_every_split(tmp_path, is_blend):
    """0.7 is no multiple of 2^-20, to which our own order rounds it."""
    paths = [shard(tmp_path / "a", 1), shard(tmp_path / "b", 2)]
    if is_blend:
        ours, expected = opened(tmp_path, blend=dict(zip(paths, (0.7, 0.3), strict=True))), (paths, [0.7, 0.3])
    else:
        ours, expected = opened(tmp_path, paths=(paths[0],)), (paths[:1], None)
    for (name, source), dataset in zip(ours.items(), theirs(tmp_path, expected)[:2], strict=True):
        tokens = source.fetch(np.arange(len(dataset)))
        for index in range(len(dataset)):
            item = dataset[index]
            assert tokens[index, :-1].tolist() == item["tokens"].tolist(), name
            assert tokens[index, 1:].tolist() == item["labels"].tolist(), name


def test_a_shard_made_again_under_its_name_is_not_read_by_an_old_cache(tmp_path):
    path = shard(tmp_path / "a", 1)
    opened(tmp_path, paths=(path,))
    shard(tmp_path / "a", 2, documents=150)
    again = opened(tmp_path, paths=(path,))["train"].fetch(np.arange(60))
    expected = theirs(tmp_path, ([path], None))[0]
    assert [row[:-1].tolist() for row in again] == [expected[index]["tokens"].tolist() for index in range(60)]


def test_a_change_in_the_middle_of_a_large_shard_is_not_read_by_an_old_cache(tmp_path):
    """Without a manifest a fingerprint is of the files' ends alone: what tells is when they were written."""
    lengths = np.random.default_rng(1).integers(5, 30, 30_000)
    prefix = tmp_path / "a"

    def write():
        with ShardWriter(prefix, 257) as writer:
            for length in lengths.tolist():
                writer.add(np.arange(length))
                writer.end_document()

    write()
    before, first = shards.Shard(prefix).fingerprint(), opened(tmp_path, paths=(str(prefix),))["train"]
    lengths[18_000:20_000] = lengths[18_000:20_000][::-1].copy()
    write()
    assert shards.Shard(prefix).fingerprint() == before
    assert first.fetch(np.arange(60)).shape == (60, 33)
    again = opened(tmp_path, paths=(str(prefix),))["train"].fetch(np.arange(60))
    expected = theirs(tmp_path, ([str(prefix)], None))[0]
    assert [row[:-1].tolist() for row in again] == [expected[index]["tokens"].tolist() for index in range(60)]


@pytest.mark.parametrize("wrong", [257, 65535])
def test_an_id_beyond_the_vocabulary_is_refused_on_every_batch(tmp_path, wrong):
    path = shard(tmp_path / "a", 1)
    tokens = np.fromfile(f"{path}.bin", np.uint16)
    tokens[1000] = wrong
    tokens.tofile(f"{path}.bin")
    source = opened(tmp_path, paths=(path,))["train"]
    refused = 0
    for index in range(len(source.dataset)):
        item = source.dataset[index]
        if wrong in item["tokens"] or wrong == item["labels"][-1]:
            with pytest.raises(UserError, match=rf"token id {wrong} in samples \[{index}\]; the vocabulary has 257"):
                source.fetch(np.array([index]))
            refused += 1
        else:
            source.fetch(np.array([index]))
    assert refused


@pytest.mark.parametrize(
    "field, entry, message",
    [
        ("q", 100, r"sequence 100 of \d+ tokens at byte \d+ of the \.bin, expected byte \d+"),
        ("i", 100, r"sequence 101 of \d+ tokens at byte \d+ of the \.bin, expected byte \d+"),
        ("document", 100, r"documents 99 to 10[01] at sequences \[99, 228"),
    ],
    ids=["pointer", "length", "document"],
)
@pytest.mark.parametrize("stretch", [7, 100, 1 << 20])
def test_a_damaged_index_is_refused_when_the_cache_is_made(tmp_path, monkeypatch, field, entry, message, stretch):
    """One bit in the middle, which no start looks at: megatron-core would train on other tokens without a word."""
    monkeypatch.setattr(shards, "STRETCH", stretch)
    path = shard(tmp_path / "a", 1)
    opened(tmp_path, paths=(path,))
    index = bytearray((tmp_path / "a.idx").read_bytes())
    header, count = shards.HEADER.size, 200
    place = {"i": header + 4 * entry, "q": header + 4 * count + 8 * entry, "document": header + 12 * count + 8 * entry}
    index[place[field]] ^= 128 if field == "document" else 2
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(UserError, match=rf"a\.idx has {message}.*damaged"):
        opened(tmp_path, paths=(path,))


def test_the_index_is_read_once_a_cache(tmp_path, monkeypatch):
    path, read = shard(tmp_path / "a", 1), []
    monkeypatch.setattr(shards.Shard, "check_index", lambda one: read.append(one.prefix))
    for _ in range(2):
        opened(tmp_path, paths=(path,))
    assert len(read) == 1


def test_samples_beyond_the_plan_are_refused(tmp_path):
    source = opened(tmp_path, paths=(shard(tmp_path / "a", 1),))["train"]
    with pytest.raises(UserError, match=r"beyond the \d+ of the plan"):
        source.fetch(np.array([len(source.dataset)]))


def test_the_plan_counts_as_megatron_does():
    assert SamplePlan.from_schedule(790, 100, 8, 30, 5) == SamplePlan(train=790, validation=160, test=0)
    assert SamplePlan.from_schedule(800, 100, 8, None, 5) == SamplePlan(train=800, validation=0, test=0)


@pytest.mark.parametrize(
    "data, ramp, samples",
    [({}, None, 800), ({}, (2, 2, 60), 712), ({"megatron_train_samples": 805}, None, 805)],
    ids=["iterations", "ramp", "samples"],
)
def test_the_plan_of_a_run_is_of_all_its_samples(tmp_path, data, ramp, samples):
    """With a ramp, fewer than iterations times the full batch: here 10 iterations of 2, 5 of 4, 4 of 6, 81 of 8."""
    config = RunConfig(
        train=TrainConfig(train_iters=100, global_batch_size=8, rampup_batch_size=ramp),
        data=DataConfig(tokenizer="byte", paths=(shard(tmp_path / "a", 1),), order="megatron", split="8,1,1",
                        cache_dir=str(tmp_path / "cache"), **data),
    )  # fmt: skip
    prepared = prepare(config.data, lambda line: None)
    assert with_megatrons_order(prepared, config).plan == {"megatron_train_samples": samples}
    assert data or samples == batch_schedule(config.train, config.model.seq_length).consumed_after(100)


def test_fewer_samples_than_the_run_takes_are_refused_at_the_start(tmp_path):
    paths = (shard(tmp_path / "a", 1), shard(tmp_path / "b", 2))
    with pytest.raises(UserError, match=r"2 shards without weights are gone through once, which gives \d+ samples"):
        opened(tmp_path, SamplePlan(train=5000, validation=0, test=0), paths=paths)
    config = RunConfig(
        train=TrainConfig(train_iters=100, global_batch_size=8),
        data=DataConfig(tokenizer="byte", paths=paths[:1], order="megatron", megatron_train_samples=799),
    )
    with pytest.raises(UserError, match="fewer than the 800 that 100 iterations take"):
        with_megatrons_order(prepare(config.data, lambda line: None), config)


def test_a_source_of_several_shards_is_refused(tmp_path):
    shard(tmp_path / "a-1", 1)
    shard(tmp_path / "a-2", 2)
    with pytest.raises(UserError, match="has 2 shards"):
        opened(tmp_path, blend={f"{tmp_path}/a-*": 1.0, shard(tmp_path / "b", 3): 1.0})


def test_a_split_without_documents_is_refused_instead_of_searched_forever(tmp_path):
    with pytest.raises(UserError, match="no document in the validation split"):
        opened(tmp_path, paths=(shard(tmp_path / "a", 1, documents=2),))


@pytest.mark.parametrize("damage", ["shorter", "lost", "other bytes", "unsealed"])
def test_a_cache_that_is_not_whole_is_made_again_as_one(tmp_path, damage):
    """megatron-core would end in numpy for the first, and make the second in place, in every process at once."""
    path = shard(tmp_path / "a", 1)
    expected = opened(tmp_path, paths=(path,))["train"].fetch(np.arange(60))
    (folder,) = (one for one in (tmp_path / "cache" / "megatron").iterdir() if one.is_dir())
    file = next(folder.glob("*shuffle_index.npy"))
    before, made = file.read_bytes(), folder.stat().st_ino
    if damage == "shorter":
        file.write_bytes(before[:-8])
    elif damage == "other bytes":
        file.write_bytes(before[:-8] + bytes(8))
    elif damage == "lost":
        file.unlink()
    else:
        (folder / SEAL).unlink()
    again = opened(tmp_path, paths=(path,))["train"].fetch(np.arange(60))
    assert again.tolist() == expected.tolist()
    assert file.read_bytes() == before
    assert folder.stat().st_ino != made
    made = folder.stat().st_ino
    opened(tmp_path, paths=(path,))
    assert folder.stat().st_ino == made
