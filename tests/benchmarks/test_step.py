"""What the benchmarks compare is comparable, and what they count is counted."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from tests.benchmarks.step import command as benchmark
from tests.benchmarks.step import one_rank, startup
from tests.benchmarks.step.one_rank import RandomTokens
from training.cli import parse
from training.config.train_config import TrainConfig


@pytest.mark.parametrize("groups", [4, 2])
def test_both_sides_train_the_same_model_on_the_same_tokens(groups: int) -> None:
    config = one_rank.configuration(
        num_layers=2, hidden_size=32, heads=4, ffn_hidden_size=48, vocab_size=128, seq_length=16
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_query_groups=groups))
    ours, plain = one_rank.alternate([one_rank.ours, one_rank.plain], config, steps=3)
    losses = [[timing.loss for timing in side] for side in (ours, plain)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] != losses[0][1]  # the batches differ, and the weights move


def test_data_ranks_share_the_batch_and_differ() -> None:
    config = one_rank.configuration(vocab_size=128)
    config = dataclasses.replace(config, train=TrainConfig(global_batch_size=8, micro_batch_size=2))
    first, second = (RandomTokens(config, 100, dp=2, dp_rank=rank).next(seq_length=16) for rank in range(2))
    assert [tuple(batch.tokens.shape) for batch in first if batch] == [(2, 16), (2, 16)]
    assert first[0] is not None
    assert second[0] is not None
    assert int(first[0].tokens.max()) < 100
    assert not bool((first[0].tokens == second[0].tokens).all())


def test_a_failing_side_is_an_error() -> None:
    def broken(_config: object) -> None:
        raise ValueError("no model")

    with pytest.raises(RuntimeError, match=r"ValueError: no model"):
        one_rank.alternate([broken], one_rank.configuration(), steps=1)  # type: ignore[list-item]


def test_cpu_seconds_include_grandchildren() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}], check=True)"
    assert startup.cost_of([sys.executable, "-c", parent]).cpu_s >= 0.3


def test_a_failing_command_shows_its_output() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 3 .*\nbecause of this"):
        startup.cost_of([sys.executable, "-c", "print('because of this', flush=True); raise SystemExit(3)"])


def test_the_16384_ranks_on_paper_are_a_valid_layout() -> None:
    config = parse.parse_config(startup.flags_of(startup.PAPER))
    assert config.problems(startup.PAPER["world_size"]) == []  # type: ignore[arg-type]


def test_subjects_that_are_not_measured_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "docs/cpu.json"
    answers = {"help": {"wall_s": 0.5, "cpu_s": 0.4, "goal": 1.0}}
    shares = {
        "forked_cpu_s": 1.0,
        "torchrun_cpu_s": 4.0,
        "forked_wall_s": 1.0,
        "torchrun_wall_s": 2.0,
        "goal": 0.3,
    }

    def measure(subject: str, _job: object) -> dict[str, object]:
        if subject == "one_rank":
            raise RuntimeError("out of memory")
        return answers if subject == "answers" else shares  # type: ignore[return-value]

    monkeypatch.setattr(benchmark, "measure", measure)
    assert benchmark.main(["--subjects", "answers", "--output", str(output)]) == 0
    assert benchmark.main(["--subjects", "one_rank", "startup", "--output", str(output)]) == 1
    written = json.loads(output.read_text())
    assert written["answers"]["results"] == answers
    assert written["startup"]["results"] == shares
    assert "one_rank" not in written
    assert {"date", "commit", "cpu", "cores", "versions"} <= written["startup"].keys()


@pytest.mark.parametrize("value, verdict", [(0.9, "met"), (1.2, "MISSED")])
def test_a_table_says_whether_a_goal_was_met(value: float, verdict: str) -> None:
    row = {"wall_s": value, "cpu_s": 0.1, "goal": 1.0}
    assert benchmark.table("answers", {"help": row})[0].endswith(f"goal 1.00: {verdict}")
