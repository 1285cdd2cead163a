"""Name resolution: this node's own name, the master's, and every node's from every node.

The trap: Debian writes ``127.0.1.1 NAME`` into /etc/hosts. Gloo and torch's store then listen on loopback, and ranks
on other nodes find no peer.
"""

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from tools.doctor.context import DoctorContext
from tools.doctor.deadline import within
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, judged

GROUP = "names"
ALL_S = 20.0
ENOUGH = 3
"""How long, and until how many failures, the other nodes' names are looked up."""
LIMIT_S = 6.0
"""A name server that does not answer is tried again after 5 s (resolv.conf(5))."""


def resolve(name: str, limit_s: float = LIMIT_S) -> list[str]:
    """The IP addresses of ``name``, sorted. Raises OSError with the resolver's words, TimeoutError."""
    answers = within(limit_s, lambda: socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP))
    return sorted({str(answer[4][0]).partition("%")[0] for answer in answers})


def own_addresses() -> dict[str, list[str]]:
    """Interface -> its IP addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }


def is_loopback(address: str) -> bool:
    """127.0.0.0/8 or ::1."""
    return ipaddress.ip_address(address).is_loopback


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: "own" what the host's name resolves to, "addresses" of the interfaces, "chosen" GLOO_SOCKET_IFNAME."""
    addresses = [address for several in own_addresses().values() for address in several]
    facts: dict[str, Any] = {"addresses": addresses, "chosen": situation.environ.get("GLOO_SOCKET_IFNAME", "")}
    try:
        facts["own"] = resolve(situation.host)
    except OSError as error:
        fix = "add the name to /etc/hosts or to the name server, or set GLOO_SOCKET_IFNAME"
        found = f"{situation.host} does not resolve: {error.strerror or error}"
        finding = judged(GROUP, "own name", "warning", found, "an address of this machine", fix, setting=True)
        return NodeCheck(findings=[finding], facts=facts)
    return NodeCheck(findings=[_own(situation.host, facts["own"], addresses)], facts=facts)


def _own(host: str, resolved: Sequence[str], addresses: Sequence[str]) -> Finding:
    # All of 127.0.0.0/8 is this machine, though interface lo has 127.0.0.1 alone.
    foreign = [address for address in resolved if address not in addresses and not is_loopback(address)]
    if foreign:
        found = f"{host} resolves to {', '.join(foreign)}, which no interface of this machine has"
        fix = "correct /etc/hosts or the name server"
        return judged(GROUP, "own name", "wrong", found, f"one of {', '.join(addresses)}", fix, setting=True)
    return judged(GROUP, "own name", "ok", f"{host} resolves to {', '.join(resolved)}")


def compare(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: a host's name that is loopback, where other nodes are other machines."""
    if len({one.machine for one in seen}) < 2:
        return []
    found = []
    for one in seen:
        own = one.facts.get(GROUP, {}).get("own", [])
        if own and all(map(is_loopback, own)) and not one.facts[GROUP]["chosen"]:
            text = f"{one.host} resolves to {', '.join(own)}: ranks here are not reachable from other nodes"
            fix = "set GLOO_SOCKET_IFNAME to the route's interface (see interfaces), or correct /etc/hosts"
            expected = "an address that other nodes reach"
            found.append((one.node, judged(GROUP, "loopback", "wrong", text, expected, fix, setting=True)))
    return found


def around(question: Mapping[str, Any], situation: DoctorContext) -> list[Finding]:
    """From this node: every host's name and the master's. ``question["nodes"]``: host, addresses and rank of each."""
    others = {one["host"]: one for one in question["nodes"] if one["host"] != situation.host}
    findings: list[Finding] = []
    end = time.monotonic() + ALL_S
    for looked_at, one in enumerate(others.values()):
        if time.monotonic() > end or len(findings) >= ENOUGH:
            why = f"{len(others) - looked_at} of {len(others)} names: the others took long, or failed"
            findings.append(judged(GROUP, "further nodes", "not checked", why))
            break
        findings += _other(one)
    if not findings and others:
        findings = [judged(GROUP, "other nodes", "ok", f"{len(others) + 1} names resolve from every node")]
    return [*_master(question, situation), *findings]


def _other(one: Mapping[str, Any]) -> list[Finding]:
    expected, fix = f"one of {', '.join(one['addresses'])}", "correct /etc/hosts or the name server"
    try:
        resolved = resolve(one["host"])
    except OSError as error:
        found = f"{one['host']} does not resolve: {error.strerror or error}"
        fix += "; ranks meet by address all the same"
        return [judged(GROUP, "other nodes", "warning", found, expected, fix, setting=True)]
    if set(resolved) & set(one["addresses"]):
        return []
    found = f"{one['host']} resolves to {', '.join(resolved)}, which is not that node"
    return [judged(GROUP, "other nodes", "warning", found, expected, fix, setting=True)]


def _master(question: Mapping[str, Any], situation: DoctorContext) -> list[Finding]:
    if situation.master is None:
        return []
    address = situation.master[0]
    first = next((one for one in question["nodes"] if one["rank"] == 0), None)
    fix = "set MASTER_ADDR to an address of the first node that the others reach"
    try:
        resolved = resolve(address)
    except OSError as error:
        found = f"{address} does not resolve: {error.strerror or error}"
        return [judged(GROUP, "MASTER_ADDR", "wrong", found, "the first node", fix, setting=True)]
    there = set(first["addresses"]) if first else set()
    if first and not any(one in there or is_loopback(one) for one in resolved):
        found = f"{address} is {', '.join(resolved)}, not the first node ({first['host']})"
        return [judged(GROUP, "MASTER_ADDR", "wrong", found, ", ".join(sorted(there)), fix, setting=True)]
    machines = {one["machine"] for one in question["nodes"]}
    if len(machines) > 1 and all(map(is_loopback, resolved)):
        found = f"{address} is {', '.join(resolved)}: every node would call itself"
        return [judged(GROUP, "MASTER_ADDR", "wrong", found, ", ".join(sorted(there)), fix, setting=True)]
    return [judged(GROUP, "MASTER_ADDR", "ok", f"{address} is the first node, from every node")]
