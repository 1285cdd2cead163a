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

import numpy as np
import pytest
import torch

from data.prepared import Prepared
from data.source import build_source
from programs import Program
from runs import DEBUG, configuration, losses, train, train_or_fail
from training.cli import parse

TP2PP2 = (
    "--parallel.tensor_model_parallel_size",
    "2",
    "--parallel.sequence_parallel",
    "True",
    "--parallel.pipeline_model_parallel_size",
    "2",
)
FOUR = ("--train.train_iters", "4")


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


def test_its_config_runs_the_same_job_again(prepared: Prepared, tmp_path: Path) -> None:
    first = train(prepared, configuration(tmp_path / "one", "--train.train_iters", "3"), 1)
    again = parse.parse_config([str(tmp_path / "one/config.toml"), "--run_dir", str(tmp_path / "two")])
    assert losses(train(prepared, again, 1)) == losses(first)
    assert tomllib.loads((tmp_path / "one/config.toml").read_text()) == tomllib.loads(
        (tmp_path / "two/config.toml").read_text()
    )


def test_the_loss_reaches_rank_0_from_the_last_stage(prepared: Prepared, tmp_path: Path) -> None:
    one = losses(train(prepared, configuration(tmp_path / "one", "--train.train_iters", "2"), 1))
    four = losses(train(prepared, configuration(tmp_path / "four", "--train.train_iters", "2", *TP2PP2), 4))
    assert four == pytest.approx(one, rel=1e-5)


# ---- resume


def test_resume_in_the_same_layout_is_bit_identical(prepared: Prepared, tmp_path: Path) -> None:
    """With dropout on: weights, moments, data order and random-number generators all come back."""
    flags = (*FOUR, "--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1", *TP2PP2)
    straight = losses(train(prepared, configuration(tmp_path / "straight", *flags), 4))
    broken = configuration(tmp_path / "broken", "--train.exit_interval", "2", *flags)
    train(prepared, broken, 4)
    assert not (tmp_path / "broken/done").exists()
    resumed = train(prepared, configuration(tmp_path / "broken", *flags), 4)
    assert losses(resumed) == straight
    assert (tmp_path / "broken/done").exists()


def test_exit_interval_leaves_the_schedule_alone(prepared: Prepared, tmp_path: Path) -> None:
    straight = train(prepared, configuration(tmp_path / "a", "--train.train_iters", "5"), 1)
    stopped = train(
        prepared, configuration(tmp_path / "b", "--train.train_iters", "5", "--train.exit_interval", "3"), 1
    )
    assert [line["learning_rate"] for line in stopped] == [line["learning_rate"] for line in straight[:3]]


TARGETS = {
    "one": (1, ()),
    "tp4": (4, ("--parallel.tensor_model_parallel_size", "4")),
    "pp4": (4, ("--parallel.pipeline_model_parallel_size", "4")),
    "dp4": (4, ()),
    "pp2vpp2dp2": (
        4,
        ("--parallel.pipeline_model_parallel_size", "2", "--parallel.virtual_pipeline_model_parallel_size", "2"),
    ),
}


