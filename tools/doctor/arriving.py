"""Who comes to the meeting, over the network or through the shared folder, and who does not."""

from tools.doctor.context import DoctorContext
from tools.doctor.file_rendezvous import Mailbox
from tools.doctor.finding import Finding, NodeFacts, judged
from tools.doctor.names import resolve
from tools.doctor.tcp_rendezvous import Hub, Wire, join, ports


class _EndedError(Exception):
    """The first node has ended its examination."""


def ports_of(situation: DoctorContext) -> list[int]:
    """Where the nodes may meet."""
    assert situation.master is not None
    return ports(situation.master[1], situation.is_agents_port)


def come(situation: DoctorContext, seen: NodeFacts, mailbox: Mailbox, limit_s: float) -> Wire | None:
    """Come to the first node, and meanwhile leave in the shared folder what is known, and why it does not answer.

    None where it has ended without this node's coming, having read what was left. Raises MeetingError.
    """
    assert situation.master is not None
    address, seen_so_far = situation.master[0], seen.to_json()
    notes: list[tuple[str, str]] = []

    def leave(error: str) -> None:
        asked = mailbox.asked()
        if notes and notes[-1][0] and not asked:
            raise _EndedError
        if notes[-1:] != [(asked, error)]:
            mailbox.put(seen.rank, seen.node, {"rank": seen.rank, "seen": seen_so_far, "error": error})
            notes.append((asked, error))

    leave("")
    hello = {"session": situation.session, "rank": seen.rank, "seen": seen_so_far}
    try:
        return join(lambda: resolve(address), ports_of(situation), hello, limit_s, leave)
    except _EndedError:
        return None


def gather(
    hub: Hub, mailbox: Mailbox, mine: NodeFacts, situation: DoctorContext, limit_s: float
) -> tuple[list[NodeFacts], list[tuple[str, Finding]]]:
    """Who came, in the order of ranks; and findings about who did not."""
    others = range(1, situation.nodes)
    brought = hub.gather(others, limit_s)
    letters = mailbox.answers() if len(brought) < len(others) else {}
    seen, found = [mine], []
    cut_off = [rank for rank in others if rank not in brought and rank in letters]
    if len(others) > 1 and not brought and not letters:
        return seen, [("", _no_answers(len(others), limit_s))]
    for rank in others:
        if rank in brought or rank in letters:
            seen.append(NodeFacts.from_json((brought if rank in brought else letters)[rank]["seen"]))
        else:
            found.append((situation.name_of(rank), _absent(limit_s)))
    if cut_off and len(cut_off) == len(others) > 1:
        text = f"no other node reaches it: {letters[cut_off[0]]['error']}"
        fix = "leave this node out, or choose another address with MASTER_ADDR"
        found.append((mine.node, judged("meeting", "network", "wrong", text, "connections", fix)))
        cut_off = []
    for one in (one for one in seen if one.rank in cut_off):
        found.append((one.node, _cut_off(letters[one.rank]["error"])))
    if not found:
        found = [("", judged("meeting", "arrived", "ok", f"all {situation.nodes} nodes, over the network"))]
    return seen, found


def _absent(limit_s: float) -> Finding:
    fix = "read its log; is the node up, does its process start, does it see the checkout and the network?"
    found = f"did not arrive within {limit_s:.0f} s"
    return judged("meeting", "arrived", "wrong", found, "a process on every node", fix)


def _no_answers(count: int, limit_s: float) -> Finding:
    """More likely a matter of the start, or of this node, than of all others."""
    fix = "start one process on each node (srun --ntasks-per-node=1); can they reach MASTER_ADDR and MASTER_PORT?"
    found = f"none of the {count} other nodes arrived within {limit_s:.0f} s"
    return judged("meeting", "arrived", "wrong", found, "a process on every node", fix, setting=True)


def _cut_off(error: str) -> Finding:
    found = f"came through the shared folder only: {error}"
    fix = "repair this node's network, or name its interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    return judged("meeting", "network", "wrong", found, "a connection to the first node", fix)


def left(why: str) -> Finding:
    """Of a node that came and went."""
    return judged("meeting", "stayed", "wrong", why, "answers until the end", "read this node's log")
