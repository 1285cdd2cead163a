"""The files of a private SLURM cluster: slurm.conf, gres.conf and munge's key."""

import contextlib
import os
import pwd
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.faults.private_links import Links

CONFIG = """\
ClusterName=private
SlurmctldHost={host}({address})
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
SlurmdTimeout={node_timeout_s}
KillWait=5
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
MinJobAge=600
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
MailProg=/bin/true
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace_s} State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""
"""cred_expire is also how long SLURM lets a requeued job wait before it starts again: 120 s by default."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """What the cluster claims to have."""

    nodes: int
    cpus_per_node: int
    gpus_per_node: int = 0
    grace_s: int = 15
    """Seconds between SIGTERM to a preempted job's ranks and their end."""

    node_timeout_s: int = 10
    """Seconds of silence after which a node is down (SlurmdTimeout; SLURM's default is 300)."""


def write_configuration(folder: Path, sizes: Sizes, links: Links | None) -> None:
    """Write all of it below ``folder``; with ``links`` every node has an address of its own."""
    for name in ("run", "log", "state", "spool", "etc"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # munged refuses a socket in a folder that others may write or not enter
    (folder / "run").chmod(0o755)
    host = socket.gethostname().split(".")[0]
    port, *node_ports = _free_ports(sizes.nodes + 1)
    gpus = f" Gres=gpu:{sizes.gpus_per_node}" if sizes.gpus_per_node else ""
    lines = [
        f"NodeName=n{node} NodeHostname={f'n{node}' if links else host} "
        f"NodeAddr={links.address(f'n{node}') if links else '127.0.0.1'} Port={node_port} "
        f"CPUs={sizes.cpus_per_node} RealMemory=1000{gpus}"
        for node, node_port in enumerate(node_ports, start=1)
    ]
    config = CONFIG.format(
        host=host,
        address=links.controller if links else "127.0.0.1",
        port=port,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        folder=folder,
        node_timeout_s=sizes.node_timeout_s,
        grace_s=sizes.grace_s,
        nodes="\n".join(lines),
    )
    (folder / "etc/slurm.conf").write_text(config)
    for gpu in range(sizes.gpus_per_node):
        (folder / f"run/gpu{gpu}").symlink_to("/dev/null")  # SLURM wants a character device
    gres = f"Name=gpu File={folder}/run/gpu[0-{sizes.gpus_per_node - 1}]\n" if sizes.gpus_per_node else ""
    (folder / "etc/gres.conf").write_text(gres)
    (folder / "etc/munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "etc/munge.key").chmod(0o400)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        return [probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
