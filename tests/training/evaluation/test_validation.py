"""Validation losses of several sets and sources: the same in every layout, and those of the text by itself."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runs
from data.loader import Packing
from data.prepared import Prepared
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from program.errors import UserError
from ranks import run_ranks
from training.config.run_config import RunConfig
from training.evaluation.validation import Validation
from training.evaluation.validation_sets import validation_sets
from training.parts.model import build_parts
from training.progress import Progress
from training.start.prepare import prepare

EVALUATED = "--train.eval_interval 2 --train.eval_iters 2 --train.train_iters 2 --train.global_batch_size 8"
STAGES = "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2"


def text(path: Path, seed: int, documents: int) -> str:
    draw = random.Random(seed)
    lines = ("".join(draw.choices("abcdefgh \n", k=draw.randrange(20, 90))) for _ in range(documents))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("texts")
    sizes = {"web": 150, "code": 100, "held": 40, "small": 3}
    return {name: text(folder / f"{name}.jsonl", seed, size) for seed, (name, size) in enumerate(sizes.items())}


def flags(texts: dict[str, str]) -> list[str]:
    blend = ["--data.blend", texts["web"], "3", texts["code"], "1", "--data.split", "8,2"]
    sets = ["--eval.validation_sets", "held", texts["held"], "small", texts["small"]]
    return [*blend, *sets, *EVALUATED.split()]


def measured(identity: Identity, config: RunConfig, prepared: Prepared, found: Path) -> None:
    """Rank 0 writes what an untrained model's figures are, and on one rank what plain windows give."""
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    layout = config.layout(identity.world_size)
    with groups.start(layout, identity, device="cpu", seed=1, parallel=config.parallel) as ranks:
        chunks = build_parts(config, shape, ranks).chunks
        packing = Packing.from_config(config.data, prepared.tokenizer.eod)
        sets = validation_sets(prepared, config)
        figures, whole = Validation(config.train, chunks, ranks, sets, lambda *_: None, packing)._measure(Progress())
        assert whole and all(chunk.training for chunk in chunks)
        if identity.world_size == 1:
            held = {name: np.concatenate([shard.tokens for shard in one.shards]) for name, one in
                    prepared.validation_sets.items()}  # fmt: skip
            figures |= {f"plain/{name}": plain_loss(chunks[0], ids, config.model.seq_length)
                        for name, ids in held.items()}  # fmt: skip
        if identity.rank == 0:
            found.write_text(json.dumps(figures))


@torch.no_grad()
def plain_loss(chunk: Any, ids: np.ndarray, seq_length: int) -> float:
    """Of the text window by window, the last one as short as it is."""
    chunk.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, seq_length):
        window = torch.from_numpy(ids[start : start + seq_length + 1].astype(np.int64))[None]
        logits = chunk(window[:, :-1], torch.arange(window.shape[1] - 1)[None], None)
        total += torch.nn.functional.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
    return total / (len(ids) - 1)


def measure(config: RunConfig, prepared: Prepared, world_size: int, found: Path) -> dict[str, float]:
    run_ranks(world_size, measured, config, prepared, found)
    return json.loads(found.read_text())


def test_full_passes_are_of_the_whole_text_in_every_layout(texts: dict[str, str], tmp_path: Path) -> None:
    config = runs.configuration(tmp_path, *flags(texts), "--eval.full_pass", "True")
    prepared = prepare(config, None)
    one = measure(config, prepared, 1, tmp_path / "one")
    names = ["", "/held", "/small", f"/{texts['web']}", f"/{texts['code']}"]
    assert {name for name in one if not name.startswith("plain")} == {f"validation_loss{name}" for name in names}
    for name in ("held", "small"):
        assert one[f"validation_loss/{name}"] == pytest.approx(one.pop(f"plain/{name}"), rel=1e-6)
    for name, world, layout in (("pp", 4, STAGES), ("cp", 2, "--parallel.context_parallel_size 2")):
        split = runs.configuration(tmp_path, *flags(texts), "--eval.full_pass", "True", *layout.split())
        assert measure(split, prepared, world, tmp_path / name) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("blend", "alone"), [("blend", "paths"), ("stream_blend", "stream")])
