"""A user's mistake ends ``pretrain_gpt.py`` with one message, exit code 2, no traceback, and nothing damaged."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from campaign import some
from data.shard_writer import ShardWriter
from parallel.launch import node_name
from training.cli import parse
from training.start import ranks

ROOT = Path(__file__).resolve().parent.parent.parent
DEBUG = str(ROOT / "slurm/recipes/debug.toml")


class Refused(Protocol):
    """Runs the real main in this process; returns what it says when it leaves with code 2."""

    def __call__(self, *argv: str, run_dir: str | Path | None = None) -> str: ...


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """See ``Refused``. Its run folder and cache are the test's own."""

    def run(*argv: str, run_dir: str | Path | None = None) -> str:
        folders = ["--run_dir", str(run_dir or tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")]
        arguments = ["pretrain_gpt.py", *argv, *folders]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers would outlive the test
        with pytest.raises(SystemExit) as left:
            sys.exit(ranks.main(sys.argv[1:], os.environ))
        printed = capfd.readouterr()
        assert left.value.code == 2
        assert "Traceback" not in printed.err + printed.out
        assert printed.err.count("pretrain_gpt.py: ") == 1
        return printed.err

    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--nproc 3 --parallel.tensor_model_parallel_size 2",
            ["3 ranks cannot be split", "TP 2 x CP 1 x PP 1 = 2", "Launch 2 or 4 ranks", "parallel.tensor_model"],
        ),
        (
            "--nproc 3 --parallel.tensor_model_parallel_size 3",
            ["model.num_attention_heads 4 is not divisible by parallel.tensor_model_parallel_size 3", "1, 2, 4"],
        ),
        (
            "--nproc 4 --parallel.tensor_model_parallel_size 4 --model.num_query_groups 3",
            ["model.num_query_groups 3 neither divides nor is divided by parallel.tensor_model_parallel_size 4"],
        ),
        (
            "--nproc 4 --parallel.pipeline_model_parallel_size 4 --model.num_layers 6",
            ["model.num_layers 6 is not a multiple of PP 4 x VPP 1", "Use 4 or 8 layers"],
        ),
        (
            "--nproc 2 --parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 3",
            ["PP 2 x VPP 3 = 6 chunks", "Use 6 layers"],
        ),
        (
            "--nproc 2 --parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel --model.seq_length 65",
            ["model.seq_length 65 is not divisible by TP 2 x CP 1", "Use 64 or 66"],
        ),
        ("--nproc 2 --parallel.context_parallel_size 2 --model.seq_length 65", ["2 x CP 2", "64 or 68"]),
        (
            "--nproc 2 --train.global_batch_size 7",
            ["train.global_batch_size 7 is not a multiple of train.micro_batch_size 1 x DP 2 = 2", "Use 6 or 8"],
        ),
        ("--model.shape lama3_8b", ['model.shape "lama3_8b" is unknown', "Did you mean llama3_8b"]),
        ("--train.train_itres 3", ["unknown flag --train.train_itres", "--train.train_iters"]),
        ("--train.train_iters many", ["--train.train_iters: expected a whole number, found many"]),
    ],
)
def test_a_bad_configuration(refused: Refused, flags: str, words: list[str], tmp_path: Path) -> None:
    message = refused(DEBUG, *flags.split())
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


def test_all_problems_at_once(refused: Refused) -> None:
    flags = """--nproc 3 --parallel.pipeline_model_parallel_size 2 --model.num_query_groups 3
        --train.micro_batch_size 3 --checkpoint.keep 0"""
    message = refused(DEBUG, *flags.split())
    assert "4 problems with this configuration" in message
    assert all(word in message for word in ("3 ranks", "num_query_groups", "micro_batch_size", "checkpoint.keep"))


