"""However the program ends with a message, nothing half-written stays, and nothing of others goes."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from campaign import param
from doctor_nodes import can_mount, left_out
from tests.tools.preprocess_program import ROOT, process, wait_for_end
from tools.preprocess import worker_pool

BLANK = b"\n" * (32 << 20)
GOOD = b'{"text": "gut"}\n'
FLAGS = ("--tokenizer", "byte", "--workers", 2, "--max_expansion", 1e6, "--no_check_space", "--unit_mb", 0.1)


@pytest.fixture
def slow(tmp_path):
    """Two units, a .gz each, in which a document is followed by many blank lines: seconds of work, a small file."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(GOOD + BLANK, 1))
    return folder


def half_written(folder):
    return {path for path in folder.rglob("*") if ".tmp-" in path.name and not path.name.startswith("plan.json")}


def at_work(command, folder):
    """The program, when both workers have begun to write; their process ids, in the order of their units."""
    started = process(*command)
    while len(found := sorted(half_written(folder))) < 2:
        assert started.poll() is None, started.communicate()[1]
        time.sleep(0.01)
    return started, [int(path.name.split(".tmp-")[1].split("-")[0]) for path in found]


@pytest.mark.parametrize("way, code", [("terminate", 75), param(("interrupt", 75)), ("lose a worker", 1)])
def test_what_workers_had_not_finished_goes_with_them(slow, tmp_path, way, code):
    started, (first, second) = at_work((slow, "--output", tmp_path / "out" / "x", *FLAGS), tmp_path / "out")
    folder, work = tmp_path / "out", tmp_path / "out" / "x.preprocess"
    others = {
        folder / f"y-00000-of-00002.bin.tmp-{first}-0a1b2c3d",  # another prefix's
        folder / f"x-00000-of-00002.bin.tmp-{first}9-0a1b2c3d",  # another process'
        folder / f"x-00000-of-00002.bin.tmp-{second}-0a1b2c3d",  # another node's, of a unit that is not that worker's
        work / f"hashes-00001.bin.tmp-{first}",
    }
    own = {
        folder / f"x-00000-of-00002.{name}.tmp-{first}-0a1b2c3d" for name in ("idx", "json", "empty.json")
    } | {work / f"hashes-00001.bin.tmp-{second}"}  # fmt: skip
    torn = [folder / "x-00000-of-00002.bin", folder / "x-00000-of-00002.json"]  # killed before the .idx got its name
    for path in (*others, *own, *torn):
        path.touch()
    if way == "lose a worker":
        os.kill(second, signal.SIGKILL)
    else:
        started.send_signal(signal.SIGTERM if way == "terminate" else signal.SIGINT)
    err = started.communicate()[1]
    assert started.returncode == code, err
    assert "Traceback" not in err
    assert half_written(folder) == others
    assert not any(path.exists() for path in torn)
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


def test_a_mistake_in_one_unit_leaves_nothing_of_the_others(slow, tmp_path):
    (slow / "b.jsonl.gz").write_bytes(gzip.compress(BLANK[: 4 << 20] + b"no json\n", 1))
    ended = process(slow, "--output", tmp_path / "out" / "x", *FLAGS)
    err = ended.communicate()[1]
    assert ended.returncode == 2, err
    assert "not JSON" in err
    assert not half_written(tmp_path / "out")


def test_workers_that_are_at_work_end_with_a_killed_parent(slow, tmp_path):
    """Stopped, they cannot find it gone by themselves: as those in the midst of a long write, or of a long text."""
    started, found = at_work((slow, "--output", tmp_path / "out" / "x", *FLAGS), tmp_path / "out")
    workers = [psutil.Process(one) for one in found]
    try:
        for worker in workers:
            worker.suspend()
        before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        started.kill()
        started.communicate()
        wait_for_end(workers)
    finally:
        for worker in psutil.wait_procs(workers, timeout=0)[1]:
            worker.kill()
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_worker_that_finds_its_parent_gone_says_nothing(capfd):
    """Gone without having heard of what was done: reading is an error of another kind then, and writing too."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    arguments = (theirs, lambda *_: None, os.getpid(), [ours.fileno()])
    worker = context.Process(target=worker_pool._worker, args=arguments)
    worker.start()
    theirs.close()
    ours.send(7)
    assert ours.poll(60)  # done is sent, and never received
    ours.close()
    worker.join()
    assert worker.exitcode == 1
    assert capfd.readouterr().err == ""


INTERRUPTED = """
import os, signal, sys
from tools.preprocess import worker_pool
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
def do(task, report):
    os.kill(os.getpid(), signal.SIGINT)
    os.write(1, f"{task}\\n".encode())  # in one piece: two workers write
