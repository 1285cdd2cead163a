"""A run's folder that cannot take a run is found before step 1, by using it; what was there stays."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import campaign
import runs
from data.prepared import Prepared
from programs import Program
from training.checkpoint import folders, room
from training.run_dir import write_check


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("checkpoints", dangling, "checkpoints: expected a folder, found a link to nowhere"),
        ("checkpoints", Path.touch, "checkpoints: expected a folder, found a file"),
        ("logs", Path.touch, "logs: expected a folder, found a file"),
        ("logs", os.mkfifo, "logs: expected a folder, found a FIFO"),
        ("metrics.jsonl", os.mkfifo, "metrics.jsonl: expected a file, found a FIFO"),
        ("metrics.jsonl", Path.mkdir, "metrics.jsonl: expected a file, found a folder"),
        ("metrics.jsonl", lambda path: path.symlink_to("/dev/full"), "metrics.jsonl: expected a file, found a device"),
        ("done", Path.mkdir, "done: expected a file, found a folder"),
        ("checkpoints/latest", Path.mkdir, "latest: expected a file, found a folder"),
    ],
)
def test_what_lies_in_the_way_is_named(name: str, make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    before = os.lstat(path)
    assert said in (write_check.problem(tmp_path) or "")
    assert os.lstat(path).st_mode == before.st_mode


def test_a_folder_that_works_is_as_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest").write_text("iter_0000001\n")
    assert write_check.problem(tmp_path) is None
    assert write_check.problem(tmp_path / "new/run") is None
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest"]
    assert not (tmp_path / "new/run/checkpoints").exists()


def test_a_run_that_saves_there_meanwhile_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is refused a moment later probes where a live run begins a checkpoint, and so sweeps."""
    write, removed = room.replace_file, shutil.rmtree

    def swept(path: Path, data: bytes) -> None:
        monkeypatch.setattr(room, "replace_file", write)
        folders.begin_unfinished(tmp_path, 5, "1a2b")
        write(path, data)

    monkeypatch.setattr(room, "replace_file", swept)
    assert room.save_problem(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000005.tmp-1a2b"]

    def came_first(path: Path, **options: Any) -> None:
        removed(path)
        removed(path, **options)

    removed(tmp_path / "iter_0000005.tmp-1a2b")
    (tmp_path / f"{folders.PROBE}1a2b").mkdir()
    monkeypatch.setattr(shutil, "rmtree", came_first)
    assert folders.begin_unfinished(tmp_path, 6, "1a2b").is_dir()


FLAGS = """slurm/recipes/debug.toml --nproc 1 --train.train_iters 1 --log.tensorboard False --log.report False"""


def in_mounts(script: str) -> str:
    done = subprocess.run(["unshare", "--mount", "bash", "-ec", script], capture_output=True, text=True, cwd=runs.ROOT)
    return done.stdout + done.stderr


def test_a_read_only_and_a_full_disk_are_named(tmp_path: Path) -> None:
    imports = "import sys; from pathlib import Path; from training.checkpoint import room"
    ask = f"{imports}; print(room.save_problem(Path(sys.argv[1])))"
    full = f"mount -t tmpfs -o size=64k none {tmp_path}; dd if=/dev/zero of={tmp_path}/filler bs=1k 2>&- || true;"
    assert "No space left on device" in in_mounts(f"{full} {sys.executable} -c '{ask}' {tmp_path}/checkpoints")
    frozen = f"mount -t tmpfs none {tmp_path}; mkdir {tmp_path}/checkpoints; mount -o remount,ro {tmp_path};"
    assert "Read-only file system" in in_mounts(f"{frozen} {sys.executable} -c '{ask}' {tmp_path}/checkpoints")


def test_limits_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.file_size_problem(1 << 50) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert "ulimit -f unlimited" in (room.file_size_problem(1001) or "")
    assert room.file_size_problem(1000) is None


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("ulimit -n 60", "ulimit -n 65536"),
        campaign.param(("ulimit -f 100", "ulimit -f unlimited")),
    ],
)
def test_a_run_under_small_limits_says_so(
    limits: str, said: str, tmp_path: Path, cache_dir: Path, prepared: Prepared
) -> None:
    """prepared: the data is in the cache."""
    command = f"{sys.executable} pretrain_gpt.py {FLAGS} --run_dir {tmp_path}/run --data.cache_dir {cache_dir}"
    printed = in_mounts(f"{limits}; set +e; {command}; echo code $?")
    assert "code 2\n" in printed, printed
    assert said in printed
    assert "Traceback" not in printed


class FullDisks(Program):
    """Its /dev/shm is full, and its logs/."""

    def _run(self, flags: Sequence[str], *arguments: Any) -> object:
        logs = Path(flags[flags.index("--run_dir") + 1], "logs")
        os.unshare(os.CLONE_NEWNS)
        full = "mount -t tmpfs -o size=4k none $disk; head -c 4096 /dev/zero > $disk/x"
        script = f"mount --make-rprivate /; mkdir -p {logs}; for disk in /dev/shm {logs}; do {full}; done"
        subprocess.run(["bash", "-ec", script], check=True)
        return super()._run(flags, *arguments)


def test_a_run_without_shared_memory_or_room_for_its_logs_goes_on(
    tmp_path: Path, cache_dir: Path, prepared: Prepared
) -> None:
    flags = f"{FLAGS} --run_dir {tmp_path}/run --data.cache_dir {cache_dir}"
    program = FullDisks(flags.split(), tmp_path / "said")
    printed, said = program.communicate()
    assert program.returncode == 0, printed + said
    assert "has no watchdog" in said and "Traceback" not in printed + said
    assert "run/logs is full: log lines are lost from here on; training goes on" in printed


def test_a_probe_leaves_nothing_where_it_fails(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to("nowhere/at/all")
    assert "File exists" in (room.save_problem(tmp_path / "checkpoints") or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_a_signal_in_between_leaves_no_folder_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: Path) -> None:
        raise SystemExit(75)  # as the handler of SIGTERM does before training

    monkeypatch.setattr(write_check, "_write_problem", stopped)
    with pytest.raises(SystemExit):
        write_check.problem(tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()