def test_a_dry_run_is_refused_as_the_run_would_be(refused: Refused) -> None:
    flags = "--dry_run --world_size 3 --parallel.tensor_model_parallel_size 2"
    assert "3 ranks cannot be split" in refused(DEBUG, *flags.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\ntrain_itres = 3\n", ["unknown key train.train_itres", "train.train_iters"]),
        ('[train]\ntrain_iters = "3"\n', ['train.train_iters: expected a whole number, found "3"']),
        ("[train\n", ["not valid TOML"]),
    ],
)
def test_a_bad_recipe(refused: Refused, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    message = refused(str(path))
    assert all(word in message for word in [str(path), *words]), message


def test_a_missing_recipe(refused: Refused) -> None:
    assert "no such recipe" in refused("nowhere.toml")


def test_a_run_folder_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(DEBUG, run_dir=tmp_path / "file/run")
    assert f"run_dir {tmp_path / 'file/run'}: cannot be written" in message
    assert "--run_dir" in message


def test_a_log_that_cannot_be_opened(refused: Refused, tmp_path: Path) -> None:
    log = tmp_path / f"run/logs/node-{node_name(os.environ)}.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("nowhere/log")
    assert f"{log}: cannot be opened: No such file or directory" in refused(DEBUG, run_dir=tmp_path / "run")


def test_a_missing_data_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    message = refused(DEBUG, "--data.paths", str(tmp_path / "corups.txt"))
    assert f"no file or .bin/.idx prefix {tmp_path / 'corups.txt'}" in message
    assert "corpus.txt" in message


def test_an_empty_corpus(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    assert "empty corpus" in refused(DEBUG, "--data.paths", str(tmp_path / "corpus.txt"))


def shard(prefix: Path) -> Path:
    """A shard of 1,000 tokens of two bytes."""
    with ShardWriter(prefix, vocab_size=257) as writer:
        writer.add(np.arange(1000) % 256)
        writer.end_document()
    return prefix


def test_a_truncated_shard(refused: Refused, tmp_path: Path) -> None:
    data = shard(tmp_path / "tokens").with_name("tokens.bin")
    data.write_bytes(data.read_bytes()[:-2])
    message = refused(DEBUG, "--nproc", "2", "--data.paths", str(tmp_path / "tokens"))
    assert f"{data} has 1998 bytes where tokens.idx promises 2000" in message
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_corpus_that_fills_no_sample(refused: Refused, tmp_path: Path) -> None:
    shard(tmp_path / "tokens")
    message = refused(DEBUG, "--data.paths", str(tmp_path / "tokens"), "--model.seq_length", "1000")
    assert "model.seq_length" in message
    assert "1000 tokens" in message


def test_the_vocabulary_must_hold_the_tokenizers_ids(refused: Refused) -> None:
    assert "model.vocab_size is 100, but the tokenizer has 257 ids" in refused(DEBUG, "--model.vocab_size", "100")


@pytest.mark.parametrize(
    ("flag", "rank", "local_rank", "shown"),
    [
        ("--train.micro_batch_size=3", 0, 0, True),
        ("--train.micro_batch_size=3", 1, 1, False),
        ("--train.micro_batch_size=3", 8, 0, False),  # the first of another node: rank 0 has found the same
        ("--run_dir=/dev/null/run", 0, 0, True),
        ("--run_dir=/dev/null/run", 1, 1, False),
        ("--run_dir=/dev/null/run", 8, 0, True),  # that node may be the only one without the folder
    ],
)
def test_of_a_launchers_ranks_one_shows_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    flag: str, rank: int, local_rank: int, shown: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(parse, "QUIET_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers would outlive the test
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", DEBUG, "--train.global_batch_size=16", flag])
    places = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8}
    for name, value in {**places, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as left:
        ranks.main(sys.argv[1:], os.environ)
    assert left.value.code == 2
    assert ("pretrain_gpt.py: " in capfd.readouterr().err) is shown


def test_a_fresh_process_says_the_same(tmp_path: Path) -> None:
    flags = f"--nproc 2 --train.micro_batch_size 3 --run_dir {tmp_path}/run"
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", DEBUG, *flags.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pretrain_gpt.py: 1 problem with this configuration:")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("train.seed = " + "1" * 400, "train.seed: expected a whole number of 64 bits"),
        ("train.seed = " + "1" * 5000, "not valid TOML: Exceeds the limit"),
        ("optimizer.lr = 1" + "0" * 399, "optimizer.lr: expected a finite number"),
        ("optimizer.lr = nan", "optimizer.lr: expected a finite number"),
        ("data.paths = " + "[" * 5000 + "]" * 5000, "nest too deep"),
        ("[" + ".".join("abc" * 100) + "]\nx = 1", "a key of more than 64 parts"),
        ('run_dir = "a\\u0000b"', "run_dir: expected text, found a control character (U+0000)"),
        ('model.shape = "\\u001b[31mred"', "model.shape: expected text, found a control character (U+001B)"),
        ("model.num_layers = 4\x00", "not valid TOML"),
        ("model.num_layers = true", "model.num_layers: expected a whole number, found true"),
        ("[model]\nnum_layers = 1000000000", "model.num_layers must be at most 10,000"),
        (
            'parallel.pipeline_model_parallel_layout = "' + "(" * 9 + "t" + ")*999" * 9 + '"',
            "pipeline_model_parallel_layout",
        ),
        ('model.megatron = ["moe_router_topk=' + "(" * 9000 + '"]', "moe_router_topk is set by Triplane's own fields"),
    ],
    ids=range(13),
)
def test_a_hostile_recipe_is_one_message(recipe: str, said: str, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(recipe)
    printed = refused(str(path), "--dry_run")
    assert said in printed
    assert len(printed) < 3000


def test_a_recipe_of_another_encoding_or_kind(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfet\x00")
    assert "recipe.toml: byte 0: expected UTF-8 text, found 0xff" in refused(str(path))
    path.unlink()
    os.mkfifo(path)
    assert "recipe.toml: expected a regular file, found a FIFO" in refused(str(path))
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "recipe.toml: expected a regular file, found a device" in refused(str(path))
    path.unlink()
    path.write_bytes(b"\xef\xbb\xbfmodel.num_layers = 0\r\n")  # as some editors write it: no mistake
    assert "model.num_layers must be 1 or more" in refused(str(path))


COUNTS = (
    "model.num_layers", "model.num_attention_heads", "parallel.tensor_model_parallel_size", "train.train_iters",
    "train.global_batch_size", "world_size", "nproc", "model.vocab_size", "data.stream_count", "checkpoint.keep",
)  # fmt: skip
ABSURD = ("1e18", str(2**62), str(2**80), "1" * 400, "1" * 5000, "-" + "9" * 30)
TURNS = {(flag, ABSURD[number % 6]) for number, flag in enumerate(COUNTS)}


@pytest.mark.parametrize(("flag", "value"), some(itertools.product(COUNTS, ABSURD), TURNS))
def test_absurd_numbers_are_refused_at_once(flag: str, value: str, refused: Refused) -> None:
    printed = refused(DEBUG, f"--{flag}={value}", "--dry_run")
    assert flag in printed
    assert len(printed) < 1000
