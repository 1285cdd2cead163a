"""Saving in the background: by a process of its own, which outlives its rank, and whose failures are survived."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import runs
from data.prepared import Prepared
from parallel.launch import Identity
from parallel.regions import Box
from ranks import run_ranks
from training.checkpoint import folders
from training.checkpoint.background import saver
from training.checkpoint.background.messages import Commit, Outcome
from training.checkpoint.background.saver import BackgroundWriter
from training.checkpoint.committing import FilledFolder
from training.checkpoint.format.verify import damages
from training.checkpoint.storage import TensorReader, file_name
from training.run_lock.lock import acquire

ROWS = 6


def boxes(rank: int, ranks: int) -> list[Box]:
    """A rank's rows of a weight and of an optimizer's three states, and one row of generators."""
    rows = ROWS // ranks
    found = [
        Box(key="w", global_shape=(ROWS, 5), offset=(rank * rows, 0), writes=True,
            data=torch.full((rows, 5), float(rank), dtype=torch.bfloat16))
    ]  # fmt: skip
    for number, state in enumerate(("param", "exp_avg", "exp_avg_sq")):
        data = torch.arange(float(rows * 5)).view(rows, 5) + 100 * rank + 1000 * number
        key = f"optimizer.state.{state}.w2"
        found.append(Box(key=key, global_shape=(ROWS, 5), offset=(rank * rows, 0), data=data, writes=True))
    return found


def commit_of(folder: Path, ranks: int, timeout_s: float = 20.0, **more: str) -> Commit:
    names = tuple(file_name(rank) for rank in range(ranks))
    filled = FilledFolder(folder=str(folder), writers=names, keep=2, texts={"state.json": "{}\n"},
                          about={"iteration": int(folder.name[5:12])})  # fmt: skip
    return Commit(filled=filled, timeout_s=timeout_s, **more)  # type: ignore[arg-type]


def last(writer: BackgroundWriter, what: str) -> Outcome:
    found = {outcome.what: outcome for outcome in writer.outcomes(20.0)}
    return found[what]


@pytest.fixture
def writers() -> Iterator[Callable[[int], list[BackgroundWriter]]]:
    """As many writer processes as asked for; ended with the test."""
    made: list[BackgroundWriter] = []

    def make(count: int) -> list[BackgroundWriter]:
        made.extend(BackgroundWriter(rank) for rank in range(count))
        return made

    yield make
    for writer in made:
        writer.close()


def test_what_is_handed_over_is_committed(writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path) -> None:
    first, second = writers(2)
    for iteration in (7, 8):  # the memory is used again
        folder = folders.begin_unfinished(tmp_path, iteration, "1a2b")
        first.hand_over(folder, boxes(0, 2))
        first.commit(commit_of(folder, 2))
        second.hand_over(folder, boxes(1, 2))
        second.finish_copy()
        assert last(first, "Commit").path == str(tmp_path / folders.name_of(iteration))
        assert last(second, "Write").error is None
    newest = folders.latest(tmp_path)
    assert newest is not None
    assert newest.name == "iter_0000008"
    assert damages(newest, "hashes") == []
    for rank in range(2):
        wanted = boxes(rank, 2)
        found = [Box(key=box.key, global_shape=box.global_shape, offset=box.offset, writes=False,
                     data=torch.zeros_like(box.data)) for box in wanted]  # fmt: skip
        with TensorReader(newest) as reader:
            reader.read(found)
        assert all(torch.equal(a.data, b.data) for a, b in zip(found, wanted, strict=True))


def test_a_copy_is_what_training_cannot_change_any_more(
    writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path
) -> None:
    [writer] = writers(1)
    mine = boxes(0, 1)
    folder = folders.begin_unfinished(tmp_path, 7, "1a2b")
    writer.hand_over(folder, mine)
    mine[0].data.fill_(-1)  # no state of the optimizer: may change at once
    writer.finish_copy()
    for box in mine:
        box.data.fill_(-1)
    writer.commit(commit_of(folder, 1))
    path = last(writer, "Commit").path
    with TensorReader(Path(path or "")) as reader:
        for wanted in boxes(0, 1):
            data = torch.empty_like(wanted.data)
            reader.read_into(wanted.key, (0, 0), data)
            assert torch.equal(data, wanted.data)


def test_a_second_save_waits_for_the_first(writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path) -> None:
    [writer] = writers(1)
    os.kill(writer._process.pid, signal.SIGSTOP)
    writer.hand_over(folders.begin_unfinished(tmp_path, 7, "1a2b"), boxes(0, 1))
    assert list(writer.outcomes(0.05)) == []
    with pytest.raises(OSError, match="rank 0 is still writing the checkpoint before"):
        writer.hand_over(tmp_path, boxes(0, 1))
    os.kill(writer._process.pid, signal.SIGCONT)
    assert last(writer, "Write").error is None


def test_a_writer_that_cannot_write_is_named_and_its_folder_removed(
    writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path
) -> None:
    first, second = writers(2)
    folder = folders.begin_unfinished(tmp_path, 7, "1a2b")
    (folder / "rank_00001.pieces.json").mkdir()  # where its table is to be: nothing can be renamed to it
    (folder / "rank_00001.pieces.json/x").touch()
    first.hand_over(folder, boxes(0, 2))
    second.hand_over(folder, boxes(1, 2))
    assert "Is a directory" in (last(second, "Write").error or "")
    first.commit(commit_of(folder, 2))
    assert "rank_00001: " in (last(first, "Commit").error or "")
    assert folders.complete(tmp_path) == []
    assert not folder.exists()


def test_a_writer_that_never_comes_is_given_up(
    writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path
) -> None:
    [writer] = writers(1)
    folder = folders.begin_unfinished(tmp_path, 7, "1a2b")
    writer.hand_over(folder, boxes(0, 2))
    writer.commit(commit_of(folder, 2, timeout_s=0.2))
    assert "rank_00001.bin: not finished within" in (last(writer, "Commit").error or "")


def test_signals_to_all_processes_of_a_job_are_not_for_writers(
    writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path
) -> None:
    """SLURM sends SIGUSR2 and SIGTERM to these, too; at once here, before the interpreter is up, and later."""
    [writer] = writers(1)
    for moment in (7, 8):
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            os.kill(writer._process.pid, number)
        folder = folders.begin_unfinished(tmp_path, moment, "1a2b")
        writer.hand_over(folder, boxes(0, 1))
        writer.commit(commit_of(folder, 1))
        assert last(writer, "Commit").error is None


def test_a_killed_writer_is_noticed(writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path) -> None:
    [writer] = writers(1)
    os.kill(writer._process.pid, signal.SIGSTOP)
    writer.hand_over(folders.begin_unfinished(tmp_path, 7, "1a2b"), boxes(0, 1))
    os.kill(writer._process.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="writer process of rank 0 ended with -9"):
        list(writer.outcomes(5.0))


def test_a_save_of_a_run_that_lost_its_folder_is_not_committed(
    writers: Callable[[int], list[BackgroundWriter]], tmp_path: Path
) -> None:
    [writer] = writers(1)
    other = acquire(tmp_path, {})
    folder = folders.begin_unfinished(tmp_path / "checkpoints", 7, "1a2b")
    writer.hand_over(folder, boxes(0, 1))
    writer.commit(commit_of(folder, 1, run_dir=str(tmp_path), attempt="mine"))
    outcome = last(writer, "Commit")
    assert outcome.lost
    assert "this run (attempt mine) was taken for dead; the folder is now owned by host" in (outcome.error or "")
    other.release()
    assert folders.complete(tmp_path / "checkpoints") == []


def test_host_memory_is_that_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(0)
    monkeypatch.setattr(saver.host_memory, "available_bytes", lambda: saver.SPARE_HOST_BYTES + 100.0)
    assert writer.lacks_memory(25, ranks_here=4) is None
    said = writer.lacks_memory(26, ranks_here=4)
    assert said is not None and "copies of 4 ranks' shares in host memory take 104 bytes" in said
    writer.close()


def _hand_over_and_die(identity: Identity, folder: Path) -> None:
    writer = BackgroundWriter(identity.rank)
    writer.hand_over(folder, boxes(identity.rank, 2))
    if identity.rank == 0:
        writer.commit(commit_of(folder, 2))
    writer.finish_copy()
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_killed_right_after_the_copy_leave_a_checkpoint(tmp_path: Path) -> None:
    folder = folders.begin_unfinished(tmp_path, 7, "1a2b")
    with pytest.raises(AssertionError):
        run_ranks(2, _hand_over_and_die, folder)
    for _ in range(200):
        if folders.complete(tmp_path):
            break
        time.sleep(0.05)
    [path] = folders.complete(tmp_path)
    assert damages(path, "hashes") == []


# ---- whole runs


def test_a_run_saves_in_the_background_and_resumes_bit_for_bit(prepared: Prepared, tmp_path: Path) -> None:
    flags = ("--checkpoint.save_interval", "1", "--train.train_iters", "3", "--log.report", "False")
    plain = runs.losses(runs.train(prepared, runs.configuration(tmp_path / "plain", *flags), 2))
    flags = (*flags, "--checkpoint.async_save", "True")
    first = runs.configuration(tmp_path / "run", *flags, "--train.exit_interval", "2")
    assert runs.losses(runs.train(prepared, first, 2)) == plain[:2]
    assert [path.name for path in folders.complete(tmp_path / "run/checkpoints")] == ["iter_0000001", "iter_0000002"]
    metrics = runs.train(prepared, runs.configuration(tmp_path / "run", *flags), 2)
    assert runs.losses(metrics) == plain
    for path in folders.complete(tmp_path / "run/checkpoints"):
        assert damages(path, "hashes") == []
