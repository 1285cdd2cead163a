"""Samples during training: what they leave in the run's folder, and that they leave nothing in the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.prepared import Prepared
from parallel.groups import Ranks
from program.schema import JSON, without_problems
from program.untrusted import parse_json
from runs import configuration, losses, train, train_or_fail
from tools.shared.loaded_model import LoadedModel, on_ranks
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from training.config.train_config import TrainConfig
from training.generation.samples import SAMPLING, SampleCallback
from training.generation.settings import TextLimits
from training.generation.texts import continue_prompts
from training.progress import Progress
from training.watchdog.heartbeat import Heartbeat

PROMPTS = ("def read(self, path):\n", "", "naïve — ")
FLAGS = (
    "--model.shape", "mixtral_tiny", "--model.hidden_dropout", "0.1", "--model.moe_expert_capacity_factor", "1.0",
    "--train.train_iters", "2", "--parallel.overlap_grad_reduce", "True", "--parallel.overlap_param_gather", "True",
)  # fmt: skip
SAMPLED = ("--train.generate_tokens", "12", "--train.sample_interval", "1", "--train.sample_prompts", *PROMPTS)


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run with samples, of two ranks with dropout and experts, and its metrics."""
    folder = tmp_path_factory.mktemp("samples") / "run"
    return folder, train(prepared, configuration(folder, *FLAGS, *SAMPLED), 2)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_each_prompt_has_a_line_for_each_sampled_iteration(run: tuple[Path, list[dict[str, Any]]]) -> None:
    found = samples(run[0])
    assert [(line["iteration"], line["prompt"]) for line in found] == [
        (number, text) for number in (1, 2) for text in PROMPTS
    ]
    assert all(line.keys() == {"iteration", "prompt", "text"} and 0 < len(line["text"]) <= 12 for line in found)
    texts = {line["prompt"]: line["text"] for line in found if line["iteration"] == 2}
    assert len(set(texts.values())) == 3
    opened = open_checkpoint(ModelFlags(checkpoint=run[0], layout="tp2sp", device="cpu"))

    def work(model: LoadedModel) -> None:
        limits = TextLimits(new_tokens=12, seq_length=64)
        again = continue_prompts(model.text_model, PROMPTS, limits, SAMPLING)
        made = {one.prompt: without_problems(one.text) for one in again}
        assert made == texts, "what the checkpoint's model makes of them"

    assert on_ranks(opened, "a test", work) == 0


def test_what_a_model_of_bytes_writes_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte as a text, and half a surrogate pair: the line is one that a reader takes."""
    text = "".join(map(chr, range(256))) + "\ud800é"
    callback = object.__new__(SampleCallback)
    callback.run_dir, callback.ranks = tmp_path, object.__new__(Ranks)
    monkeypatch.setattr(Ranks, "rank", 0, raising=False)
    monkeypatch.setattr(Ranks, "say", lambda *_: None)
    callback._write(3, [("a\x19", text)])
    record = parse_json((tmp_path / "samples.jsonl").read_bytes(), dict[str, JSON])
    assert record["prompt"] == "a\ufffd" and record["text"].endswith("\ufffdé") and "\t\n" in record["text"]
    assert record["text"].count("\ufffd") == 29 + 33 + 1 and len(record["text"]) == len(text)


def test_training_is_the_same_without_bit_by_bit(
    prepared: Prepared, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Losses after samples, and weights, optimizer and generators in the end."""
    folder, metrics = run
    without = train(prepared, configuration(tmp_path / "run", *FLAGS), 2)
    assert losses(without) == losses(metrics) and len(losses(without)) == 2
    for name in ("expert_load", "grad_norm", "dropped_tokens"):
        assert [line[name] for line in without] == [line[name] for line in metrics], name
    own, other = (sorted(path.glob("checkpoints/iter_0000002/*.bin")) for path in (folder, tmp_path / "run"))
    assert len(own) == 2 and [path.read_bytes() for path in own] == [path.read_bytes() for path in other]
    assert not (tmp_path / "run/samples.jsonl").exists()


def test_a_request_to_stop_breaks_samples_off_and_every_token_is_a_beat(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = TrainConfig(generate_tokens=12, sample_prompts=("a", "b"), sample_interval=1)
    opened = open_checkpoint(ModelFlags(checkpoint=run[0], layout="dp2", device="cpu"))

    def work(model: LoadedModel) -> None:
        heartbeat, calls = Heartbeat(), list[str]()
        heartbeat.enter("step", 7)

        def asked() -> bool:
            calls.append(heartbeat.read().phase)
            return model.ranks.rank == 1 and len(calls) == 5

        parts = (model.text_model, 64, tmp_path, heartbeat)
        before = heartbeat.read().beats
        SampleCallback(settings, *parts, asked).sample_at_end(Progress(iteration=7))
        assert calls == ["generation"] * 5, "on both ranks"
        assert heartbeat.read().phase == "step" and heartbeat.read().beats == before + 7
        SampleCallback(settings, *parts).sample_at_end(Progress(iteration=8))

    assert on_ranks(opened, "a test", work) == 0
    assert [line["iteration"] for line in samples(tmp_path)] == [8, 8]
    said = capfd.readouterr().err
    assert "asked to stop: the samples after iteration 7 are broken off" in said
    assert said.count("a sample continuation of") == 2


def test_a_prompt_that_leaves_no_room_is_refused_before_the_first_step(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--train.generate_tokens", "5", "--train.sample_prompts", "short", "x" * 64)
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", *flags), 1)
    assert code == 2 and failure is not None
    assert "train.sample_prompts: 'xxx" in failure.text and "has 64 tokens; expected at most 63" in failure.text
    assert not (tmp_path / "run/metrics.jsonl").exists() or not (tmp_path / "run/metrics.jsonl").read_text()
