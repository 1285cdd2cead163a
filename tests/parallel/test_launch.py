"""Launchers: who am I, and what happens when a rank fails."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallel import failures, launch, local_ranks, output
from parallel.launch import Identity
from program.errors import StoppedOnRequest, UserError
from training.watchdog.process import lives
from waiting import until

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)", "SLURM_JOB_ID": "77"}  # fmt: skip


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For where the other rank only sleeps: it needs no three seconds to end by itself, and has nothing to say."""
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.3)


def test_no_launcher_started_ranks() -> None:
    assert launch.detect({}) is None


def test_torchrun() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    assert launch.detect(environ) == Identity(
        rank=3, world_size=8, local_rank=1, local_world_size=2, launcher="torchrun"
    )


def test_srun_counts_tasks_of_its_own_node() -> None:
    assert launch.detect(SRUN) == Identity(rank=9, world_size=12, local_rank=1, local_world_size=2, launcher="srun")


def test_a_shell_under_srun_is_no_launcher() -> None:
    assert launch.detect(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_gpus_are_counted_without_torch() -> None:
    assert launch.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert launch.count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert launch.count_gpus({"SLURM_GPUS_ON_NODE": "8"}) == 8


@pytest.mark.skipif(launch.count_gpus(os.environ) > 0, reason="this machine has GPUs")
def test_auto_never_falls_back_where_there_are_gpus() -> None:
    with pytest.raises(UserError, match=r"this node has 2 GPU\(s\), but .*--device cpu"):
        launch.choose_device("auto", {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(UserError, match="no GPU was found here"):
        launch.choose_device("cuda", {})
    assert launch.choose_device("auto", {}) == "cpu"
    assert launch.choose_device("cpu", {"CUDA_VISIBLE_DEVICES": "0"}) == "cpu"


def _fail_on_1(identity: Identity) -> int:
    if identity.rank == 1:
        raise ValueError("the cause")
    time.sleep(60)
    return 0


@pytest.mark.usefixtures("impatient")
def test_a_failing_rank_ends_the_others_and_is_the_one_shown() -> None:
    code, failure = local_ranks.fork_ranks(3, _fail_on_1)
    assert code == 1
    assert failure is not None
    assert failure.rank == 1
    assert "ValueError: the cause" in failure.text


def _echo_first(identity: Identity) -> int:
    if identity.rank == 0:
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.3)
    raise ValueError("the cause")


def test_an_echo_is_never_the_cause() -> None:
    _, failure = local_ranks.fork_ranks(2, _echo_first)
    assert failure is not None
    assert "the cause" in failure.text


def _kill_itself(identity: Identity) -> int:
    if identity.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def test_a_master_that_does_not_resolve_is_named() -> None:
    with pytest.raises(UserError, match=r'MASTER_ADDR.*"no\.such\.host" does not resolve on n7 .* after 0 s'):
        launch.await_master({"MASTER_ADDR": "no.such.host", "SLURMD_NODENAME": "n7"}, within_s=0)


def test_a_master_that_resolves_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a headless service of Kubernetes does, once rank 0's pod is ready."""
    names = iter(["not.yet.example", "127.0.0.1"])
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _name, port: real(next(names), port))
    launch.await_master({"MASTER_ADDR": "pretrain-0.gpt"}, within_s=30)
    said = capsys.readouterr().err
    assert said.startswith("MASTER_ADDR") and "retrying for 30 s" in said and said.count("\n") == 1


@pytest.mark.usefixtures("impatient")
def test_a_killed_rank_is_named() -> None:
    code, failure = local_ranks.fork_ranks(3, _kill_itself)
    assert code == 128 + signal.SIGKILL
    assert failure is not None
    assert (failure.rank, failure.text) == (2, "killed by SIGKILL\n")


ASKED_WHILE_FORKING: list[int] = []
"""Processes that get SIGTERM from themselves within their next os.fork."""


def _ask_while_forking() -> None:
    if ASKED_WHILE_FORKING:
        os.kill(ASKED_WHILE_FORKING.pop(), signal.SIGTERM)


os.register_at_fork(before=_ask_while_forking)


def _wait_to_be_asked(identity: Identity) -> int:
    time.sleep(20)
    return 0


def test_a_request_to_stop_that_comes_while_ranks_are_forked_is_not_lost() -> None:
    """Python prints what a handler raises in os.fork's callbacks, as logging's, and goes on.

    With a second thread, as libraries start them: it takes a signal that is masked in the first.
    """

    def stop(_number: int, _frame: object) -> None:
        raise StoppedOnRequest(failures.STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    ASKED_WHILE_FORKING.append(os.getpid())
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        code, failure = local_ranks.fork_ranks(2, _wait_to_be_asked)
    finally:
        signal.signal(signal.SIGTERM, before)
        done.set()
        other.join()
    assert (code, failure) == (failures.STOPPED, None)


def _one_leaves_and_one_hears_nothing(identity: Identity) -> int:
    if identity.rank == 0:
        raise StoppedOnRequest(failures.STOPPED)  # as a request to stop does before training
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as within a collective
    time.sleep(60)
    return 0


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_left_on_request_is_not_waited_for() -> None:
    began = time.monotonic()
    assert local_ranks.fork_ranks(2, _one_leaves_and_one_hears_nothing) == (failures.STOPPED, None)
    assert time.monotonic() - began < 10


def _ordinary_error(identity: Identity) -> int:
    if identity.rank == 1:
        raise OSError("Read error on /data/x.bin")
    time.sleep(60)
    return 0


@pytest.mark.usefixtures("impatient")
def test_only_torch_echoes() -> None:
    """A disk's error reads like a network's; and ranks that we ended are never the cause."""
    code, failure = local_ranks.fork_ranks(2, _ordinary_error)
    assert code == 1
    assert failure is not None
    assert (failure.rank, failure.echo) == (1, False)


def _killed_half_written(partial: Path, _: Path) -> None:
    os.truncate(partial, 3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_killed_while_it_says_why_leaves_the_others_words() -> None:
    def rank(identity: Identity) -> int:
        if identity.rank == 1:
            Path.replace = _killed_half_written  # type: ignore[method-assign,assignment]
        raise ValueError(f"of rank {identity.rank}")

    code, failure = local_ranks.fork_ranks(2, rank)
    assert failure is not None
    assert (code, failure.rank) == (1, 0)
    assert "of rank 0" in failure.text


def _hang(identity: Identity) -> int:
    if identity.rank == 1:
        time.sleep(60)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


@pytest.mark.usefixtures("impatient")
def test_where_one_hangs_the_others_words_are_kept() -> None:
    _, failure = local_ranks.fork_ranks(2, _hang)
    assert failure is not None
    assert "Timed out waiting" in failure.text


def test_a_run_that_is_interrupted_says_so(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from parallel import local_ranks
def rank(identity):
    Path({str(tmp_path)!r}, str(identity.rank)).touch()
    time.sleep(60)
    return 0
code, failure = local_ranks.fork_ranks(2, rank)
print(code, failure.rank, failure.text)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    parent.send_signal(signal.SIGINT)
    text, _ = parent.communicate(timeout=60)
    assert text.startswith("130 None ended by SIGINT")


def _mistake(_: Identity) -> int:
    raise UserError("what to do")


def test_a_users_mistake_is_code_2_without_traceback() -> None:
    code, failure = local_ranks.fork_ranks(2, _mistake)
    assert code == 2
    assert failure is not None
    assert failure.text == "what to do"


def test_a_killed_parent_leaves_no_rank(tmp_path: Path) -> None:
    script = f"""
import os, time
from pathlib import Path
from parallel import local_ranks
def rank(identity):
    Path({str(tmp_path)!r}, str(identity.rank)).write_text(str(os.getpid()))
    time.sleep(60)
    return 0
local_ranks.fork_ranks(2, rank)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    time.sleep(0.1)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    parent.kill()
    parent.wait()
    until(lambda: not any(lives(pid, None) for pid in pids), within_s=10)


def test_spawned_ranks_get_torchruns_environment(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
    )
    assert local_ranks.spawn_ranks(3, [sys.executable, "-c", script, str(tmp_path)], os.environ) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_no_other_program_can_take_the_port_of_spawned_ranks(tmp_path: Path) -> None:
    """Also not before rank 0 has imported torch, seconds later; and rank 0 has the socket."""
    script = """
import errno, os, pathlib, socket, sys, time
from parallel import launch
me, done = launch.detect(os.environ), pathlib.Path(sys.argv[1])
assert me.port == int(os.environ["MASTER_PORT"])
if me.rank == 0:
    held = socket.socket(fileno=me.listen_fd)
    assert held.getsockname()[1] == me.port
    while not done.exists():
        time.sleep(0.01)
else:
    assert me.listen_fd is None
    try:
        socket.create_server((os.environ["MASTER_ADDR"], me.port))
    except OSError as error:
        assert error.errno == errno.EADDRINUSE
        done.touch()
"""
    assert local_ranks.spawn_ranks(2, [sys.executable, "-c", script, str(tmp_path / "done")], os.environ) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.usefixtures("impatient")
def test_a_spawned_rank_that_fails_ends_the_others() -> None:
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert local_ranks.spawn_ranks(2, [sys.executable, "-c", script], os.environ) == 7


@pytest.mark.usefixtures("impatient")
def test_a_spawned_rank_that_is_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert local_ranks.spawn_ranks(2, [sys.executable, "-c", script], os.environ) == 137
    assert "rank 1 of 2 failed first: killed by SIGKILL" in capfd.readouterr().err


def test_output_goes_to_the_log_and_only_rank_0_has_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        with output.own_output(tmp_path, Identity(rank=rank, world_size=2), every_rank=False) as console_fd:
            os.write(2, b"library noise\n")
            os.write(1, b"printed\n")
            if console_fd is not None:
                os.write(console_fd, b"for people\n")
    assert capfd.readouterr() == ("for people\n", "")
    (log,) = tmp_path.iterdir()
    assert sorted(log.read_text().splitlines()) == ["library noise"] * 2 + ["printed"] * 2


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *[(TORCHRUN | {name: text}, name) for name, text in (
            ("RANK", "x"), ("RANK", "4"), ("RANK", "-1"), ("RANK", "1e3"), ("WORLD_SIZE", ""),
            ("WORLD_SIZE", "9" * 400),
            ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "http"), ("MASTER_ADDR", " "),
            ("LOCAL_RANK", "two"), ("LOCAL_RANK", "7"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "5"),
        )],
        *[(SRUN | {name: text}, name) for name, text in (
            ("SLURM_PROCID", "twelve"), ("SLURM_PROCID", "12"), ("SLURM_LOCALID", "2"),
            ("SLURM_STEP_NUM_TASKS", "many"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x"), ("SLURM_STEP_TASKS_PER_NODE", "9(x999999),9(x999999)"),
            ("SLURM_NODEID", "99"),
        )],
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(UserError, match=f"{name} (in the environment: expected|is empty)"):
        launch.detect(environ)


@pytest.mark.parametrize(
    "left_out",
    [
        {"MASTER_ADDR"},
        {"MASTER_PORT"},
        {"MASTER_ADDR", "MASTER_PORT", "RANK"},
        {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"},
    ],
)
def test_half_a_launcher_does_not_train_alone(left_out: set[str]) -> None:
    environ = {name: text for name, text in TORCHRUN.items() if name not in left_out}
    with pytest.raises(UserError, match=r"but not .*MASTER_"):
        launch.detect(environ)
    assert launch.detect({"WORLD_SIZE": "1", "RANK": "0"}) is None  # the same as alone


def test_without_scontrol_the_way_to_name_rank_0_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    identity = Identity(rank=0, world_size=2, launcher="srun")
    with pytest.raises(UserError, match="Set MASTER_ADDR to rank 0"):
        launch.set_rendezvous({"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}, identity)
