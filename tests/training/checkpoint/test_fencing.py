"""A run that was suspended and taken for dead wakes up: it commits nothing, and harms nothing of its successor's."""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runs
from campaign import some
from data.prepared import Prepared
from programs import Program
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.verify import damages
from training.run_lock.lock import acquire
from training.run_lock.record import OWNER, current, encode

FLAGS = "--checkpoint.save_interval 2 --checkpoint.keep 9 --train.train_iters 100000 --log.report False".split()


@pytest.fixture(params=some(("in the background", "while training waits"), ("in the background",)))
def suspended(request: pytest.FixtureRequest, tmp_path: Path, cache_dir: Path) -> Iterator[Program]:
    """A run on 2 ranks in ``run``, all of whose processes but the writers were stopped after its first checkpoint."""
    run_dir = tmp_path / "run"
    background = str(request.param == "in the background")
    run = Program(
        [str(runs.DEBUG), "--run_dir", str(run_dir), *FLAGS, "--nproc", "2", "--data.cache_dir", str(cache_dir),
         "--checkpoint.async_save", background],
        tmp_path / "suspended",
    )  # fmt: skip
    while not (run_dir / "checkpoints/latest").exists() and run.poll() is None:
        time.sleep(0.02)
    assert run.poll() is None, run.communicate()
    os.killpg(run.pid, signal.SIGSTOP)
    yield run
    run.end()


def test_a_run_that_wakes_behind_its_successor_commits_nothing(
    suspended: Program, prepared: Prepared, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    owner = current(run_dir)
    assert owner is not None
    elsewhere = dataclasses.replace(owner, host="elsewhere", machine="another")  # where a stopped process is not seen
    (run_dir / OWNER).write_bytes(encode(elsewhere))
    lock = acquire(run_dir, {}, still_s=1.0)
    before = folders.latest(run_dir / "checkpoints")
    assert before is not None
    later = (folders.iteration_of(before) or 0) + 2
    runs.train(prepared, runs.configuration(run_dir, *FLAGS, "--train.exit_interval", str(later // 2 * 2)), 2, lock)
    left = committed(run_dir)
    assert len(left) >= 2

    os.killpg(suspended.pid, signal.SIGCONT)
    printed, said = suspended.communicate()
    assert suspended.returncode == 2, (printed, said)
    assert said.count("was taken for dead; the folder is now owned by host") == 1, said
    assert "Traceback" not in said
    assert committed(run_dir) == left
    newest = folders.latest(run_dir / "checkpoints")
    assert newest is not None
    assert damages(newest, "hashes") == []
    assert lock.still_owns()
    lock.release()


def committed(run_dir: Path) -> dict[str, bytes]:
    """Each checkpoint by name: its manifest; and what ``latest`` says."""
    root = run_dir / "checkpoints"
    found = {path.name: (path / MANIFEST).read_bytes() for path in folders.complete(root)}
    return found | {"latest": (root / "latest").read_bytes()}
