"""Which interface leads to the other nodes, and whether the variables that choose one name one that is there."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from program.untrusted import read_text
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, deciding, judged
from tools.doctor.names import own_addresses, resolve

GROUP = "interfaces"


def check_node(situation: DoctorContext) -> NodeCheck:
    """Facts: "mtu" of each interface. Wrong: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME without an interface."""
    state = psutil.net_if_stats()
    up = sorted(name for name, one in state.items() if one.isup)
    addresses = own_addresses()
    reported = ", ".join(f"{name} {(addresses.get(name) or ['no address'])[0]}" for name in up if name != "lo")
    findings = [judged(GROUP, "up", "ok" if reported else "warning", reported or "none but loopback")]
    findings += variables(situation.environ, up)
    return NodeCheck(findings=findings, facts={"mtu": {name: one.mtu for name, one in state.items()}})


def variables(environ: Mapping[str, str], up: Sequence[str]) -> Iterator[Finding]:
    """NCCL's names are prefixes, "=" before them makes them exact, "^" excludes; gloo's are exact. Commas between."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = environ.get(variable, "")
        if not text:
            continue
        exact = variable.startswith("GLOO") or text.startswith("=")
        # NCCL takes the first interface that fits any of the names; gloo opens every one of them.
        names = [name for name in text.lstrip("^=").split(",") if name]
        fits = {name: [one for one in up if one == name or (not exact and one.startswith(name))] for name in names}
        chosen = sorted({one for several in fits.values() for one in several})
        missing = [name for name, several in fits.items() if not several]
        if text.startswith("^"):
            chosen, missing = [one for one in up if one not in chosen and one != "lo"], []
        if not chosen or (missing and variable.startswith("GLOO")):
            yield judged(
                GROUP,
                variable,
                "wrong",
                f"{text}: no interface {' or '.join(missing) or 'is left'} is up here",
                f"one of {', '.join(name for name in up if name != 'lo') or 'none but lo'}",
                f"correct {variable} (the cluster's [env]), or unset it",
                setting=True,
            )
        else:
            yield judged(GROUP, variable, "ok", f"{text} chooses {', '.join(chosen)}")


def route(address: str) -> tuple[str, str]:
    """(interface, own address) by which packets leave for ``address``; nothing is sent. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
    for name, several in own_addresses().items():
        if own in several:
            return name, own
    return "unknown", own


def around(question: Mapping[str, Any], situation: DoctorContext) -> dict[str, Any]:
    """How this node reaches the master: interface, own address, speed. The first node: where its address lies."""
    if situation.master is None:
        return {}
    try:
        name, own = route(resolve(situation.master[0])[0])
    except OSError as error:
        return {"error": f"no route to {situation.master[0]}: {error.strerror or error}"}
    return {"interface": name, "address": own, "speed_mbit_per_s": speed(name)}


def speed(interface: str) -> int:
    """Mbit/s as the driver tells; 0 where it tells none (virtual interfaces)."""
    try:
        return max(0, int(read_text(Path("/sys/class/net") / interface / "speed")))
    except (OSError, ValueError):
        return 0


def judge_routes(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Of ``around``'s answers, under "route": one name everywhere lets one variable serve all; MTUs must agree."""
    routes = {one.node: one.facts[GROUP]["route"] for one in seen if one.facts.get(GROUP, {}).get("route")}
    mtus = {one.node: one.facts[GROUP]["mtu"] for one in seen if one.node in routes}
    outer = {node: one for node, one in routes.items() if one.get("interface") not in (None, "lo")}
    found: list[tuple[str, Finding]] = []
    for node, one in routes.items():
        if "error" in one:
            fix = "repair this node's network"
            found.append((node, judged(GROUP, "route", "wrong", one["error"], "a route to the first node", fix)))
    for node, one in outer.items():
        found.append((node, _told(one, outer, mtus, node)))
    if not found and routes:
        found = [(node, judged(GROUP, "route", "ok", "the nodes meet over loopback: one machine")) for node in routes]
    return found


def _told(
    one: Mapping[str, Any], outer: Mapping[str, Mapping[str, Any]], mtus: Mapping[str, Mapping[str, int]], node: str
) -> Finding:
    mtu = {other: mtus[other].get(outer[other]["interface"], 0) for other in outer}
    name, right = one["interface"], deciding(list(mtu.values()))
    usual = deciding([other["interface"] for other in outer.values()])
    fast = deciding([other["speed_mbit_per_s"] for other in outer.values()])
    rate = f", {one['speed_mbit_per_s'] / 1000:g} Gbit/s" if one["speed_mbit_per_s"] else ""
    found = f"{name}, MTU {mtu[node]}{rate}"
    if mtu[node] != right:
        fix = f"ip link set {name} mtu {right}: large packets get lost between unequal MTUs"
        return judged(GROUP, "route", "warning", found, f"MTU {right} as on most nodes", fix)
    if one["speed_mbit_per_s"] < fast:
        return judged(GROUP, "route", "warning", found, f"{fast / 1000:g} Gbit/s as on most nodes", "check the cable")
    if name != usual:
        fix = "name both in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME per node, or give them one name"
        return judged(GROUP, "route", "warning", found, f"{usual} as on most nodes", fix, setting=True)
    return judged(GROUP, "route", "ok", found)
