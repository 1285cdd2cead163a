"""One run per folder: who is refused, who takes over from the dead, and what a run that lost its folder says.

Real processes, signals and files; another host is one whose processes cannot be seen: its record says so.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from campaign import some
from parallel.launch import Identity
from program.errors import UserError
from programs import Program
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST
from training.run_lock import lock_heartbeat
from training.run_lock.lock import ATTEMPT, RELEASED, LockLost, RunLock, _succeed, acquire, fenced, held_lock
from training.run_lock.record import OWNER, Owner, current, encode, myself, successor
from waiting import until

ROOT = Path(__file__).resolve().parents[3]

HOLD = """
import os, sys, time
from pathlib import Path
from typing import Any
from training.run_lock.lock import acquire
lock = acquire(Path(sys.argv[1]), os.environ)
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(lock.attempt, flush=True)
sys.stdin.read()
"""

RACE = """
import os, sys
from pathlib import Path
from typing import Any
from program.errors import UserError
from training.run_lock.lock import acquire

def newcomer(folder, gate, end):
    os.read(gate, 1)
    try:
        acquire(folder, os.environ)
    except UserError:
        os._exit(2)
    os.read(end, 1)
    os._exit(0)  # without a release: the next round finds a dead owner

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
for _ in range(rounds):
    (gate, open_gate), (end, let_end) = os.pipe(), os.pipe()
    pids = []
    for _ in range(20):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(open_gate), os.close(let_end)
            newcomer(folder, gate, end)
    os.close(open_gate)
    refused = 0
    while refused < 19:
        _, status = os.wait()
        assert os.waitstatus_to_exitcode(status) == 2, status
        refused += 1
    os.close(let_end)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def left_in(folder: Path) -> list[str]:
    """What lies there, but for the word on who gave it back."""
    return sorted(path.name for path in folder.iterdir() if path.name != RELEASED)


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A fresh interpreter in the checkout."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def put(folder: Path, environ: Mapping[str, str] | None = None, **changed: object) -> Owner:
    """An ``owner.json`` of this process, but for what is ``changed``."""
    owner = dataclasses.replace(myself(folder, environ or {}), **changed)  # type: ignore[arg-type]
    (folder / OWNER).write_bytes(encode(owner))
    return owner


def put_elsewhere(folder: Path, environ: Mapping[str, str] | None = None) -> Owner:
    """An owner on a host whose processes cannot be seen from here."""
    return put(folder, environ, host="elsewhere", machine="another")


def refusal(folder: Path, environ: Mapping[str, str] | None = None) -> str:
    """The message for a newcomer that is refused."""
    with pytest.raises(UserError) as error:
        acquire(folder, environ or {})
    return str(error.value)


