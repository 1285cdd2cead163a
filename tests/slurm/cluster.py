"""A private SLURM cluster on this host: several slurmd on the loopback interface, all files in one folder.

Nothing outside that folder is written, no service manager is used, and only processes started here are ended.
Needs Debian's ``slurm-wlm munge slurm-wlm-basic-plugins`` (22.05 was run), whose slurmd can run several times
on a host (``slurmd -N NAME``, one port each).
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
    "sinfo",
    "setpriv",
)
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}

CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdTimeout=10
KillWait=5
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
MinJobAge=600
ReturnToService=2
GresTypes=gpu
MailProg=/bin/true
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """The programs of SLURM that this machine lacks; with none missing, a cluster can be started."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """A job that has ended: its state, the batch script's exit code, and what it printed."""

    state: str
    exit_code: int
    output: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Cluster:
    """A running cluster; ``environ`` is what its commands and jobs need."""

    folder: Path
    environ: Mapping[str, str]

    def run(
        self, *command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands, with ``variables`` besides ``environ``; stderr goes with stdout."""
        environ = {**self.environ, **(variables or {})}
        return subprocess.run(
            command,
            cwd=cwd,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def submit(self, *flags: str, cwd: Path, variables: Mapping[str, str] | None = None) -> int:
        """``sbatch FLAGS`` from ``cwd``; the job's id. Raises RuntimeError with SLURM's words if refused."""
        done = self.run("sbatch", "--parsable", *flags, cwd=cwd, variables=variables)
        if done.returncode:
            raise RuntimeError(f"sbatch {' '.join(flags)}: {done.stdout}")
        return int(done.stdout.split()[-1])

    def wait(self, job: int, timeout_s: float = 120.0) -> Job:
        """Wait until ``job`` has ended. Raises TimeoutError with its state and output so far."""

        def ended() -> bool:
            return self._show(job)["JobState"] in FINAL_STATES

        try:
            _until(ended, timeout_s)
        except TimeoutError:
            shown = self._show(job)
            raise TimeoutError(
                f"job {job} is {shown['JobState']} ({shown['Reason']}) after {timeout_s:.0f} s; it printed:\n"
                f"{_read(shown['StdOut'])}"
            ) from None
        shown = self._show(job)
        return Job(
            state=shown["JobState"],
            exit_code=int(shown["ExitCode"].split(":")[0]),
            output=_read(shown["StdOut"]),
        )

    def _show(self, job: int) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout.split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}


@contextlib.contextmanager
def running_cluster(folder: Path, nodes: int, cpus_per_node: int, gpus_per_node: int = 0) -> Iterator[Cluster]:
    """A cluster of ``nodes`` idle nodes n1, n2, ... in ``folder``, stopped with its jobs at the end.

    CPUs are what SLURM believes, not what is there. GPUs are stand-ins: SLURM sets CUDA_VISIBLE_DEVICES for
    them. Raises TimeoutError with the daemons' logs when it does not come up within a minute.
    """
    environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "etc/slurm.conf")}
    cluster = Cluster(folder=folder, environ={name: environ[name] for name in environ if not _of_a_job(name)})
    _write_configuration(folder, nodes, cpus_per_node, gpus_per_node)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _bring_up(cluster, nodes, daemons)
        yield cluster
    finally:
        _stop(cluster, daemons)


def _bring_up(cluster: Cluster, nodes: int, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Start munged, slurmctld and a slurmd per node, each added to ``daemons``, until all nodes are idle."""
    try:
        daemons.append(_start(cluster, *_munged(cluster.folder)))
        _until((cluster.folder / "run/munge.sock").exists, 20.0)
        daemons.append(_start(cluster, "slurmctld", "-D"))
        daemons.extend(_start(cluster, "slurmd", "-D", "-N", f"n{node}") for node in range(1, nodes + 1))
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        _until(lambda: cluster.run(*idle).stdout.strip() == str(nodes), 60.0)
    except TimeoutError:
        logs = [f"--- {log.name}\n{log.read_text()[-2000:]}" for log in (cluster.folder / "log").iterdir()]
        raise TimeoutError("\n".join(["the private SLURM cluster did not come up:", *logs])) from None


def _of_a_job(name: str) -> bool:
    """Whether a variable belongs to a job or launcher that this process itself may be part of."""
    return name.startswith(("SLURM_", "SBATCH_", "SRUN_", "MASTER_")) and name != "SLURM_CONF"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _write_configuration(folder: Path, nodes: int, cpus_per_node: int, gpus_per_node: int) -> None:
    for name in ("run", "log", "state", "spool", "etc"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a socket in a folder that others may write or not enter
    (folder / "run").chmod(0o755)
    host = socket.gethostname().split(".")[0]
    controller_port, *node_ports = _free_ports(nodes + 1)
    lines = [
        f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus_per_node} "
        f"RealMemory=1000{f' Gres=gpu:{gpus_per_node}' if gpus_per_node else ''}\n"
        for node, port in enumerate(node_ports, start=1)
    ]
    user = pwd.getpwuid(os.geteuid()).pw_name
    config = CONFIG.format(host=host, port=controller_port, user=user, folder=folder)
    (folder / "etc/slurm.conf").write_text(config.replace("PartitionName", "".join(lines) + "PartitionName"))
    for gpu in range(gpus_per_node):
        (folder / f"run/gpu{gpu}").symlink_to("/dev/null")  # SLURM wants a character device
    gres = f"Name=gpu File={folder}/run/gpu[0-{gpus_per_node - 1}]\n" if gpus_per_node else ""
    (folder / "etc/gres.conf").write_text(gres)
    (folder / "etc/munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "etc/munge.key").chmod(0o400)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        return [probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def _munged(folder: Path) -> Sequence[str]:
    return (
        "munged", "--foreground", "--force", f"--socket={folder}/run/munge.sock",
        f"--key-file={folder}/etc/munge.key", f"--pid-file={folder}/run/munged.pid",
        f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/run/munged.seed",
    )  # fmt: skip


def _start(cluster: Cluster, *command: str) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground; it is ended with this process, should that be killed."""
    with (cluster.folder / f"log/{command[0]}.stdio").open("ab") as log:
        return subprocess.Popen(
            ("setpriv", "--pdeathsig", "TERM", *command),
            env=cluster.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _stop(cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the jobs, then the daemons, then what the jobs may have left behind."""
    with contextlib.suppress(TimeoutError):
        if len(daemons) > 1:
            cluster.run("scancel", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
            _until(lambda: not cluster.run("squeue", "-h").stdout.strip(), 15.0)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10.0)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for pid in _left_behind(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left_behind(cluster: Cluster) -> list[int]:
    """Processes of jobs that outlived the daemons, known by the configuration's path in their environment."""
    mark = f"SLURM_CONF={cluster.environ['SLURM_CONF']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not happen within {timeout_s:.0f} s")
        time.sleep(0.1)


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""
