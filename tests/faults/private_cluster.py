"""A private SLURM cluster on this host: several slurmd, all files in one folder, faults on request.

Nothing outside that folder is written, no service manager is used, and only processes started here are ended.
Needs Debian's ``slurm-wlm munge slurm-wlm-basic-plugins`` (22.05 was run), whose slurmd can run several times
on a host (``slurmd -N NAME``, one port each). With ``links=True`` every node also has a host name and a network
link of its own (``private_links``), which needs root.

Two partitions share the nodes: ``train``, and ``urgent``, whose jobs preempt those of ``train`` after a grace.
Names of nodes are n1, n2, ...
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.private_configuration import Sizes, write_configuration
from tests.faults.private_links import Links

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


def missing_programs() -> list[str]:
    """The programs of SLURM that this machine lacks; with none missing, a cluster can be started."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """A job that has ended: its state, the batch script's exit code, how often it was requeued, what it printed."""

    state: str
    exit_code: int
    restarts: int
    output: str


@dataclass(kw_only=True, slots=True, frozen=True)
class PrivateCluster:
    """A running cluster; ``environ`` is what its commands and jobs need, ``nodes`` the slurmd by name."""

    folder: Path
    environ: Mapping[str, str]
    links: Links | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

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

    def wait(self, job: int, timeout_s: float = 180.0) -> Job:
        """Wait until ``job`` has ended for good. Raises TimeoutError with its state and output so far."""
        self.until(job, lambda: self.show(job)["JobState"] in FINAL_STATES, timeout_s)
        shown = self.show(job)
        return Job(
            state=shown["JobState"],
            exit_code=int(shown["ExitCode"].split(":")[0]),
            restarts=int(shown["Restarts"]),
            output=_read(shown["StdOut"]),
        )

    def until(self, job: int, condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
        """Wait until ``condition`` holds. Raises TimeoutError with the state and the output of ``job``."""
        try:
            until(condition, timeout_s)
        except TimeoutError:
            shown = self.show(job)
            raise TimeoutError(
                f"job {job} is {shown['JobState']} ({shown['Reason']}) after {timeout_s:.0f} s; it printed:\n"
                f"{_read(shown['StdOut'])}"
            ) from None

    def until_printed(self, job: int, text: str, timeout_s: float = 180.0) -> None:
        """Wait until ``job`` has printed ``text``."""
        self.until(job, lambda: text in self.output(job), timeout_s)

    def output(self, job: int) -> str:
        """What ``job`` has printed so far."""
        return _read(self.show(job)["StdOut"])

    def show(self, job: int) -> dict[str, str]:
        """What SLURM says about ``job``, by its names: JobState, NodeList, Restarts, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout.split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, for the first time or again."""
        inside = self.links.inside(name) if self.links else ()
        self.nodes[name] = _start(self, *inside, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str, *, ranks: bool = True) -> None:
        """Kill a node's daemon, and with ``ranks`` all that its jobs run there, as a loss of power would.

        SLURM learns of it by silence: SlurmdTimeout (``Sizes.node_timeout_s``) later the node is down.
        """
        self.nodes[name].kill()
        self.nodes[name].wait()
        if ranks:
            kill_all(_step_daemons(self, name))  # first: they would report how the others ended
            kill_all(marked(self, f"SLURMD_NODENAME={name}".encode()))

    def link_down(self, name: str) -> None:
        """Cut a node's link: no packet, and no reset either. Raises ValueError without ``links``."""
        self._links().set(name, up=False)

    def link_up(self, name: str) -> None:
        """Mend what ``link_down`` cut."""
        self._links().set(name, up=True)

    def _links(self) -> Links:
        if self.links is None:
            raise ValueError("this cluster's nodes share one link: start it with links=True")
        return self.links


@contextlib.contextmanager
def running_cluster(
    folder: Path, nodes: int, cpus_per_node: int, gpus_per_node: int = 0, *, grace_s: int = 15, links: bool = False
) -> Iterator[PrivateCluster]:
    """A cluster of ``nodes`` idle nodes n1, n2, ... in ``folder``, stopped with its jobs at the end.

    CPUs are what SLURM believes, not what is there. GPUs are stand-ins: SLURM sets CUDA_VISIBLE_DEVICES for
    them. ``grace_s``: between SIGTERM and the end of a preempted job's ranks. Raises TimeoutError with the daemons'
    logs when it does not come up within a minute.
    """
    environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "etc/slurm.conf")}
    sizes = Sizes(nodes=nodes, cpus_per_node=cpus_per_node, gpus_per_node=gpus_per_node, grace_s=grace_s)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Links.connected(folder, nodes)) if links else None
        write_configuration(folder, sizes, network)
        environ = {name: environ[name] for name in environ if not _of_a_job(name)}
        cluster = PrivateCluster(folder=folder, environ=environ, links=network)
        stack.callback(_stop, cluster)
        _bring_up(cluster, nodes)
        yield cluster