def test_the_loss_of_a_source_is_that_of_its_validation_split_alone(
    blend: str, alone: str, texts: dict[str, str], tmp_path: Path
) -> None:
    plain = [*EVALUATED.split(), "--data.split", "7,3", "--data.stream_count", "4", "--data.tokenizer", "byte"]
    both = [*plain, f"--data.{blend}", texts["web"], "50", texts["code"], "1", "--eval.by_source", "True"]
    found = {}
    for name, given, world in (
        ("both", both, 2), *((one, [*plain, f"--data.{alone}", texts[one]], 1) for one in ("web", "code"))
    ):  # fmt: skip
        config = runs.configuration(tmp_path, *given)
        found[name] = measure(config, prepare(config, None), world, tmp_path / name)
    assert len(found["both"]) == 3
    for one in ("web", "code"):  # of which "code" is in none of the blend's 16 samples
        assert found["both"][f"validation_loss/{texts[one]}"] == pytest.approx(found[one]["validation_loss"], rel=1e-6)
    whole = runs.configuration(tmp_path, *flags(texts), "--eval.full_pass", "True", "--eval.by_source", "True")
    assert [one.name for one in validation_sets(prepare(whole, None), whole)] == ["", "held", "small"]


@pytest.mark.campaign
def test_a_run_logs_sets_and_sources_beside_its_split(
    texts: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = runs.configuration(tmp_path / "run", *flags(texts), "--eval.full_pass", "False")
    prepared = prepare(config, None)
    lines = runs.train(prepared, config, 2)
    (line,) = [one for one in lines if "validation_loss" in one]
    assert line["iteration"] == 2
    web, code = line[f"validation_loss/{texts['web']}"], line[f"validation_loss/{texts['code']}"]
    assert line["validation_loss"] == pytest.approx((3 * web + code) / 4, rel=1e-6)  # 16 samples: 12 and 4
    printed = capfd.readouterr().out
    assert f"| held {line['validation_loss/held']:.3f} (" in printed and "| small " in printed
    without = [value for value in flags(texts) if value not in ("held", "small", texts["held"], texts["small"])]
    without.remove("--eval.validation_sets")
    plain = runs.configuration(tmp_path / "plain", *without, "--train.eval_interval", "None")
    expected = runs.train(prepared, plain, 2)
    assert runs.losses(lines) == runs.losses(expected)


def test_no_eval_iters_is_no_evaluation(texts: dict[str, str], tmp_path: Path) -> None:
    given = (*flags(texts), "--train.eval_iters", "0", "--data.split", "1,0", "--eval.validation_sets", "x", "/nowhere")
    config = runs.configuration(tmp_path, *given)
    assert config.problems(1) == []
    assert not [line for line in runs.train(prepare(config, None), config, 1) if "validation_loss" in line]


def test_named_sets_stand_in_for_a_split_without_weight(texts: dict[str, str], tmp_path: Path) -> None:
    config = runs.configuration(tmp_path, *flags(texts), "--data.split", "1,0,0")
    names = [one.name for one in validation_sets(prepare(config, None), config)]
    assert names == ["held", "small"]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("wiki /nowhere/wiki", r"^eval.validation_sets: wiki: no file or .bin/.idx prefix /nowhere/wiki"),
        ("wiki /nowhere/*.jsonl", r'^eval.validation_sets: wiki: nothing fits "/nowhere/\*\.jsonl"'),
        ("tiny TINY", r"^eval.validation_sets: tiny holds 5 tokens; one sample needs model.seq_length \+ 1 = 65"),
        ("WEB WEB", r"is a source of the blend, too"),
    ],
)
def test_a_set_that_cannot_be_read_is_named(sets: str, words: str, texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("abcd")
    named = sets.replace("TINY", str(tmp_path / "tiny.txt")).replace("WEB", texts["web"])
    config = runs.configuration(tmp_path, *flags(texts), "--eval.validation_sets", *named.split())
    with pytest.raises(UserError, match=words):
        prepare(config, None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--eval.validation_sets a/b x", "eval.validation_sets: a/b"),
        ("--eval.full_pass True --data.stream x.jsonl", "of data.stream is not counted before"),
        ("--eval.full_pass True --data.order megatron", 'eval.full_pass with data.order = "megatron"'),
        ("--train.eval_iters -1", "train.eval_iters must not be negative"),
        ("--eval.interval 0 --eval.limit 0 --eval.num_fewshot -1", "eval.num_fewshot must be 0 or more, found -1"),
        ("--eval.tasks a a", "eval.tasks: expected names, each once"),
    ],
)
def test_what_cannot_be_is_refused(wrong: str, words: str, tmp_path: Path) -> None:
    config = runs.configuration(tmp_path, "--train.eval_interval", "2", *wrong.split())
    assert any(words in problem for problem in config.problems(1))
