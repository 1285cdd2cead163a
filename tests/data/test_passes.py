"""How often a training reads its text: what --dry_run says from headers is what the run says from its samples."""

from pathlib import Path

import numpy as np
import pytest

from data import passes
from data.prepared import SourceProgress
from data.shard_writer import ShardWriter
from training.cli.dry_run import describe
from training.cli.parse import parse_config
from training.start.prepare import prepare

KNOWN = "(up to 4 times are nearly as good as new text, arXiv:2305.16264)"


def shard(prefix: Path, documents: int) -> str:
    """Of 100 tokens each."""
    with ShardWriter(prefix, 257) as writer:
        for _ in range(documents):
            writer.add(np.zeros(100, np.int64))
            writer.end_document()
    return str(prefix)


@pytest.mark.parametrize(
    ("blended", "iterations", "said"),
    [
        (False, 50, f"each token is read about 1.7 times {KNOWN}"),  # 50 x 8 x 32 tokens of 75 % of 10,000
        (False, 5000, f"each token is read about 171 times {KNOWN}"),
        (True, 500, f"about 13 times {KNOWN}"),
        (False, 20, ""),
    ],
)
def test_the_dry_run_and_the_start_say_it(
    blended: bool, iterations: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, small = shard(tmp_path / "first", 100), shard(tmp_path / "small", 20)
    sources = ["--data.blend", first, "3", small, "1"] if blended else ["--data.paths", first]
    config = parse_config([
        *sources, "--data.tokenizer", "byte", "--data.split", "75,25,0", "--data.cache_dir", str(tmp_path / "cache"),
        "--model.seq_length", "32", "--train.train_iters", str(iterations), "--train.global_batch_size", "8",
    ])  # fmt: skip
    plan = " ".join(line.removeprefix("#").strip() for line in describe(config).splitlines())
    prepare(config, None)
    printed = capsys.readouterr().out
    for text in (plan, printed):
        assert said in text and bool(said) == ("nearly as good as new text" in text), text
    if blended:
        assert f"iterations: of the sources, {small} about 22 times, {first} about 13 times" in printed


def test_raw_text_is_not_counted_before_it_is_tokenised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = parse_config(["--data.paths", str(tmp_path / "a.txt")])
    assert passes.planned(config.data, 10**9, 4096) == {}


def test_of_many_sources_the_most_often_read_are_named() -> None:
    read = {f"s{number}": SourceProgress(1, float(number)) for number in range(7)}
    assert passes.described(read) == (
        f"of the sources, s6 about 6.0 times, s5 about 5.0 times, s4 about 4.0 times and 2 more sources more than once "
        f"{KNOWN}"
    )
