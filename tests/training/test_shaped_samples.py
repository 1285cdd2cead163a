"""Packed, transformed and permuted samples through the whole program: their loss, their metrics, and a resume."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional

from data import blend, corpus
from data.config import DataConfig
from data.full_pass import FullPass
from data.loader import Packing, to_batch
from data.prepare import prepare as prepare_data
from data.prepared import NO_TOKEN
from data.shard_writer import ShardWriter
from data.source import build_source
from data.token_source import TokenSource
from data.tokenizers.tokenizer_json import JsonTokenizer
from data.transformed import unchanged
from models.config import ModelConfig
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from program.errors import SharedMistake
from ranks import run_ranks
from runs import ROOT, configuration, losses, train, train_or_fail
from training.cli.dry_run import describe
from training.evaluation.validation_sets import OpenSet, validation_sets
from training.start.prepare import prepare

# ---- the loss of a packed sample


def written(prefix: Path) -> None:
    draw = np.random.default_rng(1)
    with ShardWriter(prefix, 257) as writer:
        for length in [*draw.integers(1, 60, 40).tolist(), 150]:
            writer.add(np.append(draw.integers(0, 256, length), 256))
            writer.end_document()


def _alone(identity: Identity, windows: np.ndarray) -> None:
    """Mean over the tokens of all documents, each computed by itself with torch's cross entropy."""
    from models import gpt
    from models.layers.documents import Documents
    from parallel import groups

    with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
        model = ModelConfig(shape="debug", seq_length=64)
        given = gpt.Blueprint(model=model, shape=resolve(model, 257), precision=PrecisionConfig(dtype="fp32"))
        (chunk,) = gpt.build(given, ranks)
        chunk.eval()
        packing = Packing(eod=256, reset_attention=True, reset_positions=True, eod_mask_loss=True, masked=True)
        batch = to_batch(torch.from_numpy(windows), ranks.device, packing)
        with torch.no_grad():
            documents = Documents(batch.starts, batch.position_ids)
            each = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=documents)
            alone = list[torch.Tensor]()
            for row in windows:
                text = row[row != NO_TOKEN]
                for document in np.split(text, np.flatnonzero(text[:-1] == 256) + 1):
                    tokens = torch.from_numpy(document[None]).long()
                    if len(document) > 1:
                        logits = chunk(tokens[:, :-1], torch.arange(len(document) - 1)[None], None)[0, :, :257]
                        alone.append(functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
        expected = torch.cat(alone)
        assert batch.loss_mask.sum() == len(expected) < batch.loss_mask.numel()
        mean = (each * batch.loss_mask).sum() / batch.loss_mask.sum()
        torch.testing.assert_close(mean, expected.mean(), rtol=1e-5, atol=0)


def test_a_packed_samples_loss_is_that_of_its_documents_alone(tmp_path: Path) -> None:
    written(tmp_path / "a")
    config = DataConfig(paths=(str(tmp_path / "a"),), packing="best_fit", tokenizer="byte", split="1",
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
    source = build_source(prepare_data(config, lambda text: None), config, 64, 1, "train")
    windows = source.fetch(np.arange(source.samples_per_epoch))  # type: ignore[attr-defined]
    padded = np.flatnonzero((windows == NO_TOKEN).any(axis=1))
    assert padded.size and len(windows) > 10
    run_ranks(1, _alone, windows[[*padded[:2], *range(4)]])


# ---- whole runs

MODULE = """

def wrong(tokens, sample):
    return tokens

def raises(tokens, sample, rng):
    raise ZeroDivisionError("mine")
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two shards, their tokenizer and a module, with the page's example."""
    folder, special = (
        tmp_path_factory.mktemp("texts"),
        ["<eos>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<pad>"],
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    given = Tokenizer(models.BPE({text: number for number, text in enumerate(special + letters)}, []))
    given.add_special_tokens(special)
    given.pre_tokenizer, given.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    given.save(str(folder / "tokenizer.json"))
    tokenizer, draw = JsonTokenizer(folder / "tokenizer.json"), np.random.default_rng(2)
    pieces = [path.read_text()[: int(draw.integers(5, 150))] for path in corpus.files()[:160]]
    for name, part in {"a": pieces[:100], "b": pieces[100:]}.items():
        with ShardWriter(folder / name, tokenizer.vocab_size) as writer:
            for text in part:
                writer.add(np.append(tokenizer.encode(text), tokenizer.eod))
                writer.end_document()
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/data.md").read_text(), re.DOTALL | re.MULTILINE)
    (folder / "shaped_samples.py").write_text(example + MODULE)
    return folder


@pytest.fixture
def flags(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Of all three at once, on a blend."""
    monkeypatch.syspath_prepend(str(texts))
    monkeypatch.setattr(blend, "PERIOD", 64)  # the real one takes a second to deal
    return (
        "--data.blend", str(texts / "a"), "0.7", str(texts / "b"), "0.3",
        "--data.tokenizer", str(texts / "tokenizer.json"), "--data.cache_dir", str(tmp_path / "cache"),
        "--data.packing", "best_fit", "--data.transform", "shaped_samples:masked",
        "--data.fim_rate", "0.5", "--data.fim_pad_token", "<pad>", "--data.reset_attention_mask",
        "--train.train_iters", "4", "--train.eval_interval", "None", "--log.report", "False",
        "--precision.dtype", "fp32",
    )  # fmt: skip


COUNTS = ("fim_documents", "fim_samples", "transformed_samples", "masked", "batch_size")


@pytest.mark.campaign  # what samples are: tests/data
def test_a_run_resumed_in_another_layout_equals_the_undisturbed_one(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    every = (*flags, "--log.log_interval", "1")
    config = configuration(tmp_path / "whole", *every)
    prepared = prepare(config, None)
    said = capsys.readouterr().out
    assert said.count("data: best-fit packing of ") == 2 and "% padding" in said
    whole = train(prepared, config, 1)
    begun = configuration(tmp_path / "run", *every, "--train.exit_interval", "2", "--train.micro_batch_size", "1")
    train(prepared, begun, 2)
    other = (*every, "--parallel.tensor_model_parallel_size", "2", "--parallel.pipeline_model_parallel_size", "2")
    resumed = train(prepared, configuration(tmp_path / "run", *other), 4)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    for one, expected in zip(resumed, whole, strict=True):
        assert {name: one[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
        assert 0 < expected["masked"] < 0.5 and 0 < expected["fim_samples"] <= expected["batch_size"]
        assert expected["fim_documents"] > expected["fim_samples"]
        assert expected["transformed_samples"] == expected["batch_size"] / 2
    changed = configuration(tmp_path / "run", *every, "--train.train_iters", "5", "--data.fim_rate", "0.25",
                            "--data.packing", "concatenate", "--data.transform", "None")  # fmt: skip
    code, failure = train_or_fail(prepare(changed, None), changed, 1)
    assert code == 2 and failure is not None
    for line in ("fim is fim_rate 0.25", "packing is concatenate (was: best_fit)", "transform is none (was: shaped_"):
        assert line in failure.text


def test_a_transformation_that_cannot_be_used_is_named(tmp_path: Path, flags: tuple[str, ...]) -> None:
    given = configuration(tmp_path / "run", *flags, "--data.transform", "shaped_samples:wrong")
    for tried in (lambda: prepare(given, None), lambda: describe(given)):
        with pytest.raises(
            SharedMistake, match=r'data\.transform "shaped_samples:wrong": expected \(tokens, sample, rng'
        ):
            tried()
    raising = configuration(tmp_path / "run", *flags, "--data.transform", "shaped_samples:raises")
    code, failure = train_or_fail(prepare(raising, None), raising, 1)
    assert code == 1 and failure is not None
    assert "ZeroDivisionError: mine" in failure.text
    assert failure.notes == "raised by your transformation shaped_samples:raises (data.transform)"
    assert raising.import_paths == ["shaped_samples:raises"]
    (problem,) = (one for one in configuration(tmp_path / "run", "--data.transform", "no path").problems(1))
    assert 'data.transform: expected "module:attribute"' in problem


def test_what_losses_are_measured_on(tmp_path: Path, flags: tuple[str, ...], texts: Path) -> None:
    """The validation split is permuted as Megatron's, and as each source of it; other sets and full passes are not."""
    flags = (
        *flags,
        "--data.split",
        "1,1",
        "--train.eval_interval",
        "2",
        "--eval.validation_sets",
        "held",
        f"{texts}/a",
    )
    config = configuration(tmp_path / "run", *flags)
    prepared = prepare(config, None)
    own, held = map(OpenSet.of, validation_sets(prepared, config))
    assert own.metrics == ("validation_loss", *(f"validation_loss/{texts}/{name}" for name in "ab"))
    assert own.rows_of(np.arange(4)).tolist() == [1, 1, 2, 1]
    control = {1, 2, 3}
    rows, plain = own.samples.fetch(np.arange(8)), unchanged(own.samples).fetch(np.arange(8))
    assert control <= {*rows.ravel().tolist()} and not control & {*plain.ravel().tolist()}
    assert (rows >= 0).sum() > 0.95 * rows.size  # neither packed nor masked
    assert type(held.samples) is TokenSource
    full = configuration(tmp_path / "run", *flags, "--eval.full_pass")
    assert all(isinstance(one.open_samples(), FullPass) for one in validation_sets(prepared, full))


def test_a_dry_run_says_what_packing_costs(tmp_path: Path, flags: tuple[str, ...], texts: Path) -> None:
    said: Any = describe(configuration(tmp_path / "run", *flags))
    assert f"best-fit packing of {texts}/a: 96 documents" in said.replace("\n#     ", " ")
    assert not (tmp_path / "cache").exists()  # nothing is written
    missing = configuration(tmp_path / "run", *flags[:1], str(texts / "lost"), "1", *flags[5:])
    assert "best-fit" not in describe(missing)
