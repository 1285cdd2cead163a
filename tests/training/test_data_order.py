"""Training on blends and in Megatron's order, through the whole program."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.shard_writer import ShardWriter
from runs import configuration, losses, train, train_or_fail
from training.metrics.jsonl import read_jsonl
from training.start.prepare import prepare

NO_REPORT = ("--log.report", "False")
SHORT = ("--train.train_iters", "2", *NO_REPORT)


def shard(prefix: Path, seed: int) -> Path:
    """Documents of random bytes."""
    draw = np.random.default_rng(seed)
    with ShardWriter(prefix, 257) as writer:
        for _ in range(100):
            writer.add(draw.integers(0, 256, 200))
            writer.end_document()
    return prefix


@pytest.mark.campaign
def test_a_blend_resumed_on_another_layout_gives_the_same_losses(tmp_path: Path) -> None:
    weights = (str(shard(tmp_path / "a", 1)), "0.7", str(shard(tmp_path / "b", 2)), "0.3")
    flags = (
        "--data.blend",
        *weights,
        *NO_REPORT,
        "--data.cache_dir",
        str(tmp_path / "cache"),
        "--train.train_iters",
        "2",
    )
    whole_config = configuration(tmp_path / "whole", *flags)
    prepared = prepare(whole_config, None)
    whole = train(prepared, whole_config, 1)
    assert whole[-1].keys() >= {f"epoch/{tmp_path / 'a'}", f"epoch/{tmp_path / 'b'}"}
    train(prepared, configuration(tmp_path / "run", *flags, "--train.exit_interval", "1"), 2)
    resumed = train(prepared, configuration(tmp_path / "run", *flags), 1)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.campaign  # a killed run: checkpoint/test_kills.py; where a blend goes on: above
def test_kill_9_at_a_random_point_changes_no_batch(tmp_path: Path) -> None:
    """A rank dies at an arbitrary moment; what follows is bit for bit what would have followed."""
    draw = random.Random(0)
    weights = (str(shard(tmp_path / "a", 1)), "0.7", str(shard(tmp_path / "b", 2)), "0.3")
    flags = ("--data.blend", *weights, "--data.cache_dir", str(tmp_path / "cache"), "--train.train_iters", "12",
             "--checkpoint.save_interval", "3", "--train.eval_interval", "None")  # fmt: skip
    prepared = prepare(configuration(tmp_path / "whole", *flags), None)
    whole = by_iteration(train(prepared, configuration(tmp_path / "whole", *flags), 2))
    killer = kill_a_child_later(draw.randrange(4, 8), tmp_path / "run/metrics.jsonl", draw)
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", *flags), 2)
    os.waitpid(killer, 0)
    assert code != 0
    assert failure is not None
    assert "SIGKILL" in failure.text
    assert len(by_iteration(read_jsonl(tmp_path / "run/metrics.jsonl"))) < 12
    assert by_iteration(train(prepared, configuration(tmp_path / "run", *flags), 2)) == whole


def by_iteration(metrics: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Losses; of iterations that were trained twice, the later ones."""
    return {line["iteration"]: line["loss"] for line in metrics if "loss" in line}


def command(pid: int) -> bytes:
    """A process' command line; empty of one that has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def kill_a_child_later(iteration: int, metrics: Path, draw: random.Random) -> int:
    """Fork a process that kills any of this one's children some time after an iteration: its pid."""
    parent, delay_s = os.getpid(), draw.uniform(0, 0.1)
    if pid := os.fork():
        return pid
    try:
        while not metrics.exists() or metrics.read_text().count('"loss"') < iteration:
            time.sleep(0.005)
        time.sleep(delay_s)
        children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        forked = [child for child in children if child != os.getpid() and command(child) == command(parent)]
        os.kill(draw.choice(forked), signal.SIGKILL)  # a rank: the tests' SLURM has daemons that are children, too
    finally:
        os._exit(0)  # never back into the tests


def test_other_weights_on_resume_are_refused(tmp_path: Path) -> None:
    one, other = str(shard(tmp_path / "a", 1)), str(shard(tmp_path / "b", 2))
    flags = ("--data.cache_dir", str(tmp_path / "cache"), *NO_REPORT, "--train.train_iters", "1")
    config = configuration(tmp_path / "run", "--data.blend", one, "1", other, "1", *flags)
    train(prepare(config, None), config, 1)
    config = configuration(tmp_path / "run", "--data.blend", one, "3", other, "1", *flags)
    code, failure = train_or_fail(prepare(config, None), config, 1)
    assert code == 2
    assert failure is not None
    assert f"weight of source {one}: 786432 (was: 524288)" in failure.text


@pytest.mark.campaign
def test_megatrons_order_pins_the_length_of_training(tmp_path: Path) -> None:
    flags = ("--data.order", "megatron", "--data.paths", str(shard(tmp_path / "a", 1)))
    flags += ("--data.cache_dir", str(tmp_path / "cache"), *NO_REPORT, "--train.train_iters", "2")
    config = configuration(tmp_path / "run", *flags, "--train.exit_interval", "1")
    train(prepare(config, None), config, 2)
    longer = configuration(tmp_path / "run", *flags[:-1], "9")
    code, failure = train_or_fail(prepare(longer, None), longer, 1)
    assert code == 2
    assert failure is not None
    assert "megatron_train_samples is" in failure.text
    train(prepare(config, None), configuration(tmp_path / "run", *flags), 1)
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["iteration"] == 2
