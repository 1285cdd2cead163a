"""Whether the port where ranks will meet is free on the first node, and who has it."""

import socket
from pathlib import Path

import psutil

from program.untrusted import read_text
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, judged

GROUP = "port"


def check_node(situation: DoctorContext) -> NodeCheck:
    """Only the first node's port matters; under torchrun its own agent listens there."""
    if situation.master is None:
        return NodeCheck(
            findings=[judged(GROUP, "MASTER_PORT", "not checked", "no MASTER_ADDR and MASTER_PORT are set")]
        )
    if situation.rank:
        return NodeCheck()
    port = situation.master[1]
    if situation.is_agents_port:
        return NodeCheck(findings=[judged(GROUP, "MASTER_PORT", "ok", f"{port}: torchrun's agent listens on it")])
    error = refusal(port)
    if error is None:
        return NodeCheck(findings=[_range(port)])
    found = f"{port} cannot be listened on: {error}{owner(port)}"
    fix = "end that process, or export another MASTER_PORT"
    return NodeCheck(findings=[judged(GROUP, "MASTER_PORT", "wrong", found, "a free port", fix)])


def refusal(port: int) -> str | None:
    """Why no process can listen on ``port`` here; None where one can. As torch's store: all addresses, reused."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
            probe.listen()
        except (OSError, OverflowError) as error:
            return str(getattr(error, "strerror", None) or error)
    return None


def owner(port: int) -> str:
    """ ": process 812 (python train.py) of user ann listens there", as far as this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ""
    for one in connections:
        if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
            return f"; {_process(one.pid)} listens there" if one.pid else "; another user's process listens there"
    return ""


def _process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({' '.join(' '.join(process.cmdline()).split())[:60]}) of user {process.username()}"
    except psutil.Error:
        return f"process {pid}"


def _range(port: int) -> Finding:
    """A free port among those that Linux gives to outgoing connections may be taken a moment later."""
    try:
        low, high = map(int, read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")).split())
    except (OSError, ValueError):
        low, high = 1, 0
    if low <= port <= high:
        found = f"{port} is free, but Linux hands out {low} to {high} to outgoing connections"
        fix = f"choose one below {low}"
        return judged(GROUP, "MASTER_PORT", "warning", found, f"a port outside of {low} to {high}", fix, setting=True)
    return judged(GROUP, "MASTER_PORT", "ok", f"{port} is free on the first node")
