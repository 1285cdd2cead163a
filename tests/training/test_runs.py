"""Whole runs: precision, recomputation, resume, launchers, evaluation, the folder a run leaves."""

import json
import os
import re
import shutil
import signal
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaign import param, some
from data.prepared import Prepared
from data.source import build_source
from programs import Program
from runs import DEBUG, configuration, losses, train, train_or_fail
from training.cli import parse
from training.metrics.jsonl import read_jsonl

TP2 = ("--parallel.tensor_model_parallel_size", "2", "--parallel.sequence_parallel", "True")
TP2PP2 = (*TP2, "--parallel.pipeline_model_parallel_size", "2")
NO_REPORT = ("--log.report", "False")
FOUR = ("--train.train_iters", "4", *NO_REPORT)
EXIT = ("--train.exit_interval", "3")
BF16 = ("--precision.dtype", "bf16")
SAMPLED = ("--train.generate_tokens", "12", "--train.sample_interval", "2")
DROPPED = (
    "--train.train_iters", "3", "--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1", *TP2,
    *NO_REPORT,
)  # fmt: skip


# ---- the folder


def test_a_run_learns_and_leaves_its_folder(prepared: Prepared, tmp_path: Path) -> None:
    config = configuration(
        tmp_path / "run", "--train.eval_interval", "5", "--train.eval_iters", "2", "--checkpoint.save_interval", "4"
    )
    metrics = train(prepared, config, 1)
    run_dir = tmp_path / "run"
    assert [line["iteration"] for line in metrics if "loss" in line] == list(range(1, 11))
    assert losses(metrics)[-1] < losses(metrics)[0] - 0.5
    assert [line["iteration"] for line in metrics if "validation_loss" in line] == [5, 10]
    last = [line for line in metrics if "loss" in line][-1]
    assert {
        "grad_norm",
        "learning_rate",
        "consumed_samples",
        "consumed_tokens",
        "iteration_s",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "data_wait_s",
        "checkpoint_stall_s",
        "skipped",
        "eta_s",
    } <= last.keys()
    assert (last["consumed_samples"], last["consumed_tokens"]) == (80, 80 * 64)
    assert "mfu" not in last  # a CPU's peak is not known
    assert (run_dir / "done").exists()
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "iter_0000004",
        "iter_0000008",
        "iter_0000010",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]
    assert str(tmp_path) not in (run_dir / "config.toml").read_text()
    assert not [path for path in (run_dir / "checkpoints").rglob("*.toml") if str(tmp_path) in path.read_text()]