def beating(folder: Path) -> list[int]:
    """The heartbeat processes for ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "training.run_lock.lock_heartbeat" in words and any(word.startswith(f"{folder}/") for word in words):
            found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def counting(folder: Path, owner: Owner) -> Iterator[None]:
    """The owner's counter moves, and need not be waited for: a heartbeat's next beat is 2 s away."""
    ended = threading.Event()

    def count() -> None:
        for number in itertools.count(100):
            lock_heartbeat._write(lock_heartbeat.file_of(folder, owner.attempt), number, os.O_CREAT)
            if ended.wait(0.05):
                return

    thread = threading.Thread(target=count)
    thread.start()
    yield
    ended.set()
    thread.join()


def commit(run_dir: Path) -> None:
    """What counts as a checkpoint."""
    folder = folders.checkpoints(run_dir) / folders.name_of(10)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    folders.point_to(folder)


# ---- whole runs


def start_run(run_dir: Path, cache_dir: Path, *flags: str) -> Program:
    """``pretrain_gpt.py`` with the debug recipe. Each has files of its own for what it prints."""
    folders = [
        "--run_dir",
        str(run_dir),
        "--data.cache_dir",
        str(cache_dir),
        "--log.tensorboard",
        "False",
        "--log.report",
        "False",
    ]
    output = Path(tempfile.mkdtemp(dir=run_dir.parent)) / "said"
    return Program(["slurm/recipes/debug.toml", *folders, *flags], output)


def test_a_folder_is_one_runs_at_a_time(cache_dir: Path, tmp_path: Path) -> None:
    """Running and suspended it is kept; killed, the next start takes it over and continues."""
    run_dir = tmp_path / "run"
    first = start_run(run_dir, cache_dir, "--train.train_iters", "5000", "--checkpoint.save_interval", "5")
    until(lambda: (run_dir / "checkpoints/latest").exists() or first.poll() is not None)
    assert first.poll() is None, first.communicate()
    for state in ("running", "stopped"):
        if state == "stopped":
            first.send_signal(signal.SIGSTOP)
        second = start_run(run_dir, cache_dir)
        _, said = second.communicate()
        assert second.returncode == 2, state
        assert f"pid {first.pid}" in said
        assert "at iteration " in said
        assert "--run_dir" in said
        assert said.count("\n") == 1
    first.kill()
    first.communicate()
    third = start_run(run_dir, cache_dir, "--train.train_iters", "5000", "--train.exit_interval", "1")
    printed, said = third.communicate()
    assert third.returncode == 0, said
    assert "resumed\n" in printed
    assert not list(run_dir.glob("owner*"))
    until(lambda: not beating(run_dir))


def test_a_refused_start_imports_no_torch(tmp_path: Path) -> None:
    holder = python(HOLD, tmp_path)
    assert holder.stdout is not None
    holder.stdout.readline()
    code = (
        "import sys, pretrain_gpt\n"
        f"sys.argv[1:] = ['slurm/recipes/debug.toml', '--run_dir', {str(tmp_path)!r}]\n"
        "try:\n"
        "    pretrain_gpt.main()\n"
        "except SystemExit as left:\n"
        "    print(left.code, {'torch', 'megatron', 'numpy'} & set(sys.modules))\n"
    )
    assert python(code).communicate()[0] == "2 set()\n"
    holder.kill()
    holder.communicate()


@pytest.mark.campaign  # which rank shows it: ../test_bad_input.py; ranks that did not claim: below
def test_under_torchrun_the_other_ranks_end_with_the_refused_one(tmp_path: Path) -> None:
    lock = acquire(tmp_path, {})
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *ranks, "pretrain_gpt.py", "slurm/recipes/debug.toml", "--run_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("another run owns it and is alive") == 1
    assert lock.still_owns()
    lock.release()


# ---- who wins


def test_of_twenty_newcomers_at_once_one_wins(tmp_path: Path) -> None:
    """The folder is free at first, then its owner is dead."""
    rounds = 3
    race = python(RACE, tmp_path, rounds)
    assert race.communicate()[0].split() == ["0"] * rounds
    assert race.returncode == 0
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("owner.after-")}  # of slow newcomers
    assert len(left) == 2  # the last owner and its counter


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    with held_lock(tmp_path, None, {}) as lock:
        assert lock is not None
        assert lock.still_owns()
        assert f"pid {os.getpid()}" in refusal(tmp_path)
    assert left_in(tmp_path) == []
    with pytest.raises(ZeroDivisionError), held_lock(tmp_path, None, {}):
        raise ZeroDivisionError
    assert left_in(tmp_path) == []


def test_ranks_that_did_not_claim(tmp_path: Path) -> None:
    """Started by an owner they hold its lock, under torchrun and srun none; they release nothing."""
    lock = acquire(tmp_path, {})
    with held_lock(tmp_path, Identity(rank=0, world_size=2), {ATTEMPT: lock.attempt}) as handed:
        assert handed is not None
        assert handed.still_owns()
    with held_lock(tmp_path, Identity(rank=1, world_size=2), {}) as none:
        assert none is None
    assert lock.still_owns()
    lock.release()


# ---- who is dead


def test_a_pid_that_was_given_out_again_is_not_the_owner(tmp_path: Path) -> None:
    put(tmp_path, process_start=1)
    acquire(tmp_path, {}).release()


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    holder = python(HOLD, tmp_path)
    assert holder.stdout is not None
    attempt = holder.stdout.readline().strip()
    assert f"pid {holder.pid}" in refusal(tmp_path)
    holder.kill()
    until(lambda: Path(f"/proc/{holder.pid}/stat").read_text().split(")")[1].split()[0] == "Z")
    lock = acquire(tmp_path, {})
    assert not lock_heartbeat.file_of(tmp_path, attempt).exists()
    lock.release()
    holder.communicate()


def test_an_owner_elsewhere_lives_while_its_counter_moves(tmp_path: Path) -> None:
    owner = put_elsewhere(tmp_path)
    beats = lock_heartbeat.LockHeartbeat(lock_heartbeat.file_of(tmp_path, owner.attempt), owner.process_start)
    assert "host elsewhere" in refusal(tmp_path)
    assert current(tmp_path) == owner
    beats.end()


def test_an_owner_elsewhere_whose_counter_stands_still_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.run_lock.lock.QUIET_S", 0.5)
    owner = put_elsewhere(tmp_path)
    lock_heartbeat.file_of(tmp_path, owner.attempt).write_text("7\n")
    said: list[str] = []
    lock = acquire(tmp_path, {}, still_s=1.0, say=said.append)
    assert lock.still_owns()
    assert len(said) == 1
    assert "host elsewhere" in said[0]
    assert left_in(tmp_path) == [f"owner.{lock.attempt}.heartbeat", OWNER]
    lock.release()


def test_a_damaged_record_is_an_owner_that_cannot_be_seen(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text('{"attempt": "12')
    acquire(tmp_path, {}, still_s=0.5).release()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("job", "restarts", "replaced"), [("7", "1", True), ("7", "4", True), ("7", "0", False), ("8", "1", False)]
)
def test_slurm_restarts_a_job_after_it_has_ended_it(job: str, restarts: str, replaced: bool, tmp_path: Path) -> None:
    """Then the counter need not be watched; here it moves. Restart 0 has no variable."""
    owner = put_elsewhere(tmp_path, {"SLURM_JOB_ID": "7"})
    environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
    with counting(tmp_path, owner):
        if replaced:
            acquire(tmp_path, environ).release()
        else:
            assert "scancel 7" in refusal(tmp_path, environ)


ELSEWHERE = {"folder_inode": 7}, {"folder_device": 7}


@pytest.mark.parametrize("seen_as", some([{}, *ELSEWHERE], [{}, ELSEWHERE[0]]))
def test_a_live_run_s_folder_reached_another_way_is_refused(tmp_path: Path, seen_as: dict[str, Any]) -> None:
    """Through another mount path, inode and device number may all differ; the heartbeat moves there, too."""
    lock = acquire(tmp_path, {})
    owner = current(tmp_path)
    assert owner is not None
    (tmp_path / OWNER).write_bytes(encode(dataclasses.replace(owner, **{"folder_path": "1" * 16, **seen_as})))
    with counting(tmp_path, owner), pytest.raises(UserError, match="another run owns it and is alive"):
        acquire(tmp_path, {}, still_s=5.0)
    lock.release()


@pytest.mark.parametrize("length", some((1, 2, 3), (3,)))
def test_records_in_a_circle_end(tmp_path: Path, length: int) -> None:
    owners = [dataclasses.replace(myself(tmp_path, {}), pid=0, machine="elsewhere") for _ in range(length)]
    (tmp_path / OWNER).write_bytes(encode(owners[0]))
    for number, owner in enumerate(owners):
        successor(tmp_path, owner.attempt).write_bytes(encode(owners[(number + 1) % length]))
    lock = acquire(tmp_path, {}, still_s=0.5)
    assert lock.still_owns()
    assert left_in(tmp_path) == [f"owner.{lock.attempt}.heartbeat", OWNER]
    lock.release()


def test_a_copied_folder_is_free_and_a_moved_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = acquire(tmp_path / "run", {})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    acquire(tmp_path / "copy", {}, still_s=1.0).release()
    assert lock.still_owns()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert f"pid {os.getpid()}" in refusal(tmp_path / "moved")
    lock.release()


def test_a_successor_that_died_or_lives_before_owner_json_names_it(tmp_path: Path) -> None:
    """It owns the folder from the moment it linked its name behind the dead one's."""
    dead = put(tmp_path, process_start=1)
    after = dataclasses.replace(myself(tmp_path, {}), host="the successor's")
    successor(tmp_path, dead.attempt).write_bytes(encode(after))
    assert "host the successor's" in refusal(tmp_path)
    successor(tmp_path, dead.attempt).write_bytes(encode(dataclasses.replace(after, process_start=1)))
    lock = acquire(tmp_path, {})
    assert lock.still_owns()
    assert left_in(tmp_path) == [f"owner.{lock.attempt}.heartbeat", OWNER]
    lock.release()


