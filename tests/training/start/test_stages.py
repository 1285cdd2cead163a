"""A run through its ``[[stage]]`` tables: killed, stopped, in other layouts and by another launcher, it is the same."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.order_begin import source_keys
from programs import Program
from runs import DEBUG, ROOT
from training.checkpoint.folders import complete
from training.config.recipe import load
from training.config.stages import stages
from training.metrics.jsonl import read_jsonl
from training.run_dir.history import read_history
from training.start.prepare import prepare

TABLES = """
[[stage]]
name = "first"
until_iterations = 3

[[stage]]
name = "long"
until_iterations = 6
model.seq_length = 96
model.rotary_base = 500000
train.global_batch_size = 4
data.blend = {{ "{text}/a.txt" = 1.0, "{text}/b.txt" = 1.0 }}

[[stage]]
name = "anneal"
until_iterations = 10
data.blend = {{ "{text}/b.txt" = 3.0, "{text}/a.txt" = 1.0 }}
optimizer.lr_decay_style = "linear"
optimizer.min_lr = 0.0
"""
FP32 = ("--precision.dtype", "fp32")
PLAIN = (
    "--log.tensorboard", "False", "--log.report", "False", "--checkpoint.async_save", "False", "--checkpoint.keep", "2",
    "--checkpoint.save_interval", "2", "--optimizer.min_lr", "1e-4", "--train.micro_batch_size", "2",
    *FP32,
)  # fmt: skip
TP2 = ("--parallel.tensor_model_parallel_size", "2")


@pytest.fixture(scope="module")
def recipe(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The debug recipe with three stages, the last of them on two texts."""
    folder = tmp_path_factory.mktemp("stages")
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name} is a letter, and more than that. " * 2000)
    text = "\n".join(line for line in DEBUG.read_text().splitlines() if "train_iters" not in line)
    path = folder / "staged.toml"
    path.write_text(text + TABLES.format(text=folder) + f"[data]\ncache_dir = '{cache_dir}'\n" * ("[data]" not in text))
    return path


def run(recipe: Path, run_dir: Path, nproc: int, *flags: str) -> tuple[int, str]:
    """Its exit code, and what it said of its mistakes."""
    arguments = [str(recipe), "--run_dir", str(run_dir), "--nproc", str(nproc), "--device", "cpu", *PLAIN, *flags]
    program = Program(arguments, run_dir.with_suffix(".output"))
    _, errors = program.communicate()
    assert program.returncode is not None
    return program.returncode, errors


def trained(run_dir: Path) -> dict[int, tuple[float, float, int]]:
    """By iteration: loss, learning rate and consumed samples; where one ran twice, the later."""
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
    return {one["iteration"]: (one["loss"], one["learning_rate"], one["consumed_samples"]) for one in lines}


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    (recipe.parent / "counting.py").write_text(COUNTING)
    assert run(recipe, folder, 1, "--train.callbacks", "counting:Watchdogs")[0] == 0
    return folder


COUNTING = """
import subprocess, os
from training.loop import Callback

class Watchdogs(Callback):
    def after_step(self, progress, result):
        found = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
        with open(os.path.join(os.path.dirname(__file__), "watchdogs"), "a") as file:
            print(found.count("training.watchdog.watchdog"), file=file)
"""


def entries(run_dir: Path, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / f"checkpoints/iter_{iteration:07}/state.json").read_text())
    return found["entries"]  # type: ignore[no-any-return]


def test_stages_follow_one_another(recipe: Path, undisturbed: Path) -> None:
    lines = [line for line in read_jsonl(undisturbed / "metrics.jsonl") if "loss" in line]
    assert [line["stage"] for line in lines] == [1] * 3 + [2] * 3 + [3] * 4
    assert lines[-1]["consumed_tokens"] == 3 * 8 * 64 + 7 * 4 * 96
    events = Counter(event.event for event in read_history(undisturbed))
    assert (events["stage"], events["start"]) == (3, 3)
    assert lines[-1]["restarts"] == 0
    # one watchdog in each stage: that of the stage before would take this process for one that stands still
    assert (recipe.parent / "watchdogs").read_text().split() == ["1"] * 10
    assert (undisturbed / "done").read_text() == "10\n"
    found = [path.name for path in complete(undisturbed / "checkpoints")]
    assert found == [f"iter_{number:07}" for number in (3, 6, 8, 10)]  # two, and stages' ends
    # the run's recipe is the whole one; a checkpoint's that of its stage
    assert len(load(undisturbed / "config.toml").stage) == 3
    of_stage = load(undisturbed / "checkpoints/iter_0000006/config.toml")
    assert (of_stage.model.seq_length, of_stage.model.rotary_base, of_stage.stage) == (96, 500_000, ())
    # 12 samples of a and b in equal shares, then 16 of which 12 are b's, which go on behind its first 6
    last, read = stages(load(undisturbed / "config.toml"))[2], entries(undisturbed, 10)["order"]
    b, a = source_keys(prepare(last, None), last.data, 96)
    assert (read["iteration"], read["samples"]) == (6, 36)
    assert [[read[when][key][1] for key in (a, b)] for when in ("before", "now")] == [[6, 6], [10, 18]]
    assert sum(count for _, count, _ in read["now"].values()) == 24 + 12 + 16


