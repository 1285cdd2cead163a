"""The checkpoint benchmark on a model of no size: every side is measured and every goal has a line."""

import contextlib
import dataclasses
import json
import multiprocessing
import time
from pathlib import Path

import pytest

from models.families import SHAPES, TINY
from parallel.layout import Layout
from tests.benchmarks.checkpoint import command as benchmark
from tests.benchmarks.checkpoint import conversion, scale
from training.checkpoint.format.tables import IncompleteError


def helpers() -> set[str]:
    """Processes that multiprocessing has started, of everybody here."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"multiprocessing.spawn" in path.read_bytes():
                found.add(path.parent.name)
    return found


@pytest.mark.campaign
def test_both_sides_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sleeper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    sleeper.start()  # ranks that are forked from a process with children list them among their own
    output, before = tmp_path / "results.json", helpers()
    arguments = ["--subjects", "rounds", "--gigabytes", "0.03", "--rounds", "1", "--nproc", "2"]
    assert benchmark.main([*arguments, "--folder", str(tmp_path), "--output", str(output)]) == 0
    [row] = json.loads(output.read_text())["rounds"]["results"]
    assert row["bytes"] > 20e6
    assert 0.4 < row["own_bytes"] / row["bytes"] < 0.6
    assert all(value > 0 for name, value in row.items() if name.endswith("_s"))
    printed = capfd.readouterr().out
    for name in ("save / dd", "load (hashes) / mcore fully_reshardable", "stall / synchronous save"):
        assert name in printed
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert helpers() == before
    assert sleeper.is_alive()
    sleeper.terminate()
    sleeper.join()


def test_made_up_ranks_hold_every_element_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tp=2, pp=2, dp=8)
    found = scale.measure("llama32_1b", layout, 40_000_000, tmp_path / "tables")
    assert found["pieces"] > 32 * 8
    assert found["metadata_bytes_read_by_a_rank"] < found["index_bytes"] + found["pieces_bytes"]
    monkeypatch.setattr(scale, "_up", lambda value, _multiple: value // 2)  # shares that do not reach the end
    with pytest.raises((IncompleteError, IndexError)):
        scale.measure("llama32_1b", layout, 40_000_000, tmp_path / "tables")


def test_an_import_whose_output_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", dataclasses.replace(TINY["llama2_tiny"], vocab_size=500))
    found = conversion.worker_memory("small", tmp_path / "worker")
    assert found["peak_anonymous_bytes"] > found["bytes"] > 1e5
    assert not (tmp_path / "worker").exists()