def test_a_newcomer_that_was_slow_replaces_no_owner(tmp_path: Path) -> None:
    """It found the owner dead, and wakes after somebody else has taken over."""
    dead, slow = put(tmp_path, process_start=1), myself(tmp_path, {})
    lock = acquire(tmp_path, {})
    _succeed(tmp_path, dead, slow)
    assert lock.still_owns()
    lock.release()


def test_a_folder_that_refuses_the_record_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be claimed"):
        acquire(tmp_path / "nothing", {})


@pytest.mark.parametrize(("trained", "code"), [(False, 2), (True, 1)])
def test_but_a_fault_that_passes_where_the_run_has_trained(trained: bool, code: int, tmp_path: Path) -> None:
    """The command itself, which must be started again only in the second case."""
    (tmp_path / OWNER).mkdir()
    if trained:
        commit(tmp_path)
    process = start_run(tmp_path, tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    assert err.startswith(f"pretrain_gpt.py: {tmp_path}/owner.json: expected a file, found a folder")
    assert err.count("\n") == 1


# ---- fencing


def lose(lock: RunLock) -> RunLock:
    """Make the owner one of another host that stopped beating, and let a second run take over."""
    owner = current(lock.folder)
    assert owner is not None
    (lock.folder / OWNER).write_bytes(encode(dataclasses.replace(owner, host="elsewhere", machine="another")))
    return acquire(lock.folder, {}, still_s=0.5)


def test_a_run_that_was_taken_for_dead_commits_nothing(tmp_path: Path) -> None:
    first = acquire(tmp_path, {})
    with fenced(first):
        pass
    assert first._heartbeat is not None
    first._heartbeat.end()
    until(lambda: not beating(tmp_path))
    with pytest.raises(LockLost, match="owned by host"), fenced(first):
        second = lose(first)  # in the middle of the commit
    with pytest.raises(LockLost), fenced(first):
        pytest.fail("a commit began that may not")
    first.release()
    assert second.still_owns()
    with fenced(second):
        pass
    second.release()
    assert not second.still_owns()
    second.check()  # no run has taken it since: what was copied before may be committed
    with pytest.raises(LockLost, match="is now free"):
        first.check()
    third = acquire(tmp_path, {})
    third.release()
    with pytest.raises(LockLost, match="is now free"):
        second.check()


def test_a_successors_link_is_enough_to_lose(tmp_path: Path) -> None:
    lock = acquire(tmp_path, {})
    successor(tmp_path, lock.attempt).write_bytes(encode(myself(tmp_path, {})))
    assert not lock.still_owns()
    lock.release()
    assert (tmp_path / OWNER).exists()


# ---- the heartbeat


@pytest.mark.parametrize("how", ["killed", "ended", "killed, survived by a fork"])
def test_the_heartbeat_ends_with_its_owner(how: str, tmp_path: Path) -> None:
    """However the owner ends, also when a process that it forked holds the pipe between them open."""
    holder = python(HOLD, tmp_path, "fork" if "fork" in how else "alone")
    assert holder.stdout is not None
    holder.stdout.readline()
    [forked] = children(holder.pid) or [None]
    assert len(beating(tmp_path)) == 1
    if "killed" in how:
        holder.kill()
        holder.wait()
    else:
        holder.communicate()
    until(lambda: not beating(tmp_path))
    if forked is not None:
        os.kill(forked, signal.SIGKILL)
    holder.communicate()


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started; without its heartbeat."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_heartbeat_outlives_what_ends_whole_groups_and_a_suspended_owner(tmp_path: Path) -> None:
    holder = python(HOLD, tmp_path)
    assert holder.stdout is not None
    file = lock_heartbeat.file_of(tmp_path, holder.stdout.readline().strip())
    until(lambda: lock_heartbeat.count(file) != b"0000000000000000000\n")  # it has begun
    holder.send_signal(signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(beating(tmp_path)[0], number)
    counted = lock_heartbeat.count(file)
    until(lambda: lock_heartbeat.count(file) != counted or not beating(tmp_path))
    assert len(beating(tmp_path)) == 1
    holder.kill()
    holder.communicate()


def test_a_job_whose_number_is_no_text_can_read_its_own_record(tmp_path: Path) -> None:
    """Else it would wait a minute for itself, as for an owner of whom nothing is known, and so on for ever."""
    for job in (os.fsdecode(b"\xff"), "\x1b[31m"):
        owner = myself(tmp_path, {"SLURM_JOB_ID": job})
        (tmp_path / OWNER).write_bytes(encode(owner))
        assert current(tmp_path) == owner


def test_a_folder_that_is_gone_is_not_called_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = acquire(tmp_path / "run", {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(LockLost, match="the run's folder is gone, removed or with its file system"):
        lock.check()
    lock.release()