@pytest.mark.campaign  # every day: test_random_stages.py
def test_killed_and_stopped_in_other_layouts_it_is_the_same(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir, expected = tmp_path / "run", trained(undisturbed)
    (recipe.parent / "killing.py").write_text(KILLING)
    assert run(recipe, run_dir, 2, *TP2, "--train.callbacks", "killing:Kill")[0] != 0
    assert max(trained(run_dir)) == 4  # killed before its line was written
    # within a stage, a layout of another kind, to a multiple that is no stage's end; then the rest
    assert run(recipe, run_dir, 2, "--train.exit_interval", "8")[0] == 0
    assert max(trained(run_dir)) == 8 and not (run_dir / "done").exists()
    assert run(recipe, run_dir, 2, "--parallel.pipeline_model_parallel_size", "2")[0] == 0
    found = trained(run_dir)
    assert [one[1:] for one in found.values()] == [one[1:] for one in expected.values()]
    np.testing.assert_allclose([one[0] for one in found.values()], [one[0] for one in expected.values()], rtol=2e-5)
    assert entries(run_dir, 10)["order"] == entries(undisturbed, 10)["order"]


KILLING = """
import os, signal
from training.loop import Callback

class Kill(Callback):
    def after_step(self, progress, result):
        if progress.iteration == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.campaign  # half a minute
def test_ranks_of_torchrun_meet_again_for_each_stage(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    flags = [str(recipe), "--run_dir", str(run_dir), "--device", "cpu", *PLAIN]
    found = subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *flags], capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr[:2000]
    expected = trained(undisturbed)
    losses = [one[0] for one in trained(run_dir).values()]
    np.testing.assert_allclose(losses, [one[0] for one in expected.values()], rtol=2e-5)


def test_a_mistake_in_a_later_stage_shows_before_the_first(recipe: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    for old, new, words in (
        ("b.txt", "c.txt", 'stage "long": data.blend: no file or .bin/.idx prefix'),
        ("global_batch_size = 4", "global_batch_size = 5", 'stage "long": train.global_batch_size 5 is not a multiple'),
    ):
        broken.write_text(recipe.read_text().replace(old, new))
        code, errors = run(broken, tmp_path / "run", 2)
        assert code == 2 and words in errors
        assert not (tmp_path / "run/metrics.jsonl").exists()


def test_what_is_over_stays_as_it_was(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The recipe is edited, the newest checkpoint lost: what was, was."""
    run_dir, moved = tmp_path / "run", recipe.with_name("moved.toml")
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "checkpoints/iter_0000010")
    moved.write_text(recipe.read_text().replace("until_iterations = 6", "until_iterations = 5"))
    assert run(moved, run_dir, 1)[0] == 0
    assert trained(run_dir) == trained(undisturbed)
    moved.write_text(recipe.read_text().replace('name = "long"', 'name = "longer"'))
    code, errors = run(moved, run_dir, 1)
    assert code == 2 and "has begun first, long, anneal, and the recipe's first tables are first, longer" in errors


def test_a_run_falls_back_into_an_earlier_stage(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    for number in (6, 10):
        shutil.rmtree(run_dir / f"checkpoints/iter_{number:07}")
    tensors = run_dir / "checkpoints/iter_0000008/rank_00000.bin"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    code, errors = run(recipe, run_dir, 1, "--checkpoint.verify", "hashes")
    assert code == 1 and 'ends at iteration 3, and stage "anneal" (3 of 3) is from 6 to 10' in errors
    assert run(recipe, run_dir, 1)[0] == 0
    assert trained(run_dir) == trained(undisturbed)


def test_a_request_to_stop_at_a_stages_end_is_heard(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (recipe.parent / "stopping.py").write_text(KILLING.replace("== 5", "== 3").replace("SIGKILL", "SIGTERM"))
    assert run(recipe, run_dir, 1, "--train.callbacks", "stopping:Kill")[0] == 75
    assert max(trained(run_dir)) == 3
    assert run(recipe, run_dir, 1, "--train.exit_interval", "5")[0] == 0
    assert list(trained(run_dir).items()) == list(trained(undisturbed).items())[:5]