@pytest.fixture(scope="module")
def one(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one rank's whole run of four iterations, with samples after every second."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(prepared, configuration(folder, *FOUR, *SAMPLED), 1)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of a run's metrics."""
    return read_jsonl(folder / "metrics.jsonl")


def sample(folder: Path, iteration: int = 2) -> str:
    """The continuation that a run wrote down."""
    written = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    (found,) = (line["text"] for line in written if line["iteration"] == iteration)
    return found


@pytest.mark.campaign
def test_its_config_runs_the_same_job_again(prepared: Prepared, one: Path, tmp_path: Path) -> None:
    again = parse.parse_config([str(one / "config.toml"), "--run_dir", str(tmp_path / "two")])
    assert losses(train(prepared, again, 1)) == losses(lines(one))
    assert tomllib.loads((one / "config.toml").read_text()) == tomllib.loads((tmp_path / "two/config.toml").read_text())


# ---- resume


@pytest.fixture(scope="module")
def dropped(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two ranks with dropout."""
    return losses(train(prepared, configuration(tmp_path_factory.mktemp("dropped"), *DROPPED), 2))


def test_resume_in_the_same_layout_is_bit_identical(
    prepared: Prepared, one: Path, dropped: list[float], tmp_path: Path
) -> None:
    """With dropout on: weights, moments, data order and random-number generators all come back."""
    train(prepared, configuration(tmp_path, *DROPPED, "--train.exit_interval", "1"), 2)
    assert not (tmp_path / "done").exists()
    resumed = train(prepared, configuration(tmp_path, *DROPPED), 2)
    assert losses(resumed) == dropped
    assert (tmp_path / "done").exists()
    assert abs(dropped[0] - losses(lines(one))[0]) > 1e-4, "dropout does something"


@pytest.fixture(scope="module")
def interrupted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TP2 PP2 DP2 run stopped at iteration 2 of 4."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    train(prepared, configuration(folder, *FOUR, *SAMPLED, "--train.exit_interval", "2", *TP2PP2), 8)
    return folder


def test_an_interrupted_run_of_three_planes_is_the_begin_of_one_ranks(interrupted: Path, one: Path) -> None:
    """The loss reaches rank 0 from the last stage; exit_interval leaves the schedule alone."""
    assert losses(lines(interrupted)) == pytest.approx(losses(lines(one))[:2], rel=1e-5)
    rates = [[line["learning_rate"] for line in lines(folder) if "loss" in line] for folder in (interrupted, one)]
    assert rates[0] == rates[1][:2]
    assert sample(interrupted) == sample(one)


TARGETS = {
    "one": (1, ()),
    "pp2vpp2dp2": (
        4,
        ("--parallel.pipeline_model_parallel_size", "2", "--parallel.virtual_pipeline_model_parallel_size", "2"),
    ),
}
"""All others, and every bit: checkpoint/test_checkpoint_layouts.py."""


@pytest.mark.parametrize("target", some(TARGETS, ("pp2vpp2dp2",)))  # one rank: checkpoint/
def test_resume_in_another_layout(
    target: str, interrupted: Path, one: Path, prepared: Prepared, tmp_path: Path
) -> None:
    shutil.copytree(interrupted, tmp_path / "moved")  # a run folder can be copied and moved
    world_size, flags = TARGETS[target]
    resumed = losses(train(prepared, configuration(tmp_path / "moved", *FOUR, *flags), world_size))
    assert resumed[2:] == pytest.approx(losses(lines(one))[2:], rel=1e-5)
    assert len(resumed) == 4


def test_a_checkpoint_carries_what_starts_it(prepared: Prepared, interrupted: Path, one: Path, tmp_path: Path) -> None:
    """``pretrain_gpt.py CHECKPOINT/config.toml --checkpoint.load CHECKPOINT`` continues it in a new folder."""
    saved = interrupted / "checkpoints/iter_0000002"
    flags = [str(saved / "config.toml"), "--checkpoint.load", str(saved), "--run_dir", str(tmp_path / "two")]
    changed = ("--train.exit_interval", "None", "--train.sample_interval", "None", "--train.generate_tokens", "0")
    sizes = ("--parallel.tensor_model_parallel_size", "1", "--parallel.sequence_parallel", "False")
    resumed = losses(train(prepared, parse.parse_config([*flags, *changed, *sizes]), 2))
    assert resumed == pytest.approx(losses(lines(one))[2:], rel=1e-5)


# ---- precision and recomputation


@pytest.fixture(scope="module")
def bf16(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(train(prepared, configuration(tmp_path_factory.mktemp("bf16"), *FOUR, *BF16, *EXIT), 1))


def test_bf16_and_fp16_stay_near_fp32(prepared: Prepared, one: Path, bf16: list[float], tmp_path: Path) -> None:
    """Bounds: 2e-2 nats over 3 iterations, with fp32 main weights, and a scale that never overflows."""
    flags = (*FOUR, *EXIT, "--precision.initial_loss_scale", "4096", "--precision.dtype", "fp16")
    fp32 = losses(lines(one))[:3]
    for found in (bf16, losses(train(prepared, configuration(tmp_path, *flags), 1))):
        assert found != fp32
        assert max(abs(a - b) for a, b in zip(found, fp32, strict=True)) < 2e-2


@pytest.mark.campaign
def test_bf16_in_a_layout(prepared: Prepared, bf16: list[float], tmp_path: Path) -> None:
    four = losses(train(prepared, configuration(tmp_path, *FOUR, *BF16, "--train.exit_interval", "2", *TP2PP2), 4))
    assert max(abs(a - b) for a, b in zip(bf16[:2], four, strict=True)) < 5e-3


def test_an_overflow_skips_the_update_and_halves_the_scale(prepared: Prepared, tmp_path: Path) -> None:
    flags = """--precision.dtype fp16 --precision.initial_loss_scale 262144 --precision.hysteresis 1 --log.report False
        --train.train_iters 6 --train.exit_interval 5""".split()  # the sixth overflows again
    metrics = train(prepared, configuration(tmp_path / "run", *flags), 1)
    assert metrics[0]["skipped"] == 1
    assert "grad_norm" not in metrics[0]  # it overflowed: there is no norm
    assert metrics[1]["loss_scale"] == 2.0**17
    assert metrics[-1]["skipped"] == 0
    assert losses(metrics)[-1] < losses(metrics)[0]


SELECTIVE = "selective:core_attn,mlp"  # tests/models/test_recompute.py: the gradients, with dropout


@pytest.mark.parametrize("recompute", some(("full:uniform:1", SELECTIVE), ("full:uniform:1",)))
@pytest.mark.campaign
def test_recomputation_changes_nothing_with_dropout_on(
    recompute: str, prepared: Prepared, dropped: list[float], tmp_path: Path
) -> None:
    flags = (*DROPPED, "--train.exit_interval", "2", "--train.recompute", recompute)
    assert losses(train(prepared, configuration(tmp_path, *flags), 2)) == dropped[:2]


DEEPSEEK_PARTS = "selective:core_attn,mlp,moe,shared_experts"  # the others need Transformer Engine


@pytest.mark.campaign  # its gradients on one rank and two stages: tests/models/test_recompute.py
def test_recomputation_of_experts_latents_and_depths_changes_nothing(prepared: Prepared, tmp_path: Path) -> None:
    """Of a model with each of them: DeepSeek-V3's, with multi-token prediction, on two stages."""
    shape = ("--model.shape", "deepseek_v3_tiny", "--model.hidden_dropout", "0.1", "--train.train_iters", "2")
    flags = (*shape, "--parallel.pipeline_model_parallel_size", "2", "--train.micro_batch_size", "4")
    kept = losses(train(prepared, configuration(tmp_path / "kept", *flags), 2))
    for way in ("full:uniform:1", "full:block:1", DEEPSEEK_PARTS):
        found = losses(train(prepared, configuration(tmp_path / way, *flags, "--train.recompute", way), 2))
        assert found == kept, way


# ---- batches and schedules


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        param((("--train.rampup_batch_size", "2", "2", "12"), [2, 4, 8, 14, 22])),
        (("--train.step_batch_size_schedule", "0:4 256:2 384:8"), [4, 6, 14, 22]),
    ],
    ids=["ramp", "steps"],
)
def test_a_batch_that_changes_takes_effect_and_resumes(
    batches: tuple[str, ...], expected: list[int], prepared: Prepared, tmp_path: Path
) -> None:
    flags = (*batches, "--train.train_iters", str(len(expected)), "--parallel.ddp_bucket_size", "20000", *NO_REPORT)
    straight = train(prepared, configuration(tmp_path / "a", *flags), 1)
    assert [line["consumed_samples"] for line in straight if "loss" in line] == expected
    train(prepared, configuration(tmp_path / "b", "--train.exit_interval", str(len(expected) - 2), *flags), 1)
    resumed = train(prepared, configuration(tmp_path / "b", *flags, "--train.micro_batch_size", "1"), 2)
    assert losses(resumed) == pytest.approx(losses(straight), rel=1e-5)


