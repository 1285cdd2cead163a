"""A shard that changes under a run is named, once, by what has changed."""

import os
from pathlib import Path

import pytest

import runs
from data.prepare import prepare
from data.shards import bin_path, idx_path

MODULE = """
import os
from training.loop import Callback


class WritesOver(Callback):
    def __init__(self, run):
        self.run = run

    def after_step(self, progress, result):
        if self.run.ranks.rank == 0 and progress.iteration == 1:
            with open(os.environ["VICTIM"], "ab") as file:
                file.write(b"more")
"""


def test_it_is_named_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "writes_over.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--train.callbacks", "writes_over:WritesOver", "--train.train_iters", "2", "--log.report", "False")
    config = runs.configuration(tmp_path / "run", *flags, "--data.cache_dir", str(tmp_path / "cache"))
    prepared = prepare(config.data, print)
    (shard,) = prepared.shards
    monkeypatch.setenv("VICTIM", str(bin_path(shard.prefix)))
    runs.train(prepared, config, 1)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "warning: data:" in line]
    assert f"{bin_path(shard.prefix)} has changed from" in line and "what is read from it is not" in line


def test_what_tells_a_change(tmp_path: Path) -> None:
    config = runs.configuration(tmp_path / "run", "--data.cache_dir", str(tmp_path / "cache"))
    (shard,) = prepare(config.data, print).shards
    assert not list(shard.changes())
    before = bin_path(shard.prefix).stat()
    data = bytearray(bin_path(shard.prefix).read_bytes())
    data[len(data) // 2] ^= 1
    bin_path(shard.prefix).write_bytes(data)
    os.utime(bin_path(shard.prefix), ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    idx_path(shard.prefix).unlink()
    assert sorted(shard.changes()) == [
        f"{bin_path(shard.prefix)} was written to, or replaced,",
        f"{idx_path(shard.prefix)} cannot be found any more (No such file or directory)",
    ]
