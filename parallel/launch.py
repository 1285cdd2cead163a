"""Who am I, and who else is there: torchrun, srun, local ranks, or one rank in this process.

Local CPU ranks are forked from a parent that has imported torch and megatron but never computed: eight ranks start in
the time of one import. Local GPU ranks are started anew, since a forked child cannot use CUDA safely.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from parallel.errors import SharedMistake, UserError

# Messages by which a rank reports that a *peer* has gone; such a failure is an echo, never the cause.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Timed out waiting",
          "NCCL communicator was aborted", "remote process exited", "Socket Timeout", "Connection refused",
          "recvValue failed", "Broken pipe", "failed to recv", "store->get")
GRACE_S = 3.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Identity:
    """One process among all ranks. ``listen_fd`` is the rendezvous socket that rank 0 of local ranks inherits."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: Literal["torchrun", "srun", "local", "single"] = "single"
    port: int | None = None
    listen_fd: int | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """Why a rank ended: its exit code, and its message or traceback."""

    rank: int
    code: int
    at: float
    text: str
    echo: bool


def detect(environ: Mapping[str, str]) -> Identity | None:
    """This rank as torchrun's or srun's environment describes it; None when nobody has started ranks yet.

    A one-task step (an interactive shell under srun) is not a launcher of ranks.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return Identity(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            launcher="torchrun",
        )
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or tasks == 1:
        return None
    return Identity(
        rank=int(environ["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=_tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], int(environ.get("SLURM_NODEID", "0"))),
        launcher="srun",
    )


def _tasks_on_node(text: str, node: int) -> int:
    """SLURM's ``"8(x3),4"`` at node 3 -> 4."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node]


def set_rendezvous(environ: dict[str, str], identity: Identity) -> None:
    """Under srun, give torch's ``env://`` what torchrun would have set. The sbatch script may set MASTER_* itself."""
    if identity.launcher != "srun":
        return
    if "MASTER_ADDR" not in environ:
        nodes = subprocess.run(
            ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]], capture_output=True, text=True, check=True
        )
        environ["MASTER_ADDR"] = nodes.stdout.split()[0]
    environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 10000))
    environ.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.world_size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(identity.local_world_size),
    )


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this node or allocation has, without asking torch (a broken driver must not hide them)."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        visible = environ["CUDA_VISIBLE_DEVICES"].strip()
        return 0 if visible in ("", "-1", "NoDevFiles") else len(visible.split(","))
    if environ.get("SLURM_GPUS_ON_NODE", "0").isdigit() and int(environ.get("SLURM_GPUS_ON_NODE", "0")):
        return int(environ["SLURM_GPUS_ON_NODE"])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def choose_device(device: Literal["auto", "cpu", "cuda"], environ: Mapping[str, str]) -> Literal["cpu", "cuda"]:
    """``auto`` resolved. Raises UserError where GPUs were found or asked for and torch cannot use them."""
    gpus = count_gpus(environ)
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    elif not shutil.which("nvidia-smi"):
        missing = "no NVIDIA driver answers (nvidia-smi is not on the PATH)"
    else:
        missing = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable driver; see nvidia-smi"
    found = f"this node has {gpus} GPU(s)" if gpus else "no GPU was found here"
    raise UserError(f'device = "{device}": {found}, but {missing}. To train on the CPU all the same: --device cpu.')


@contextlib.contextmanager
def own_output(logs: Path, identity: Identity, every_rank: bool) -> Iterator[int | None]:
    """Send this process's stdout and stderr, C++ libraries' included, into ``logs``; the console stays clean.

    Yields the console's file descriptor on rank 0, None elsewhere. One file per node unless ``every_rank``: ranks
    append to it, so that a node holds one log handle per rank whatever the world's size.
    """
    logs.mkdir(parents=True, exist_ok=True)
    name = f"rank-{identity.rank:05d}.log" if every_rank else f"node-{socket.gethostname()}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    file = os.open(logs / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield saved[0] if identity.rank == 0 else None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        os.close(saved[0])
        os.close(saved[1])


def guard(run: Callable[[Identity], int], identity: Identity) -> tuple[int, Failure | None]:
    """Call ``run`` and turn whatever it raises into an exit code and a ``Failure``."""
    try:
        return run(identity), None
    except UserError as error:
        ignore_termination()
        return 2, Failure(rank=identity.rank, code=2, at=time.time(), text=str(error), echo=not shows(error, identity))
    except KeyboardInterrupt:
        return 130, Failure(rank=identity.rank, code=130, at=time.time(), text="interrupted", echo=True)
    except BaseException as error:
        text = traceback.format_exc()
        echo = any(mark in str(error) for mark in ECHOES)
        return 1, Failure(rank=identity.rank, code=1, at=time.time(), text=text, echo=echo)