# ---- the command line, for real


def started(tmp_path: Path, cache_dir: Path, *flags: str) -> Program:
    """``pretrain_gpt.py`` on two ranks, in the folder ``run``."""
    folders = (
        "--run_dir",
        str(tmp_path / "run"),
        "--data.cache_dir",
        str(cache_dir),
        "--log.tensorboard",
        "False",
        "--log.report",
        "False",
    )
    return Program([str(DEBUG), *folders, "--nproc", "2", *flags], tmp_path / "said")


def test_a_killed_rank_ends_the_run_and_leaves_nothing_running(cache_dir: Path, tmp_path: Path) -> None:
    process = started(tmp_path, cache_dir, "--train.train_iters", "100000")
    while not (tmp_path / "run/metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(children[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.count("killed by SIGKILL") == 1
    assert "Mostly such a signal is the kernel's OOM killer's" in errors and "2 ranks are predicted to hold" in errors
    assert "rank 1 of 2" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_token_beyond_the_vocabulary_is_named(cache_dir: Path, tmp_path: Path) -> None:
    from data.shard_writer import ShardWriter

    with ShardWriter(tmp_path / "bad", 60000) as writer:
        for _ in range(40):
            writer.add(np.array([1, 2, 300] * 100))
            writer.end_document()
    run = started(tmp_path, cache_dir, "--data.paths", str(tmp_path / "bad"))
    _, errors = run.communicate()
    assert run.returncode == 2
    assert "holds token id 300" in errors
    assert errors.count("\n") == 1


def test_a_checkpoint_of_another_shape_shows_both_shapes_and_stays(
    prepared: Prepared, one: Path, tmp_path: Path
) -> None:
    shutil.copytree(one, tmp_path / "run")
    before = (tmp_path / "run/config.toml").read_text()
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", "--model.ffn_hidden_size", "192"), 1)
    assert code == 2
    assert failure is not None
    assert "352" in failure.text
    assert "384" in failure.text
    assert (tmp_path / "run/config.toml").read_text() == before


def test_other_data_on_resume_is_refused(prepared: Prepared, one: Path) -> None:
    for flag, value, printed in (("train.seed", "7", "seed is 7 (was: 1234)"), ("data.split", "9,1", "split is 9,1")):
        code, failure = train_or_fail(prepared, configuration(one, f"--{flag}", value), 1)
        assert code == 2
        assert failure is not None
        assert printed in failure.text
        assert "--data.allow_data_change" in failure.text
        assert (one / "done").exists()  # nothing was begun


def test_what_changed_on_resume_is_said(
    prepared: Prepared, one: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(one, tmp_path / "run")
    assert (tmp_path / "run/done").exists()
    flags = (
        "--train.seed",
        "7",
        "--optimizer.lr",
        "1e-3",
        "--train.exit_interval",
        "5",
        "--checkpoint.load",
        "elsewhere",
        "--data.allow_data_change",
        "True",
    )
    train(prepared, configuration(tmp_path / "run", *flags), 1)
    said = capfd.readouterr().out
    assert "data: seed is 7 (was: 1234)" in said
    assert "kept from the checkpoint. This configuration makes another one: learning rate" in said
    assert "checkpoint.load elsewhere is ignored" in said
    assert not (tmp_path / "run/done").exists()


@pytest.mark.campaign  # metrics/test_sinks.py trains with wandb, metrics/test_trackers.py keeps the id
def test_wandb_goes_on_with_the_id_of_the_run_folder(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb_id").write_text("0123abcd")
    train(prepared, configuration(tmp_path / "run", "--log.wandb", "offline", "--train.exit_interval", "1"), 1)
    assert (tmp_path / "run/wandb_id").read_text() == "0123abcd"
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-0123abcd.wandb"))) == 1


def test_state_beside_weights_is_versioned_json(interrupted: Path) -> None:
    state = json.loads((interrupted / "checkpoints/iter_0000002/state.json").read_text())
    assert state["format"] == 1
    assert state["progress"] == {"iteration": 2, "consumed_samples": 16}


def test_the_first_samples_do_not_depend_on_the_length_of_training(
    prepared: Prepared, one: Path, tmp_path: Path
) -> None:
    [first] = losses(train(prepared, configuration(tmp_path, "--train.train_iters", "1"), 1))
    assert first == losses(lines(one))[0]


@pytest.mark.campaign
def test_waiting_for_data_is_measured_and_said(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first batch of the second replica, and of the training, takes 2 s: the rank that waits longest counts,
    for which the others wait."""
    config = configuration(tmp_path / "run", "--train.train_iters", "2")
    source = build_source(prepared, config.data, config.model.seq_length, config.train.seed, "train")

    class Slow:
        seq_length, sources = source.seq_length, source.sources
        is_first = True

        def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
            if torch.distributed.get_rank() == 1 and self.is_first:
                time.sleep(2)
            self.is_first = False
            return source.fetch(sample_indices)

    metrics = train(replace(prepared, splits={"train": Slow()}), config, 2)
    said = re.search(r"waited for data ([\d.]+)% of the iterations' \d+s", capfd.readouterr().out)
    waited_s = sum(line["data_wait_s"] for line in metrics if "loss" in line)
    took_s = sum(line["iteration_s"] for line in metrics if "loss" in line)  # each is logged
    assert waited_s > 0.5
    assert said and abs(float(said[1]) / 100 - waited_s / took_s) < 1e-3


# ---- a sample, in any layout


@pytest.mark.campaign  # test_an_interrupted_run has samples, generation/test_families.py more layouts
def test_the_sample_continuation_does_not_depend_on_the_layout(prepared: Prepared, one: Path, tmp_path: Path) -> None:
    flags = (
        *FOUR,
        *SAMPLED,
        "--train.exit_interval",
        "2",
        "--parallel.context_parallel_size",
        "2",
        *TARGETS["pp2vpp2dp2"][1],
    )
    train(prepared, configuration(tmp_path, *flags), 4)
    assert sample(tmp_path) == sample(one)
