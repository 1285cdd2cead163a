"""``parallel.elastic``: the layout that runs where the ranks do not fit the one that was asked for."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign import some
from programs import Program
from training.cli.elastic import elastic_layout
from training.cli.flags import override
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.metrics.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[3]
DEBUG = ROOT / "slurm/recipes/debug.toml"


def asked(*flags: str) -> RunConfig:
    """A tiny model of four layers, with ``parallel.elastic``."""
    words = ("--parallel.elastic", "True", "--model.num_layers", "4", *flags)
    return override(load(DEBUG), words, prog="")


def sizes(*pairs: int) -> tuple[str, ...]:
    """Flags of TP, PP and the global batch."""
    tp, pp, batch = pairs
    return (
        "--parallel.tensor_model_parallel_size", str(tp), "--parallel.pipeline_model_parallel_size", str(pp),
        "--train.global_batch_size", str(batch), "--train.micro_batch_size", "1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "pp", "batch", "given_ranks", "expected"),
    [
        (2, 1, 8, 8, (2, 1, 8)),  # fits as it is
        (2, 1, 8, 6, (2, 1, 4)),  # DP 3 does not divide 8 samples
        (2, 1, 6, 7, (2, 1, 6)),  # one rank too many for replicas of 2
        (1, 4, 8, 3, (1, 2, 2)),  # no room for PP 4; four layers are not divided by 3
        (4, 2, 8, 6, (4, 1, 4)),  # another PP, before another TP
        (4, 1, 8, 3, (2, 1, 2)),  # another TP at last: one that divides the old one
        (2, 2, 4, 1, (1, 1, 1)),
    ],
)
def test_the_nearest_layout_that_works(
    tp: int, pp: int, batch: int, given_ranks: int, expected: tuple[int, int, int]
) -> None:
    config = asked(*sizes(tp, pp, batch), "--parallel.num_layers_in_first_pipeline_stage", "None")
    found = elastic_layout(config, given_ranks)
    parallel = found.config.parallel
    got = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, found.world_size)
    assert got == expected, found.words
    assert bool(found.words) == (bool(config.problems(given_ranks)))
    assert not found.config.problems(found.world_size)


def test_words_say_what_changed_what_idles_and_the_way_out() -> None:
    found = elastic_layout(asked(*sizes(2, 1, 8)), 6)
    assert "TP 2 x PP 1 x DP 2 on 4 ranks" in found.words
    assert "2 of 6 ranks stay idle (train.global_batch_size 9 would use 6 of them)" in found.words
    found = elastic_layout(asked(*sizes(4, 2, 8)), 6)
    assert "pipeline_model_parallel_size 1 (was: 2)" in found.words


def test_details_of_the_old_stages_fall_away() -> None:
    config = asked(*sizes(1, 4, 8), "--parallel.pipeline_model_parallel_layout", "Et|t|t|tL")
    found = elastic_layout(config, 2)
    assert found.config.parallel.pipeline_model_parallel_layout is None
    assert "pipeline_model_parallel_layout None (was: Et|t|t|tL)" in found.words


def test_copies_of_shards_become_fewer_where_ranks_are_missing() -> None:
    flags = "--parallel.data_parallel_sharding_strategy HYBRID_SHARD --parallel.num_distributed_optimizer_instances"
    config = asked(*sizes(1, 1, 12), *flags.split(), "4")
    for given_ranks, copies in ((12, 4), (6, 4), (3, 1), (1, 1)):
        found = elastic_layout(config, given_ranks)
        assert found.config.parallel.num_distributed_optimizer_instances == copies
        assert not found.config.problems(found.world_size)
    assert "data_parallel_sharding_strategy FULL_SHARD (was: HYBRID_SHARD)" in found.words
    assert "num_distributed_optimizer_instances 1 (was: 4)" in found.words


def test_without_it_and_with_other_mistakes_nothing_is_changed() -> None:
    config = asked(*sizes(2, 2, 8))
    off = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, elastic=False))
    assert elastic_layout(off, 3).config == off and off.problems(3)
    wrong = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_iters=-1))
    assert elastic_layout(wrong, 3).config == wrong and elastic_layout(wrong, 3).world_size == 3


@settings(max_examples=20)
@given(tp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 4), batch=st.integers(1, 24), ranks=st.integers(1, 24))
def test_what_is_found_always_runs(tp: int, pp: int, batch: int, ranks: int) -> None:
    config = asked(*sizes(tp, pp, batch))
    found = elastic_layout(config, ranks)
    assert found.world_size <= ranks
    assert not found.config.problems(found.world_size)
    assert found.config.train == config.train and found.config.model == config.model


SHARDS = "--parallel.data_parallel_sharding_strategy zero3 --parallel.num_distributed_optimizer_instances 4".split()


MORE: dict[str, tuple[tuple[str, ...], str]] = {
    "PP2": (sizes(1, 2, 4), "TP 1 x PP 2 x DP 1"),
    "copies of shards": ((*sizes(1, 1, 4), *SHARDS), "num_distributed_optimizer_instances 2 (was: 4)"),
}


@pytest.mark.parametrize("name", some(MORE, ("PP2",)))  # the layouts themselves, above
def test_a_run_goes_on_with_fewer_ranks(name: str, tmp_path: Path, cache_dir: Path) -> None:
    """A step on four ranks; then three are left, and the next step sees the samples that were due."""
    more, words = MORE[name]
    flags = ["--data.cache_dir", str(cache_dir), "--device", "cpu", "--log.tensorboard", "False", "--log.report"]
    flags += ["False", *more]

    def pretrain(run_dir: Path, nproc: int, iterations: int) -> str:
        arguments = [str(DEBUG), *flags, "--parallel.elastic", "True", "--nproc", str(nproc)]
        arguments += ["--train.exit_interval", str(iterations), "--run_dir", str(run_dir)]
        run = Program(arguments, tmp_path / "program")
        printed, said = run.communicate()
        assert run.returncode == 0, said
        return printed

    pretrain(tmp_path / "whole", 1, 2)
    pretrain(tmp_path / "fewer", 4, 1)
    printed = pretrain(tmp_path / "fewer", 3, 2)
    assert "1 of 3 ranks stay idle" in printed and words in printed
    whole, fewer = (losses(tmp_path / name) for name in ("whole", "fewer"))
    assert list(fewer) == list(whole) == [1, 2]
    assert fewer == pytest.approx(whole, rel=1e-5)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by iteration."""
    return {line["iteration"]: line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line}