def ignore_termination() -> None:
    """While leaving with exit code 2: srun ends all ranks as soon as one has left, and its TERM would hide the code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fork_ranks(nproc: int, run: Callable[[Identity], int]) -> tuple[int, Failure | None]:
    """Fork ``nproc`` ranks, each calling ``run``; returns the exit code and the failure that came first.

    The caller must have imported and never computed: a forked thread pool hangs. The first rank that fails ends the
    others within seconds; a killed parent takes its ranks with it.
    """
    notes = Path(tempfile.mkdtemp(prefix="triplane-ranks-"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=nproc)
    try:
        ranks = {}
        for rank in range(nproc):
            identity = Identity(
                rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, launcher="local",
                port=listener.getsockname()[1], listen_fd=listener.fileno() if rank == 0 else None,
            )
            ranks[_fork(run, identity, notes, os.getpid())] = rank
        listener.close()
        with _forward_signals(ranks):
            codes = _wait(ranks)
        return _verdict(codes, notes)
    finally:
        listener.close()
        shutil.rmtree(notes, ignore_errors=True)


def _fork(run: Callable[[Identity], int], identity: Identity, notes: Path, parent: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
        code, failure = guard(run, identity)
        if failure is not None:
            note = notes / str(identity.rank)
            note.write_text(json.dumps([failure.rank, failure.code, failure.at, failure.text, failure.echo]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, so that no rank is ever left running."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _forward_signals(ranks: Mapping[int, int]) -> Iterator[None]:
    def forward(number: int, _frame: object) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Mapping[int, int]) -> dict[int, tuple[int, float]]:
    """Exit code and end of every rank. After the first failure the others get GRACE_S, SIGTERM, GRACE_S, SIGKILL."""
    ended: dict[int, tuple[int, float]] = {}
    left, sends, next_send = dict(ranks), [signal.SIGTERM, signal.SIGKILL], float("inf")
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[left.pop(pid)] = os.waitstatus_to_exitcode(status), time.time()
        if next_send == float("inf") and any(code for code, _ in ended.values()):
            next_send = time.monotonic() + GRACE_S
        if time.monotonic() > next_send and sends:
            number, next_send = sends.pop(0), time.monotonic() + GRACE_S
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.005)
    return ended


def _verdict(ended: Mapping[int, tuple[int, float]], notes: Path) -> tuple[int, Failure | None]:
    """The failure that caused the others: the earliest one that is not the echo of a lost peer."""
    failures = [
        Failure(rank=rank, code=code, at=at, text=text, echo=echo)
        for rank, code, at, text, echo in (json.loads(note.read_text()) for note in notes.iterdir())
    ]
    noted = {failure.rank for failure in failures}
    for rank, (code, at) in ended.items():
        if code < 0 and rank not in noted:
            text = f"killed by {signal.Signals(-code).name}\n"
            # One that we ended ourselves (TERM, KILL after the grace) is an echo too, unless nothing else failed.
            failures.append(Failure(rank=rank, code=128 - code, at=at, text=text, echo=False))
        elif code and rank not in noted:
            failures.append(Failure(rank=rank, code=code, at=at, text=f"exit code {code}\n", echo=False))
    if not failures:
        return max((code for code, _ in ended.values()), default=0), None
    first = min(failures, key=lambda failure: (failure.echo, failure.at))
    return first.code, first


def spawn_ranks(nproc: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start ``nproc`` fresh processes of ``command`` with torchrun's environment; the first failure ends the others.

    Each rank shows its own failure (see ``report``); returns the exit code of the first that failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []  # kept: subprocess itself reaps a child whose Popen is gone
    for rank in range(nproc):
        own = dict(environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        processes.append(subprocess.Popen(command, env=own, preexec_fn=partial(_die_with_parent, os.getpid())))
    ranks = {process.pid: rank for rank, process in enumerate(processes)}
    with _forward_signals(ranks):
        ended = _wait(ranks)
    for process in processes:
        process.returncode = ended[ranks[process.pid]][0]
    failed = sorted((at, code) for code, at in ended.values() if code)
    return (failed[0][1] if failed[0][1] > 0 else 128 - failed[0][1]) if failed else 0


def report(failure: Failure, logs: Path, world_size: int) -> None:
    """Show the failure that counts, once: a user's mistake as its message, a fault as its traceback.

    A fault is also written to the rank's own file in ``logs``.
    """
    if failure.code == 2:
        print(f"pretrain_gpt.py: {failure.text}", file=sys.stderr, flush=True)
        return
    own = logs / f"rank-{failure.rank:05d}.failed.log"
    with contextlib.suppress(OSError):
        own.write_text(failure.text)
    where = f"rank {failure.rank} of {world_size} on {socket.gethostname()}"
    print(f"{failure.text.rstrip()}\n{where} failed first; logs: {logs}", file=sys.stderr, flush=True)


def shows(error: Exception, identity: Identity | None) -> bool:
    """Whether this process is the one to show a user's mistake. Under torchrun and srun nobody else can tell."""
    return identity is None or identity.rank == 0 or not isinstance(error, SharedMistake)


def make_run_dir(run_dir: Path) -> None:
    """Create the run's folder. Raises UserError, before anything starts, where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(f"run_dir {run_dir}: cannot be written: {error.strerror}. Choose another with --run_dir.") from None
