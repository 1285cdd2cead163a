"""Fill-in-the-middle, held against Megatron's own class, and what a sample's random numbers depend on."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data import blend, corpus
from data.config import DataConfig
from data.fim import Fim
from data.prepare import prepare
from data.prepared import NO_TOKEN
from data.shard_writer import ShardWriter
from data.source import build_source
from data.split import SPLITS
from data.tokenizers.base import ByteTokenizer
from data.tokenizers.tokenizer_json import JsonTokenizer
from data.transformed import Transformed
from program.errors import UserError

SPECIAL = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file>"]
FIM = DataConfig(fim_rate=0.7, fim_spm_rate=0.4)
SEED = 11


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator([path.read_text()[:3000] for path in corpus.files()[:10]], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> JsonTokenizer:
    return JsonTokenizer(tokenizer_path)


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Megatron's class, from its file alone: the package around it takes ten seconds to import."""
    from megatron.core import datasets

    path = Path(datasets.__path__[0]).parents[1] / "training/datasets/fim_dataset.py"
    spec = importlib.util.spec_from_file_location("fim_dataset", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPTFIMDataset


def theirs(megatron: Any, ours: JsonTokenizer, config: DataConfig, draw: np.random.RandomState) -> Any:
    """Megatron's dataset with a document that is asked for as a whole; ``sample`` is what it holds."""

    class Inner:
        def ids_to_text(self, ids: Any, remove_special_tokens: bool) -> str:
            assert remove_special_tokens
            return ours.decode(ids)

        def text_to_ids(self, text: str) -> list[int]:
            return ours.encode(text).tolist()

    class Documents:
        def get(self, document: int, offset: int, length: int) -> np.ndarray:
            return found.sample[offset : offset + length]

    found = megatron.__new__(megatron)
    found.config = type("Config", (), {"tokenizer": type("Outer", (), {"_tokenizer": Inner()})})
    found.dataset, found.document_index, found.shuffle_index = Documents(), [0], [0]
    found.np_rng, found.fim_rate, found.fim_spm_rate = draw, config.fim_rate, config.fim_spm_rate
    found.fragment_fim_rate, found.no_fim_prefix = config.fim_fragment_rate, config.fim_no_prefix
    found.fim_split_sample = None if config.fim_split_sample is None else ours.token_id(config.fim_split_sample)
    names = {"prefix_tok_id": 1, "middle_tok_id": 2, "suffix_tok_id": 3, "pad_tok_id": 4, "eod_tok_id": 0}
    vars(found).update({name: ours.token_id(SPECIAL[index]) for name, index in names.items()})
    return found


def samples(tokenizer: JsonTokenizer, count: int) -> list[np.ndarray]:
    """Documents of code, of a character that bytes may cut, of fragments, and empty ones, cut anywhere."""
    draw, texts = np.random.default_rng(3), [path.read_text() for path in corpus.files()[:8]]
    eod, mark, found = tokenizer.eod, tokenizer.token_id("<file>"), []
    for _ in range(count):
        tokens = list[int]()
        while len(tokens) < 160:
            at = int(draw.integers(0, 2000))
            text = texts[draw.integers(len(texts))][at : at + int(draw.integers(0, 90))] + "é👋" * int(draw.integers(2))
            tokens += [*tokenizer.encode(text).tolist(), draw.choice([eod, eod, mark, mark, eod])]
        cut = int(draw.integers(0, 30))
        found.append(np.array(tokens[cut : cut + 129], np.int32))
    return found


SWITCHES = {
    "psm": {"fim_rate": 1.0, "fim_spm_rate": 0.0},
    "spm": {"fim_rate": 1.0, "fim_spm_rate": 1.0},
    "some": {},
    "fragments": {"fim_split_sample": "<file>", "fim_fragment_rate": 0.6},
    "all fragments": {"fim_rate": 1.0, "fim_split_sample": "<file>", "fim_fragment_rate": 1.0},
    "prefix": {"fim_rate": 1.0, "fim_no_prefix": " "},
    "none": {"fim_rate": 1e-12},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_tokens_are_megatrons(megatron: Any, tokenizer: JsonTokenizer, switches: dict[str, Any]) -> None:
    config = dataclasses.replace(FIM, **switches)
    fim, lengths, counted = Fim(config, tokenizer), set[int](), 0
    for number, sample in enumerate(samples(tokenizer, 40)):
        dataset = theirs(megatron, tokenizer, config, np.random.RandomState(np.random.PCG64(number)))
        dataset.sample, dataset.sample_index = sample, [(0, 0), (0, len(sample) - 1)]
        expected, _, _ = dataset._query_document_sample_shuffle_indices(0)
        found, counts = fim(sample, number, np.random.PCG64(number))
        assert found.dtype == np.int32
        np.testing.assert_array_equal(np.where(found < 0, ~found, found), expected)
        padding = expected == dataset.pad_tok_id
        np.testing.assert_array_equal(found < 0, padding)  # and nothing else is without a loss
        lengths.add(int(padding.sum()))
        counted += counts["fim_documents"]
        assert counts["fim_samples"] == (counts["fim_documents"] > 0)
        if config.fim_rate == 1.0 and "fim_no_prefix" not in switches and "fim_split_sample" not in switches:
            assert (expected == dataset.prefix_tok_id).any() and counts["fim_samples"]
    assert len(lengths) > 1 or "fim_split_sample" in switches  # some become shorter
    assert (counted > 0) == (config.fim_rate > 1e-9)


def test_padding_is_no_document_and_room_for_the_control_tokens(tokenizer: JsonTokenizer) -> None:
    fim = Fim(dataclasses.replace(FIM, fim_rate=1.0), tokenizer)
    text = tokenizer.encode("alpha beta")
    sample = np.full(40, NO_TOKEN, np.int32)
    sample[: len(text) + 1] = [*text, tokenizer.eod]
    found, counts = fim(sample, 0, np.random.PCG64(0))
    held = found[found >= 0]
    assert held[-1] == tokenizer.eod and sorted(found[found < 0]) == [~4] * (40 - len(held))
    assert counts["fim_documents"] == 1 and set(held[held < 6].tolist()) == {0, 1, 2, 3}
    assert sorted(tokenizer.decode(held)) == sorted("alpha beta")


def test_what_a_token_without_a_loss_is_read_as(tokenizer: JsonTokenizer) -> None:
    """data.transform may mask; a document that is permuted is predicted whole, another one keeps its mask."""
    text = np.array([*tokenizer.encode("alpha beta gamma"), tokenizer.eod], np.int32)
    masked = np.where(np.arange(len(text)) == 1, ~text, text)
    for rate in (1.0, 1e-12):
        fim = Fim(dataclasses.replace(FIM, fim_rate=rate), tokenizer)
        plain, under = (fim(one, 0, np.random.PCG64(5))[0] for one in (text, masked))
        np.testing.assert_array_equal(np.where(under < 0, ~under, under), np.where(plain < 0, ~plain, plain))
        assert int((under < 0).sum() - (plain < 0).sum()) == (0 if rate == 1.0 else 1)


def test_a_token_that_the_vocabulary_lacks_is_named(tokenizer: JsonTokenizer) -> None:
    config = dataclasses.replace(FIM, fim_suffix_token="<suffix>")
    with pytest.raises(UserError) as caught:
        Fim(config, tokenizer)
    for part in ('data.fim_suffix_token = "<suffix>"', "data.fim_rate = 0.7", "<fim_suffix>"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match=r"data\.fim_prefix_token.*control tokens: none"):
        Fim(FIM, ByteTokenizer())


def test_what_cannot_be_is_said_by_the_section() -> None:
    given = {"fim_rate": 1.5, "fim_spm_rate": -0.1, "fim_fragment_rate": 0.5}
    problems = DataConfig(**given).problems()
    assert [one.split(" ")[0] for one in problems] == ["data.fim_rate", "data.fim_spm_rate"]
    (problem,) = DataConfig(fim_split_sample="<file>").problems()
    assert "data.fim_split_sample needs data.fim_fragment_rate" in problem and not FIM.problems()


@pytest.fixture(params=["shards", "blend", "megatron", "stream"])
def opened(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tokenizer_path: Path,
    tokenizer: JsonTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Opens a split of each way of reading, with these fields of the data section."""
    monkeypatch.setattr(blend, "PERIOD", 64)  # the real one takes a second to deal
    texts = [f"{path.read_text()[:700]}" for path in corpus.files()[:30]]
    names = ("a", "b")
    for name in names:
        with ShardWriter(tmp_path / name, tokenizer.vocab_size) as writer:
            for text in texts:
                writer.add(np.array([*tokenizer.encode(name + text), tokenizer.eod]))
                writer.end_document()
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts * 4))
    given: dict[str, Any] = {
        "shards": {"paths": (str(tmp_path / "a"),)},
        "blend": {"blend": {str(tmp_path / "a"): 0.75, str(tmp_path / "b"): 0.25}},
        "megatron": {"paths": (str(tmp_path / "a"),), "order": "megatron"},
        "stream": {"stream": (str(tmp_path / "lines.jsonl"),), "stream_count": 4},
    }[request.param]

    def open_split(split: Any = "train", **fields: Any) -> Any:
        config = DataConfig(tokenizer=str(tokenizer_path), cache_dir=str(tmp_path / "cache"), split="7,3",
                            **given, **fields)  # fmt: skip
        prepared = prepare(config, lambda text: None)
        if request.param == "megatron":
            from data.megatron_order import SamplePlan, open_splits

            plan = SamplePlan(train=48, validation=16, test=0)
            splits = open_splits(prepared, config, 64, SEED, plan, lambda text: None)
            prepared = dataclasses.replace(prepared, splits=splits)
        return build_source(prepared, config, 64, SEED, split)

    return open_split


def test_every_way_of_reading_is_permuted_alike_whoever_asks(opened: Any, tokenizer: JsonTokenizer) -> None:
    for split in ("train", "validation"):
        samples = np.arange(16)
        plain, changed = opened(split).fetch(samples), opened(split, fim_rate=0.7, fim_spm_rate=0.4)
        assert isinstance(changed, Transformed)
        found, fim = changed.fetch(samples), Fim(FIM, tokenizer)
        for sample in samples.tolist():
            seeds = np.random.SeedSequence(SEED, spawn_key=(SPLITS.index(split), 1, sample))
            expected, _ = fim(plain[sample], sample, np.random.PCG64(seeds))
            np.testing.assert_array_equal(found[sample], expected)
        assert (found != plain).any(axis=1).sum() >= 8
        again = opened(split, fim_rate=0.7, fim_spm_rate=0.4)
        mixed = np.random.default_rng(0).permutation(samples)
        np.testing.assert_array_equal(np.concatenate([again.fetch(mixed[:5]), again.fetch(mixed[5:])]), found[mixed])
        counted = [one["fim_samples"] for one in again.counted]
        assert len(counted) == 2 and sum(counted) == changed.counted[0]["fim_samples"] > 0
    assert hasattr(changed, "source_of") == hasattr(opened("train"), "source_of")
