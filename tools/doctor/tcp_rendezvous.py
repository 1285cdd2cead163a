"""How nodes meet: JSON lines over TCP, a question from the first node, an answer from each.

Not torch's store: what is to be diagnosed here is just that this fails, and it would tell no more than "timed out".
The first node listens on MASTER_PORT itself, where training will; where that is taken, on one of the ports after it.
Nothing is executed that comes over the wire, and the hub closes when the examination is over.
"""

import contextlib
import json
import resource
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from program.schema import JSON
from program.untrusted import parse_json
from tools.doctor.context import DoctorContext
from tools.doctor.finding import Finding, NodeFacts, judged
from tools.doctor.names import resolve

PORTS = 16
"""How many ports are tried."""
CONNECT_S = 3.0
SEND_S = 10.0
"""A node that does not read for so long is given up."""
LINE_BYTES = 1 << 26
SILENCE = "no answer (a firewall, or no route)"

type Message = dict[str, Any]


class MeetingError(Exception):
    """A node cannot be reached, or has gone."""


def ports(first: int, is_taken: bool) -> list[int]:
    """Where the nodes meet: from ``first``, or after it where torchrun itself listens there."""
    return [port for port in range(first + is_taken, first + is_taken + PORTS) if port < 65536]


def readable(sockets: Sequence[socket.socket], limit_s: float) -> list[socket.socket]:
    """Those that have something to read, waiting for the first one. Not select(2), which ends at 1,024 files."""
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(0.0, limit_s))]  # type: ignore[misc]


@dataclass
class Wire:
    """One connection: whole JSON lines in both directions."""

    socket: socket.socket
    buffer: bytes = b""
    waiting: list[Message] = field(default_factory=list)
    """Lines that came together with an earlier one."""

    def send(self, message: Message) -> None:
        """Raises OSError."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def lines(self) -> list[Message]:
        """What has arrived; call when the socket is readable. Raises OSError when the other side has gone."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        *whole, self.buffer = (self.buffer + data).split(b"\n")
        if len(self.buffer) > LINE_BYTES:
            raise ConnectionResetError("it sends no lines")
        return [parse_json(line, dict[str, JSON]) for line in whole]

    def receive(self, limit_s: float) -> Message:
        """The next line. Raises TimeoutError, OSError, ValueError."""
        end = time.monotonic() + limit_s
        while not self.waiting and time.monotonic() < end:
            if readable([self.socket], end - time.monotonic()):
                self.waiting += self.lines()
        if self.waiting:
            return self.waiting.pop(0)
        raise TimeoutError(f"nothing came within {limit_s:.0f} s")


@dataclass
class Hub:
    """The first node's side."""

    listener: socket.socket
    session: str
    guests: dict[int, Wire] = field(default_factory=dict)
    """By rank."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that have come and gone, and how."""

    @staticmethod
    def open(candidates: Sequence[int], session: str) -> "Hub":
        """Listen on the first port that can be had. Raises MeetingError."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a file for each node
        errors = []
        for port in candidates:
            try:
                listener = socket.create_server(
                    ("", port),
                    family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
                    dualstack_ipv6=socket.has_dualstack_ipv6(),
                    backlog=1024,
                )
            except OSError as error:
                errors.append(f"{port}: {error.strerror or error}")
                continue
            return Hub(listener, session)
        raise MeetingError(f"no port to listen on ({'; '.join(errors[:3])} …)")

    def gather(self, ranks: Sequence[int], limit_s: float) -> dict[int, Message]:
        """Wait for ``ranks`` to come; rank -> what each brings."""
        brought: dict[int, Message] = {}
        strangers: list[Wire] = []
        end = time.monotonic() + limit_s
        while set(brought) < set(ranks) and time.monotonic() < end:
            waiting = {one.socket: one for one in strangers}
            for ready in readable([self.listener, *waiting], 0.5):
                if ready is self.listener:
                    strangers.append(Wire(self.listener.accept()[0]))
                    continue
                one = waiting[ready]
                try:
                    messages = one.lines()
                except (OSError, ValueError):
                    messages = [{}]
                if messages:
                    strangers.remove(one)
                    self._greet(one, messages[0], brought)
        for one in strangers:
            one.socket.close()
        return brought

    def _greet(self, wire: Wire, message: Message, brought: dict[int, Message]) -> None:
        rank = message.get("rank")
        if message.get("session") != self.session or not isinstance(rank, int):
            wire.socket.close()  # a scan, or another job's
            return
        wire.socket.settimeout(SEND_S)
        wire.send({"session": self.session})
        self.guests[rank] = wire
        brought[rank] = message

    def ask(self, question: Message, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, Message]:
        """Tell all (or ``ranks``) and collect their answers."""
        return self.collect(self.tell(question, ranks), limit_s, str(question["do"]))

    def tell(self, question: Message, ranks: Sequence[int] | None = None) -> list[int]:
        """Send to all (or ``ranks``); who was reached."""
        asked = [rank for rank in (self.guests if ranks is None else ranks) if rank in self.guests]
        for rank in list(asked):
            try:
                self.guests[rank].send(question)
            except OSError as error:
                self._lose(rank, str(error.strerror or error))
                asked.remove(rank)
        return asked

    def collect(self, asked: list[int], limit_s: float, about: str) -> dict[int, Message]:
        """Wait for the answers of ``asked``; who does not answer is moved to ``lost``."""
        answers: dict[int, Message] = {}
        end = time.monotonic() + limit_s
        while asked:
            of_socket = {self.guests[rank].socket: rank for rank in asked}
            ready = readable(list(of_socket), end - time.monotonic())
            for rank in [of_socket[one] for one in ready]:
                try:
                    messages = self.guests[rank].lines()
                except (OSError, ValueError) as error:
                    self._lose(rank, f"left during {about}: {error}")
                    asked.remove(rank)
                    continue
                if messages:
                    answers[rank] = messages[0]
                    asked.remove(rank)
            if not ready and time.monotonic() >= end:
                break
        for rank in asked:
            self._lose(rank, f"did not answer within {limit_s:.0f} s during {about}")
        return answers

    def _lose(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        self.guests.pop(rank).socket.close()

    def close(self, message: Message) -> None:
        """Tell all guests ``message`` and close."""
        for wire in self.guests.values():
            with contextlib.suppress(OSError):
                wire.send(message)
            wire.socket.close()
        self.guests.clear()
        self.listener.close()


def join(addresses: Callable[[], Sequence[str]], candidates: Sequence[int], hello: Message, limit_s: float) -> Wire:
    """The other nodes' side: find the hub that answers with our session. Raises MeetingError with the last refusals."""
    end = time.monotonic() + limit_s
    while True:
        refusals = []
        try:
            found_at = addresses()
        except OSError as error:
            found_at, refusals = [], [f"its name does not resolve: {error.strerror or error}"]
        for address in found_at:
            for port in candidates:
                found = _try(address, port, hello)
                if isinstance(found, Wire):
                    return found
                refusals.append(found)
                if found == SILENCE:
                    break  # of the other ports, too; each would cost as long
        errors = ", ".join(dict.fromkeys(refusals))
        if found_at:
            errors = f"{' and '.join(found_at)} port {candidates[0]} ff.: {errors}"
        if time.monotonic() > end:
            raise MeetingError(errors)
        time.sleep(0.2)