worker_pool.work([2, 1], do, print, 2, worker_pool.progress(None, "x"), (), worker_pool.StopSign())
"""


def test_workers_do_not_hear_an_interrupt_from_their_first_moment_on():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["1", "2", "{}"]
    assert "Interrupt" not in ended.stderr


def on_a_small_disk(size, folder, *arguments):
    """The program with a file system of its own at `folder`, and, in a line each, the files that it leaves there."""
    mount, files = f"mount -t tmpfs -o size={size} none {folder}", f"find {folder} -type f ! -name '*.lock'"
    command = f'{mount} && {{ "$@"; code=$?; {files}; exit $code; }}'
    program = [sys.executable, "-m", "tools.preprocess", *map(str, arguments)]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", *program], cwd=ROOT, capture_output=True, text=True
    )


def needs_mounts():
    if left_out(can_mount()):
        pytest.skip("needs private mounts (root)")


def test_a_disk_that_fills_under_several_workers(slow, tmp_path):
    """One hears of it, while another one is at work."""
    needs_mounts()
    (slow / "b.jsonl.gz").write_bytes(gzip.compress((json.dumps({"text": "x" * 10_000}) + "\n").encode() * 400, 1))
    (tmp_path / "out").mkdir()
    ended = on_a_small_disk("3m", tmp_path / "out", slow, "--output", tmp_path / "out" / "x", *FLAGS)
    assert ended.returncode == 2, ended.stderr
    assert f"{tmp_path / 'out'}: No space left on device while writing x-00001-of-00002" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [Path(line).name for line in ended.stdout.splitlines()] == ["plan.json"]


@pytest.mark.parametrize("flags", [pytest.param(("--merge",), marks=pytest.mark.campaign), ("--shuffle_docs", 3)])
def test_a_disk_that_fills_when_shards_are_joined_or_shuffled(tmp_path, flags):
    """There is room for the shards, and none for them once more."""
    needs_mounts()
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": "x" * 10_000}) + "\n") * 100)
    (tmp_path / "out").mkdir()
    ended = on_a_small_disk(
        "3m", tmp_path / "out", tmp_path / "in.jsonl", "--output", tmp_path / "out" / "x", *FLAGS, *flags
    )
    assert ended.returncode == 2, ended.stderr
    assert "No space left on device while writing x" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [line for line in ended.stdout.splitlines() if ".tmp-" in line]
    assert "unit-00000-of-000" in ended.stdout  # to be continued from


def test_a_disk_without_room_for_the_plan(tmp_path):
    needs_mounts()
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    (tmp_path / "out").mkdir()
    prefix = tmp_path / "out" / "x"
    ended = on_a_small_disk("1m,nr_inodes=3", tmp_path / "out", tmp_path / "in.jsonl", "--output", prefix, *FLAGS)
    assert ended.returncode == 2, ended.stderr
    assert f"{tmp_path / 'out'}: No space left on device while writing x." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_second_interrupt_waits_until_all_is_cleared(tmp_path):
    """A real signal, sent in the middle of it."""
    half = tmp_path / "half"

    def begin(task, report):
        half.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def clear(unfinished):
        assert list(unfinished.values()) == [7]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # in which another thread has heard it
        half.unlink()

    other = threading.Event()
    thread = threading.Thread(target=other.wait)  # which hears signals too, as those of a library's pool do
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker_pool.work([7], begin, clear, 1, worker_pool.progress(1, "x"), (), worker_pool.StopSign())
    finally:
        other.set()
        thread.join()
    assert not half.exists()