@pytest.fixture(scope="module")
def interrupted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A TP2 PP2 DP2 run stopped at iteration 2 of 4, and the losses of one that was not."""
    folder = tmp_path_factory.mktemp("interrupted")
    straight = losses(train(prepared, configuration(folder / "straight", *FOUR, *TP2PP2), 8))
    train(prepared, configuration(folder / "run", *FOUR, "--train.exit_interval", "2", *TP2PP2), 8)
    return folder / "run", straight


@pytest.mark.parametrize("target", list(TARGETS))
def test_resume_in_another_layout(
    target: str, interrupted: tuple[Path, list[float]], prepared: Prepared, tmp_path: Path
) -> None:
    folder, straight = interrupted
    shutil.copytree(folder, tmp_path / "moved")  # a run folder can be copied and moved
    world_size, flags = TARGETS[target]
    resumed = losses(train(prepared, configuration(tmp_path / "moved", *FOUR, *flags), world_size))
    assert resumed[2:] == pytest.approx(straight[2:], rel=1e-5)
    assert len(resumed) == 4


def test_a_checkpoint_carries_what_starts_it(prepared: Prepared, tmp_path: Path) -> None:
    """``pretrain_gpt.py CHECKPOINT/config.toml --checkpoint.load CHECKPOINT`` continues it in a new folder."""
    train(prepared, configuration(tmp_path / "one", *FOUR, "--train.exit_interval", "3"), 1)
    straight = losses(train(prepared, configuration(tmp_path / "straight", *FOUR), 1))
    saved = tmp_path / "one/checkpoints/iter_0000003"
    flags = [
        str(saved / "config.toml"),
        "--checkpoint.load",
        str(saved),
        "--run_dir",
        str(tmp_path / "two"),
        "--train.exit_interval",
        "None",
    ]
    assert losses(train(prepared, parse.parse_config(flags), 1)) == straight[3:]


# ---- precision and recomputation


def test_bf16_and_fp16_stay_near_fp32(prepared: Prepared, tmp_path: Path) -> None:
    """Bounds: 2e-2 nats over 4 iterations, with fp32 main weights, and a scale that never overflows."""
    flags = (*FOUR, "--precision.initial_loss_scale", "4096", "--precision.dtype")
    runs = {
        dtype: losses(train(prepared, configuration(tmp_path / dtype, *flags, dtype), 1))
        for dtype in ("fp32", "bf16", "fp16")
    }
    for dtype in ("bf16", "fp16"):
        assert runs[dtype] != runs["fp32"]
        assert max(abs(a - b) for a, b in zip(runs[dtype], runs["fp32"], strict=True)) < 2e-2


def test_bf16_in_three_planes(prepared: Prepared, tmp_path: Path) -> None:
    one = losses(
        train(prepared, configuration(tmp_path / "one", "--precision.dtype", "bf16", "--train.train_iters", "3"), 1)
    )
    eight = losses(
        train(
            prepared, configuration(tmp_path / "8", "--precision.dtype", "bf16", "--train.train_iters", "3", *TP2PP2), 8
        )
    )
    assert max(abs(a - b) for a, b in zip(one, eight, strict=True)) < 5e-3


def test_an_overflow_skips_the_update_and_halves_the_scale(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--precision.dtype", "fp16", "--precision.initial_loss_scale", str(2.0**18), "--precision.hysteresis", "1")
    metrics = train(prepared, configuration(tmp_path / "run", *flags), 1)
    assert metrics[0]["skipped"] == 1
    assert "grad_norm" not in metrics[0]  # it overflowed: there is no norm
    assert metrics[1]["loss_scale"] == 2.0**17
    assert metrics[-1]["skipped"] == 0
    assert losses(metrics)[-1] < losses(metrics)[0]


RECOMPUTE = {
    "full, uniform": ("--train.recompute", "full:uniform:1"),
    "full, block": ("--train.recompute", "full:block:1"),
    "selective": ("--train.recompute", "selective:core_attn,mlp"),
}


def test_recomputation_changes_nothing_with_dropout_on(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1", "--train.train_iters", "2", *TP2PP2)
    kept = losses(train(prepared, configuration(tmp_path / "kept", *flags), 4))
    for name, recompute in RECOMPUTE.items():
        assert losses(train(prepared, configuration(tmp_path / name, *flags, *recompute), 4)) == kept, name


DEEPSEEK_PARTS = "selective:core_attn,mlp,moe,shared_experts"  # the others need Transformer Engine


def test_recomputation_of_experts_latents_and_depths_changes_nothing(prepared: Prepared, tmp_path: Path) -> None:
    """Of a model with each of them: DeepSeek-V3's, with multi-token prediction, in a layout with experts on ranks."""
    shape = ("--model.shape", "deepseek_v3_tiny", "--model.hidden_dropout", "0.1", "--train.train_iters", "2")
    flags = (*shape, "--parallel.pipeline_model_parallel_size", "2")
    kept = losses(train(prepared, configuration(tmp_path / "kept", *flags), 2))
    for name, recompute in (RECOMPUTE | {"selective": ("--train.recompute", DEEPSEEK_PARTS)}).items():
        assert losses(train(prepared, configuration(tmp_path / name, *flags, *recompute), 2)) == kept, name


def test_dropout_does_something(prepared: Prepared, tmp_path: Path) -> None:
    plain = losses(train(prepared, configuration(tmp_path / "a", "--train.train_iters", "1"), 1))
    dropped = losses(
        train(prepared, configuration(tmp_path / "b", "--train.train_iters", "1", "--model.hidden_dropout", "0.3"), 1)
    )
    assert plain != dropped


# ---- batches and schedules


def test_a_batch_ramp_takes_effect_and_resumes(prepared: Prepared, tmp_path: Path) -> None:
    flags = (
        "--train.rampup_batch_size",
        "2",
        "2",
        "24",
        "--train.micro_batch_size",
        "1",
        "--parallel.ddp_bucket_size",
        "20000",
    )
    straight = train(prepared, configuration(tmp_path / "a", *flags), 1)
    assert [line["consumed_samples"] for line in straight][:4] == [2, 4, 6, 8]
    assert straight[-1]["consumed_samples"] - straight[-2]["consumed_samples"] == 8
    train(prepared, configuration(tmp_path / "b", "--train.exit_interval", "4", *flags), 1)
    resumed = train(prepared, configuration(tmp_path / "b", *flags), 2)
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


def test_a_checkpoint_of_another_shape_shows_both_shapes(prepared: Prepared, tmp_path: Path) -> None:
    train(prepared, configuration(tmp_path / "run", "--train.exit_interval", "1"), 1)
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", "--model.ffn_hidden_size", "192"), 1)
    assert code == 2
    assert failure is not None
    assert "352" in failure.text
    assert "384" in failure.text


