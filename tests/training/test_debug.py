"""``--debug``: what it changes, which flags win, and that two such runs of a layout are equal bit by bit."""

from pathlib import Path
from typing import Any

import pytest

import runs
from programs import Program
from tools import nccl_env
from training.cli import parse
from training.cli.dry_run import describe
from training.config.debug import ENVIRONMENT, debugged
from training.config.run_config import RunConfig
from training.metrics.jsonl import read_jsonl

SEEN = """
import torch
from parallel.ddp import unwrap
from training.loop import Callback


class Seen(Callback):
    def __init__(self, run):
        embedding = unwrap(run.chunks[0]).embedding.word_embeddings.deterministic_mode
        switches = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), embedding
        (run.run_dir / f"seen-{run.ranks.rank}").write_text(str(switches))

    def start(self, progress): ...
"""
LAYOUT = "--nproc 2 --parallel.overlap_grad_reduce".split()
SHORT = "--train.train_iters 2 --log.tensorboard False --log.report False --log.log_interval 2".split()


def asked(*flags: str) -> tuple[RunConfig, frozenset[str]]:
    argv = [str(runs.DEBUG), "--debug", *flags]
    return parse.parse_config(argv), parse.explicit_fields(argv)


def changes(*flags: str, world_size: int = 4, environ: dict[str, str] | None = None, cuda: bool = False) -> Any:
    config, explicit = asked(*flags)
    return debugged(config, world_size, explicit, environ or {}, cuda=cuda)


def test_without_it_nothing_changes() -> None:
    config = parse.parse_config([str(runs.DEBUG)])
    found = debugged(config, 4, frozenset(), {}, cuda=True)
    assert found.config is config and not found.lines and not found.environ


def test_it_says_what_it_changes_and_leaves_a_configuration_that_says_the_same() -> None:
    found = changes("--parallel.tensor_model_parallel_size", "2")
    config = found.config
    assert not config.debug and config.problems(4) == []
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (2, 1)
    assert config.train.deterministic_mode and config.train.detect_anomaly and not config.checkpoint.async_save
    assert (config.fault.replica_check_interval, config.fault.nonfinite, config.log.ranks) == (1, "stop", "all")
    assert found.lines[0] == f"--debug changes {len(found.lines) - 1} settings:"
    assert any(
        line.split()[:4] == ["train.global_batch_size", "8", "->", "2"] and line.endswith("micro_batch_size 1 x DP 2")
        for line in found.lines
    )
    again = debugged(parse.load(runs.DEBUG), 4, frozenset(), {}, cuda=False)
    assert again.lines == []


@pytest.mark.parametrize(
    "flags, size",
    [
        ("--train.micro_batch_size 2", 8),
        ("--parallel.pipeline_model_parallel_size 4", 1),
        ("--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2", 4),
        ("--train.rampup_batch_size 4 4 100", 4),
    ],
)
def test_one_microbatch_is_as_much_as_the_layout_needs(flags: str, size: int) -> None:
    found = changes(*flags.split())
    assert found.config.train.global_batch_size == size
    assert found.config.problems(4) == []


def test_ranks_that_make_no_whole_replicas_are_left_to_the_check_of_the_layout() -> None:
    found = changes("--parallel.tensor_model_parallel_size", "2", world_size=3)
    assert found.config.train.global_batch_size == 8 and "3 ranks cannot be split" in found.config.problems(3)[0]


def test_a_flag_wins_and_is_named() -> None:
    flags = ("--log.log_interval", "5", "--checkpoint.async_save", "True", "--train.global_batch_size=16")
    found = changes(*flags, "--kernels.cuda-graph-impl", "local", cuda=True)
    config = found.config
    assert (config.log.log_interval, config.checkpoint.async_save, config.train.global_batch_size) == (5, True, 16)
    assert config.kernels.cuda_graph_impl == "local"
    assert "  your flag wins: checkpoint.async_save stays true (--debug: false)" in found.lines
    assert '  your flag wins: kernels.cuda_graph_impl stays "local" (--debug: "none")' in found.lines
    assert len([line for line in found.lines if "your flag wins" in line]) == 4


def test_the_environment_wins_and_libraries_read_what_is_set() -> None:
    found = changes(environ={"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "20000"}, cuda=True)
    assert found.environ.keys() == ENVIRONMENT.keys() - {"NCCL_DEBUG", "TORCH_FR_BUFFER_SIZE"}
    assert "  your environment wins: NCCL_DEBUG stays INFO (--debug: WARN)" in found.lines
    assert changes().environ == {}
    assert nccl_env.warnings({name: value for name, (value, _) in ENVIRONMENT.items()}, "debug") == []


def test_shared_experts_do_not_overlap() -> None:
    found = changes("--model.shape", "deepseek_v3_tiny", cuda=True)
    assert found.config.kernels.off == ("moe_shared_expert_overlap",)
    flag = ("--kernels.off", "moe_grouped_gemm")  # which the list keeps
    both = changes("--model.shape", "deepseek_v3_tiny", *flag, cuda=True).config.kernels
    assert both.off == ("moe_grouped_gemm", "moe_shared_expert_overlap")


def test_a_dry_run_shows_the_same() -> None:
    config, explicit = asked("--dry_run", "--world_size", "2", "--log.log_interval", "5")
    text = describe(config, explicit)
    assert "# --debug changes " in text and "\n#   your flag wins: log.log_interval stays 5" in text
    assert "global_batch_size = 2\n" in text and "debug = false" in text


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same command twice, on DP 2, in two folders."""
    folder = tmp_path_factory.mktemp("debug")
    (folder / "seen.py").write_text(SEEN)
    (folder / "recipe.toml").write_text(runs.DEBUG.read_text())
    flags = [*LAYOUT, *SHORT, "--debug", "--train.callbacks", "seen:Seen"]
    recipe = str(folder / "recipe.toml")
    names = ("one", "two")
    for program in [Program([recipe, "--run_dir", str(folder / name), *flags], folder / name) for name in names]:
        out, err = program.communicate()
        assert program.returncode == 0, err
        assert "\n  parallel.overlap_grad_reduce" not in out
        assert "  your flag wins: parallel.overlap_grad_reduce stays true (--debug: false)" in out
        assert out.index("--debug changes ") < out.index("2 ranks (local, cpu): TP 1 x PP 1 x DP 2")
    return [folder / "one", folder / "two"]


def test_two_runs_are_equal_bit_by_bit(two: list[Path]) -> None:
    losses = [[(line["loss"], line["grad_norm"]) for line in read_jsonl(one / "metrics.jsonl")] for one in two]
    assert losses[0] == losses[1]
    weights = [sorted((one / "checkpoints/iter_0000002").glob("*.bin")) for one in two]
    assert [path.name for path in weights[0]] == [path.name for path in weights[1]] and len(weights[0]) == 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*weights, strict=True))


def test_every_rank_has_the_switches_and_a_log(two: list[Path]) -> None:
    for rank in range(2):
        assert (two[0] / f"seen-{rank}").read_text() == "(True, True, True)"
        assert (two[0] / f"logs/rank-{rank:05}.log").is_file()


def test_its_config_runs_the_same_job_again(two: list[Path]) -> None:
    config = parse.load(two[0] / "config.toml")
    assert not config.debug and config.train.deterministic_mode and config.train.global_batch_size == 2
    assert config.parallel.overlap_grad_reduce and config.log.log_interval == 2
