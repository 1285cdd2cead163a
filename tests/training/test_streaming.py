"""Training on raw text that is tokenised on the way, through the whole program."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.order_begin import Read
from data.prepared import Prepared
from data.streaming import opening
from data.streaming.source import InterleavedStreams
from data.transformed import unchanged
from program.schema import structured
from runs import DEBUG, configuration, losses, train, train_or_fail
from training.checkpoint import order_entry, stage_entry
from training.checkpoint.folders import latest
from training.checkpoint.state import JSON, read_state
from training.checkpoint.stream_position import found, repeated_reading
from training.checkpoint.stream_position import resumed as resumed_at
from training.config.stages import stage_at, stages
from training.metrics.jsonl import read_jsonl
from training.parts.data import open_source
from training.start.prepare import prepare


def corpus(path: Path, seed: int = 0) -> Path:
    """Documents of random words."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(300)]
    texts = (" ".join(draw.choices(words, k=draw.randrange(5, 80))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def flags_of(path: Path, iterations: int = 2) -> tuple[str, ...]:
    return (
        "--data.stream", str(path), "--data.stream_count", "8", "--data.split", "7,3",
        "--train.train_iters", str(iterations), "--log.report", "False",
    )  # fmt: skip


def prepared_for(folder: Path, *flags: str) -> Prepared:
    return prepare(configuration(folder, *flags), None)


def test_positions_of_an_older_version_are_those_of_the_only_source() -> None:
    old: dict[str, JSON] = {"streams": {"consumed_samples": 9, "cursors": {"0": "5 0 1 0 0 0 3 7", "1": "no cursor"}}}
    now = "now 16 1 5"
    assert found(old, True, [now], 2) == [{0: "5 0 1 0 0 0 3 7 0"}]
    assert found(old, False, [now], 2) == [{}]  # of other data
    kept: dict[str, JSON] = {
        "a 16 1 5": {"1": "5 0 1 0 0 0 3 7 2", "2": "1 1"},
        "b 16 1 5": {"0": "4 1"},
        "b x 1 5": {"0": "9 9"},
    }
    keys = ["b 16 1 5", "c 16 1 5", "a 16 1 5", "b 8 1 5", "b 16 2 5"]
    assert found({"streams": {"cursors": kept}}, False, keys, 2) == [
        {0: "4 1 0 0 0 0 0 0 0"}, {}, {1: "5 0 1 0 0 0 3 7 2"}, {0: "8 1 0 0 0 0 0 0 0"}, {},
    ]  # fmt: skip
    order: dict[str, JSON] = {"iteration": 1, "samples": 8, "before": {"x": ["5", 3]}, "now": {"x": ["5", 4, [3, 1]]}}
    entry, problems = structured(order, order_entry.OrderEntry)
    assert not problems and entry.before == {"x": Read("5", 3)} and entry.now == {"x": Read("5", 4, (3, 1))}


@pytest.mark.campaign  # of a blend: below; how it is read: tests/data/test_streaming.py
def test_a_resume_in_other_layouts_gives_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples that a function of the user's changes; that it is left out then is no reason to read again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_streams.py").write_text("def one_less(tokens, sample, rng):\n    return tokens - (tokens == 44)\n")
    flags = (*flags_of(corpus(tmp_path / "a.jsonl"), 4), "--train.eval_interval", "2", "--train.eval_iters", "1",
             "--data.transform", "of_streams:one_less")  # fmt: skip
    prepared = prepared_for(tmp_path / "whole", *flags)
    whole = train(prepared, configuration(tmp_path / "whole", *flags), 1)
    assert 0 <= whole[0]["epoch"] <= whole[-2]["epoch"]
    run = tmp_path / "run"
    train(prepared, configuration(run, *flags, "--train.exit_interval", "2", "--train.micro_batch_size", "1"), 2)
    [cursors] = entry(run)["cursors"].values()
    assert len(cursors) == 8
    resumed = train(prepared, configuration(run, *flags), 1)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    validation = [[line["validation_loss"] for line in one if "validation_loss" in line] for one in (whole, resumed)]
    assert len(validation[0]) == 2
    assert validation[1] == pytest.approx(validation[0], rel=1e-5)
    [kept] = entry(run)["cursors"].values()
    cursors = {int(number): text for number, text in kept.items()}
    going_on = unchanged(resumed_at(open_source(prepared, configuration(run, *flags), "train"), [cursors]))
    assert isinstance(going_on, InterleavedStreams) and going_on.position(32) == [cursors]
    without = (*flags, "--data.transform", "None", "--data.allow_data_change", "True", "--train.train_iters", "5")
    train(prepared_for(run, *without), configuration(run, *without), 1)
    assert "tokenised again" not in capfd.readouterr().out


KILL = """
import os, signal
from training.loop import Callback

class Kill(Callback):
    def after_step(self, progress, result):
        if progress.iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
STAGES = """
[[stage]]
name = "first"
until_iterations = 4
data.stream_blend = {{ "{a}" = 2.0, "{b}" = 1.0 }}

[[stage]]
name = "last"
until_iterations = 6
data.stream_blend = {{ "{c}" = 1.0, "{b}" = 3.0 }}
"""


def test_a_blend_killed_and_resumed_in_other_layouts_over_stages_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killing.py").write_text(KILL)
    monkeypatch.syspath_prepend(tmp_path)
    a, b, c = (str(corpus(tmp_path / f"{name}.jsonl", seed)) for seed, name in enumerate("abc"))
    recipe = tmp_path / "staged.toml"
    text = "\n".join(line for line in DEBUG.read_text().splitlines() if "train_iters" not in line)
    recipe.write_text(text + STAGES.format(a=a, b=b, c=c))
    flags = ("--data.stream_count", "8", "--data.stream_shuffle", "6", "--data.split", "7,3", "--log.report", "False",
             "--checkpoint.save_interval", "2", "--train.eval_interval", "2", "--train.eval_iters", "1",
             "--eval.by_source", "True", "--data.cache_dir", str(tmp_path / "cache"))  # fmt: skip

    def part(run: Path, world_size: int, *more: str) -> int:
        """Train the stage that the run is in."""
        given = configuration(run, *flags, *more, recipe=recipe)
        at = stage_entry.position(run / "checkpoints", given.checkpoint)
        config = stage_at(stages(given, at), 0 if at is None else at.now.iteration)
        return train_or_fail(prepare(config, None), config, world_size)[0]

    for _ in range(2):
        part(tmp_path / "whole", 1)
    assert part(tmp_path / "run", 2, "--train.callbacks", "killing:Kill") != 0
    part(tmp_path / "run", 1)
    part(tmp_path / "run", 2, "--train.micro_batch_size", "1")
    whole, run = (figures(read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("whole", "run"))
    assert len(whole) == 6 and {f"validation_loss/{one}" for one in (b, c)} <= whole[6].keys()
    assert whole[4][f"tokens/{a}"] + whole[6][f"tokens/{b}"] + whole[6][f"tokens/{c}"] == 6 * 8 * 64
    for iteration, own in run.items():
        assert own == pytest.approx(whole[iteration], rel=1e-5)
    kept = entry(tmp_path / "run")["cursors"].values()
    assert sorted(map(len, kept)) == [4, 8, 8]  # a's, too, which has gone; of c's streams 4 have begun
    order = read_state(tmp_path / "run/checkpoints/iter_0000004").entries["order"]
    assert isinstance(order, dict)
    for _, samples, by_stream in order["now"].values():  # which the streams have not read in turn
        assert len(by_stream) == 8 and sum(by_stream) == samples
    printed = capfd.readouterr().out
    assert "tokenised again" not in printed
    assert f"| {c} {run[6][f'validation_loss/{c}']:.3f} (" in printed


def figures(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Of each iteration what follows from its samples; of one that ran twice, the later."""
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        own = {key: value for key, value in line.items() if key.startswith(("loss", "validation_loss", "tokens/"))}
        found[line["iteration"]] = found.get(line["iteration"], {}) | own
    return found


def entry(run_dir: Path) -> dict:
    path = latest(run_dir / "checkpoints")
    assert path is not None
    streams = read_state(path).entries["streams"]
    assert isinstance(streams, dict)
    return streams


@pytest.mark.campaign
def test_documents_kept_apart_resume_bit_for_bit(tmp_path: Path) -> None:
    flags = (*flags_of(corpus(tmp_path / "a.jsonl")), "--data.reset_attention_mask", "--data.reset_position_ids")
    prepared = prepared_for(tmp_path / "whole", *flags)
    whole = train(prepared, configuration(tmp_path / "whole", *flags), 1)
    train(prepared, configuration(tmp_path / "run", *flags, "--train.exit_interval", "1"), 1)
    assert losses(train(prepared, configuration(tmp_path / "run", *flags), 1)) == losses(whole)


def test_other_data_is_refused_or_begun_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = corpus(tmp_path / "a.jsonl")
    flags, run = flags_of(path), tmp_path / "run"
    train(prepared_for(run, *flags), configuration(run, *flags, "--train.exit_interval", "1"), 1)
    fewer = (*flags, "--data.stream_count", "4")
    code, failure = train_or_fail(prepared_for(run, *fewer), configuration(run, *fewer), 1)
    assert code == 2
    assert failure is not None
    assert "stream_count is 4 (was: 8)" in failure.text
    corpus(path, seed=1)
    code, failure = train_or_fail(prepared_for(run, *flags), configuration(run, *flags), 1)
    assert code == 2
    assert failure is not None
    assert f"shards of source {path}: " in failure.text
    accepted = configuration(run, *flags, "--data.allow_data_change", "True")
    assert len(train(prepared_for(run, *flags), accepted, 1)) == 2
    assert "does not say where 8 of 8 streams stand in this data" in capfd.readouterr().out


def test_a_bad_document_met_while_training_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BATCH_BYTES", 2000)  # what is tried before ranks start
    path = corpus(tmp_path / "a.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], '{"other": 1}', *lines[40:]]))
    flags = flags_of(path, 40)
    prepared = prepared_for(tmp_path / "run", *flags)
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", *flags), 2)
    assert code == 2
    assert failure is not None
    assert f'{path}:41 (byte {sum(len(line) + 1 for line in lines[:40])}): no field "text"' in failure.text
    assert "Traceback" not in failure.text


@pytest.mark.parametrize(
    "count, micro_batch_size, data_parallel_size, times",
    [(64, 1, 8, 1), (64, 4, 16, 1), (64, 2, 64, 2), (64, 1, 6, 3), (7, 1, 2, 2), (4, 1, 8, 2), (6, 4, 3, 2)],
)
def test_how_many_ranks_read_a_stream(count: int, micro_batch_size: int, data_parallel_size: int, times: float) -> None:
    step = micro_batch_size * data_parallel_size
    read = [
        {index % count for index in range(count * step) if index // micro_batch_size % data_parallel_size == rank}
        for rank in range(data_parallel_size)
    ]
    assert sum(map(len, read)) / count == times
    assert repeated_reading(count, micro_batch_size, data_parallel_size) == times
