"""Training on blends and in Megatron's order, through the whole program."""

from pathlib import Path

import numpy as np
import pytest

from data.shard_writer import ShardWriter
from runs import configuration, losses, train, train_or_fail
from training.metrics.jsonl import read_jsonl
from training.preparing import prepare


def shard(prefix: Path, seed: int) -> Path:
    """Documents of random bytes."""
    draw = np.random.default_rng(seed)
    with ShardWriter(prefix, 257) as writer:
        for _ in range(100):
            writer.add(draw.integers(0, 256, 200))
            writer.end_document()
    return prefix


def test_a_blend_resumed_on_another_layout_gives_the_same_losses(tmp_path: Path) -> None:
    weights = (str(shard(tmp_path / "a", 1)), "0.7", str(shard(tmp_path / "b", 2)), "0.3")
    flags = ("--data.blend", *weights, "--data.cache_dir", str(tmp_path / "cache"), "--train.train_iters", "4")
    whole_config = configuration(tmp_path / "whole", *flags)
    prepared = prepare(whole_config, None)
    whole = train(prepared, whole_config, 1)
    assert whole[-1].keys() >= {f"epoch/{tmp_path / 'a'}", f"epoch/{tmp_path / 'b'}"}
    train(prepared, configuration(tmp_path / "run", *flags, "--train.exit_interval", "2"), 2)
    resumed = train(prepared, configuration(tmp_path / "run", *flags), 1)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


def test_other_weights_on_resume_are_refused(tmp_path: Path) -> None:
    one, other = str(shard(tmp_path / "a", 1)), str(shard(tmp_path / "b", 2))
    flags = ("--data.cache_dir", str(tmp_path / "cache"), "--train.train_iters", "2")
    config = configuration(tmp_path / "run", "--data.blend", one, "1", other, "1", *flags)
    train(prepare(config, None), config, 1)
    config = configuration(tmp_path / "run", "--data.blend", one, "3", other, "1", *flags)
    code, failure = train_or_fail(prepare(config, None), config, 1)
    assert code == 2
    assert failure is not None
    assert f"source {one} is" in failure.text
    assert "'weight': 786432" in failure.text


def test_megatrons_order_pins_the_length_of_training(tmp_path: Path) -> None:
    flags = ("--data.order", "megatron", "--data.paths", str(shard(tmp_path / "a", 1)))
    flags += ("--data.cache_dir", str(tmp_path / "cache"), "--train.train_iters", "3")
    config = configuration(tmp_path / "run", *flags, "--train.exit_interval", "2")
    train(prepare(config, None), config, 2)
    longer = configuration(tmp_path / "run", *flags[:-1], "9")
    code, failure = train_or_fail(prepare(longer, None), longer, 1)
    assert code == 2
    assert failure is not None
    assert "megatron_train_samples is" in failure.text
    train(prepare(config, None), configuration(tmp_path / "run", *flags), 1)
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["iteration"] == 3