def _bring_up(cluster: PrivateCluster, nodes: int) -> None:
    """Start munged, slurmctld and a slurmd per node until all nodes are idle."""
    try:
        cluster.others.append(_start(cluster, *_munged(cluster.folder)))
        until((cluster.folder / "run/munge.sock").exists, 20.0)
        cluster.others.append(_start(cluster, "slurmctld", "-D"))
        for node in range(1, nodes + 1):
            cluster.start_node(f"n{node}")
        idle = ("sinfo", "-h", "-p", "train", "-t", "idle", "-o", "%D")
        until(lambda: cluster.run(*idle).stdout.strip() == str(nodes), 60.0)
    except TimeoutError:
        logs = [f"--- {log.name}\n{log.read_text()[-2000:]}" for log in (cluster.folder / "log").iterdir()]
        raise TimeoutError("\n".join(["the private SLURM cluster did not come up:", *logs])) from None


def _of_a_job(name: str) -> bool:
    """Whether a variable belongs to a job or launcher that this process itself may be part of."""
    return name.startswith(("SLURM_", "SBATCH_", "SRUN_", "MASTER_")) and name != "SLURM_CONF"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _munged(folder: Path) -> Sequence[str]:
    return (
        "munged", "--foreground", "--force", f"--socket={folder}/run/munge.sock",
        f"--key-file={folder}/etc/munge.key", f"--pid-file={folder}/run/munged.pid",
        f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/run/munged.seed",
    )  # fmt: skip


def _start(cluster: PrivateCluster, *command: str) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground; it is ended with this process, should that be killed."""
    with (cluster.folder / "log/daemons.stdio").open("ab") as log:
        return subprocess.Popen(
            ("setpriv", "--pdeathsig", "TERM", *command),
            env=cluster.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _stop(cluster: PrivateCluster) -> None:
    """End the jobs, then the daemons, then what the jobs may have left behind."""
    daemons = [*cluster.others, *cluster.nodes.values()]
    with contextlib.suppress(TimeoutError):
        if len(daemons) > 1:
            cluster.run("scancel", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
            until(lambda: not cluster.run("squeue", "-h").stdout.strip(), 15.0)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10.0)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    kill_all(marked(cluster))


def marked(cluster: PrivateCluster, *variables: bytes) -> list[int]:
    """Processes of this cluster's jobs (and, without ``variables``, daemons), known by their environment."""
    marks = {f"SLURM_CONF={cluster.environ['SLURM_CONF']}".encode(), *variables}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marks <= set(entry.read_bytes().split(b"\0")):
                found.append(int(entry.parent.name))
    return found


def rank_process(cluster: PrivateCluster, job: int, rank: int) -> int:
    """The process of ``rank`` of ``job`` under srun: the one that runs pretrain_gpt.py, not those it has forked."""
    programs = {}
    for pid in marked(cluster, f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()):
        with contextlib.suppress(OSError):
            process = Path("/proc") / str(pid)
            if b"pretrain_gpt.py" in (process / "cmdline").read_bytes().split(b"\0"):
                programs[pid] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    for pid, parent in programs.items():
        if parent not in programs:
            return pid
    raise ProcessLookupError(f"rank {rank} of job {job} is not running")


def ranks_left(cluster: PrivateCluster, job: int) -> list[int]:
    """Processes of ``job`` that still run."""
    return marked(cluster, f"SLURM_JOB_ID={job}".encode())


def _step_daemons(cluster: PrivateCluster, name: str) -> list[int]:
    """The slurmstepd of a node, one per step: those that hold its log."""
    log, found = str(cluster.folder / f"log/slurmd.{name}.log"), []
    for pid in marked(cluster):
        process = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"slurmstepd:") and any(
                str(descriptor.readlink()) == log for descriptor in (process / "fd").iterdir()
            ):
                found.append(pid)
    return found


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL, to those that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll ``condition``. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not happen within {timeout_s:.0f} s")
        time.sleep(0.1)


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""