def _try(address: str, port: int, hello: Message) -> Wire | str:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
    except OSError as error:
        return SILENCE if isinstance(error, TimeoutError) else str(error.strerror or error).lower()
    wire = Wire(connection)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        wire.send(hello)
        if wire.receive(CONNECT_S).get("session") == hello["session"]:
            connection.settimeout(None)
            return wire
    connection.close()
    return "another program listens there"


def serve(wire: Wire, answers: Mapping[str, Callable[[Message], Message]], limit_s: float) -> Message:
    """Answer questions by their "do" until "bye" comes, which is returned. Raises MeetingError when the hub is gone."""
    end = time.monotonic() + limit_s
    while True:
        try:
            question = wire.receive(max(0.0, end - time.monotonic()))
            if question["do"] == "bye":
                return question
            wire.send(answers[question["do"]](question))
        except (OSError, ValueError) as error:
            raise MeetingError(f"the first node has gone: {error}") from None


# ---- who comes to the meeting, and who does not


def ports_of(situation: DoctorContext) -> list[int]:
    """Where the nodes may meet."""
    assert situation.master is not None
    return ports(situation.master[1], situation.is_agents_port)


def come(situation: DoctorContext, seen: NodeFacts, limit_s: float) -> Wire:
    """Come to the first node with what is known of this one. Raises MeetingError."""
    assert situation.master is not None
    address = situation.master[0]
    hello = {"session": situation.session, "rank": seen.rank, "seen": seen.to_json()}
    return join(lambda: resolve(address), ports_of(situation), hello, limit_s)


def gather(
    hub: Hub, mine: NodeFacts, situation: DoctorContext, limit_s: float
) -> tuple[list[NodeFacts], list[tuple[str, Finding]]]:
    """Who came, in the order of ranks; and findings about who did not."""
    others = range(1, situation.nodes)
    brought = hub.gather(others, limit_s)
    if len(others) > 1 and not brought:
        return [mine], [("", _no_answers(len(others), limit_s))]
    seen = [mine, *(NodeFacts.from_json(brought[rank]["seen"]) for rank in others if rank in brought)]
    found = [(situation.name_of(rank), _absent(limit_s)) for rank in others if rank not in brought]
    return seen, found or [("", judged("meeting", "arrived", "ok", f"all {situation.nodes} nodes, over the network"))]


def _absent(limit_s: float) -> Finding:
    fix = "its log says why it does not reach the first node; without one: is the node up, does it see the checkout?"
    found = f"did not arrive within {limit_s:.0f} s"
    return judged("meeting", "arrived", "wrong", found, "a process on every node", fix)


def _no_answers(count: int, limit_s: float) -> Finding:
    """More likely a matter of the start, or of this node, than of all others."""
    fix = "start one process on each node (srun --ntasks-per-node=1); can they reach MASTER_ADDR and MASTER_PORT?"
    found = f"none of the {count} other nodes arrived within {limit_s:.0f} s"
    return judged("meeting", "arrived", "wrong", found, "a process on every node", fix, setting=True)


def left(why: str) -> Finding:
    """Of a node that came and went."""
    return judged("meeting", "stayed", "wrong", why, "answers until the end", "read this node's log")