def test_a_refused_start_damages_nothing(prepared: Prepared, tmp_path: Path) -> None:
    train(prepared, configuration(tmp_path / "run", "--train.exit_interval", "1"), 1)
    before = (tmp_path / "run/config.toml").read_text()
    code, _ = train_or_fail(prepared, configuration(tmp_path / "run", "--model.hidden_size", "32"), 1)
    assert code == 2
    assert (tmp_path / "run/config.toml").read_text() == before


def test_other_data_on_resume_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    train(prepared, configuration(tmp_path / "run", "--train.train_iters", "2"), 1)
    for flag, value, printed in (("train.seed", "7", "seed is 7 (was: 1234)"), ("data.split", "9,1", "split is 9,1")):
        code, failure = train_or_fail(prepared, configuration(tmp_path / "run", f"--{flag}", value), 1)
        assert code == 2
        assert failure is not None
        assert printed in failure.text
        assert "--data.allow_data_change" in failure.text
        assert (tmp_path / "run/done").exists()  # nothing was begun


def test_what_changed_on_resume_is_said(prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(prepared, configuration(tmp_path / "run", "--train.train_iters", "2"), 1)
    assert (tmp_path / "run/done").exists()
    flags = (
        "--train.seed",
        "7",
        "--optimizer.lr",
        "1e-3",
        "--train.exit_interval",
        "3",
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


def test_wandb_goes_on_with_the_id_of_the_run_folder(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb_id").write_text("0123abcd")
    train(prepared, configuration(tmp_path / "run", "--log.wandb", "offline", "--train.exit_interval", "1"), 1)
    assert (tmp_path / "run/wandb_id").read_text() == "0123abcd"
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-0123abcd.wandb"))) == 1


def test_state_beside_weights_is_versioned_json(prepared: Prepared, tmp_path: Path) -> None:
    train(prepared, configuration(tmp_path / "run", "--train.exit_interval", "1"), 1)
    state = json.loads((tmp_path / "run/checkpoints/iter_0000001/state.json").read_text())
    assert state["format"] == 1
    assert state["progress"] == {"iteration": 1, "consumed_samples": 8}


def test_the_first_samples_do_not_depend_on_the_length_of_training(prepared: Prepared, tmp_path: Path) -> None:
    found = []
    for iters in ("3", "6"):
        flags = ("--train.train_iters", iters, "--optimizer.lr_decay_style", "constant")
        found.append(losses(train(prepared, configuration(tmp_path / iters, *flags), 1)))
    assert found[0] == found[1][:3]


def test_waiting_for_data_is_measured_and_said(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second replica's first batch takes 3 s, and the training starts with it: the rank that waits longest counts,
    for which the others wait."""
    config = configuration(tmp_path / "run", "--train.train_iters", "2")
    source = build_source(prepared, config.data, config.model.seq_length, config.train.seed, "train")

    class Slow:
        seq_length, sources = source.seq_length, source.sources
        is_first = True

        def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
            if torch.distributed.get_rank() == 1 and self.is_first:
                time.sleep(3)
            self.is_first = False
            return source.fetch(sample_indices)

    metrics = train(replace(prepared, splits={"train": Slow()}), config, 2)
    said = re.search(r"waited for data ([\d.]+)% of the iterations' \d+s", capfd.readouterr().out)
    waited_s = sum(line["data_wait_s"] for line in metrics if "loss" in line)
    took_s = sum(line["iteration_s"] for line in metrics if "loss" in line)  # each is logged
    assert waited_s > 0.5
    assert said and abs(float(said[1]) / 100 - waited_s / took_s) < 1e-3


# ---- a sample, in any layout


def sample(capfd: pytest.CaptureFixture[str]) -> str:
    """The continuation that a run printed."""
    return capfd.readouterr().out.split("a sample continuation of")[1].split("done at")[0]


def test_the_sample_continuation_does_not_depend_on_the_layout(
    prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train.train_iters", "2", "--train.generate_tokens", "12")
    train(prepared, configuration(tmp_path / "one", *flags), 1)
    one = sample(capfd)
    train(
        prepared,
        configuration(tmp_path / "four", *flags, *TP2PP2, "--parallel.virtual_pipeline_model_parallel_size", "2"),
        4,
    )
    assert sample(capfd) == one
    train(prepared, configuration(tmp_path / "two", *flags, "--parallel.context_parallel_size", "2"), 2)
    assert sample(capfd) == one


def test_an_explicit_pipeline_layout(prepared: Prepared, tmp_path: Path) -> None:
    """Uneven stages by letters, the last of which holds the loss alone."""
    one = losses(train(prepared, configuration(tmp_path / "one", "--train.train_iters", "2"), 1))
    flags = ("--parallel.pipeline_model_parallel_size", "4", "--parallel.pipeline_model_parallel_layout", "Et|t*2|t|L")
    assert losses(
        train(prepared, configuration(tmp_path / "four", "--train.train_iters", "2", *flags), 4)
    ) == pytest.approx(one, rel=1e-5)
