"""A network link and a host name of its own for every node of a private cluster: network namespaces on a bridge.

Needs root, ``ip``, ``nsenter`` and ``unshare``. A node's daemon runs in its network namespace, and in a UTS and a
mount namespace with its host name and an /etc/hosts that knows all nodes. The host is the controller. A link that
is down drops every packet without a word, as a pulled cable does; loss and latency cannot be had without netem.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "nsenter", "unshare", "mount")


def links_possible() -> bool:
    """Whether this process may make network namespaces: tried with one that is deleted at once."""
    if os.geteuid() or any(shutil.which(tool) is None for tool in TOOLS):
        return False
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@dataclass(kw_only=True, slots=True, frozen=True)
class Links:
    """The links of nodes n1, n2, ...; ``prefix`` begins the names of all that was made, ``subnet`` is a /24."""

    prefix: str
    subnet: str
    hosts: Path

    @classmethod
    @contextlib.contextmanager
    def connected(cls, folder: Path, nodes: int) -> "Iterator[Links]":
        """Links for ``nodes`` nodes, gone afterwards."""
        (folder / "etc").mkdir(parents=True, exist_ok=True)
        links = cls(prefix=f"t{os.getpid() % 100000}", subnet=_unused_subnet(), hosts=folder / "etc/hosts")
        names = [f"n{node}" for node in range(1, nodes + 1)]
        try:
            links._make(names)
            yield links
        finally:
            links._remove(names)

    @property
    def controller(self) -> str:
        """The host's address on the bridge."""
        return f"{self.subnet}.254"

    def address(self, name: str) -> str:
        """Of node ``n7``: SUBNET.7."""
        return f"{self.subnet}.{int(name.removeprefix('n'))}"

    def inside(self, name: str) -> tuple[str, ...]:
        """Begins a command that is to run on node ``name``.

        Not ``ip netns exec``: that mounts another /sys, without the cgroups that slurmd looks for.
        """
        enter = f'mount --bind {self.hosts} /etc/hosts; hostname {name}; exec "$@"'
        space = f"--net=/run/netns/{self.prefix}{name}"
        return ("nsenter", space, "unshare", "-u", "-m", "--propagation", "private", "sh", "-c", enter, "sh")

    def set(self, name: str, *, up: bool) -> None:
        """Mend or cut the link of node ``name``."""
        _ip("link", "set", f"{self.prefix}{name}v", "up" if up else "down")

    def _make(self, names: list[str]) -> None:
        bridge = f"{self.prefix}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.controller}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name in names:
            space, outer = f"{self.prefix}{name}", f"{self.prefix}{name}v"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        known = [("127.0.0.1", "localhost"), (self.controller, socket.gethostname().split(".")[0])]
        known += [(self.address(name), name) for name in names]
        self.hosts.write_text("".join(f"{address} {name}\n" for address, name in known))

    def _remove(self, names: list[str]) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{self.prefix}br")
        for name in names:
            for command in (("link", "del", f"{self.prefix}{name}v"), ("netns", "del", f"{self.prefix}{name}")):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*command)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


def _unused_subnet() -> str:
    """The first three numbers of a /24 of 10.213.0.0/16 to which this machine has no route."""
    routes = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout
    return next(subnet for third in range(1, 255) if f"{(subnet := f'10.213.{third}')}." not in routes)
