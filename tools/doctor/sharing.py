"""Whether the nodes see one folder: files, names, locks and changes of the others.

Each node reads what a few others wrote (the first node's, and the next two ranks'): as many reads per node on any
number of nodes.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from program.untrusted import read_text
from tools.doctor.context import DoctorContext
from tools.doctor.deadline import within
from tools.doctor.finding import Finding, NodeFacts, judged
from tools.doctor.run_dir import GROUP, folder_of, token_path

PATIENCE_S = 5.0
"""How long a file of another node may take to appear: NFS caches names for some seconds (nfs(5), acregmin)."""
LIMIT_S = 20.0
SLOW_S = 2.0


def sampled(rank: int, ranks: Sequence[int]) -> list[int]:
    """Whose files ``rank`` reads."""
    place = ranks.index(rank)
    chosen = {ranks[0], *(ranks[(place + step) % len(ranks)] for step in (1, 2))}
    return sorted(chosen - {rank})


def race_path(run_dir: Path, nonce: str) -> Path:
    """The name that all nodes try to create; one may win."""
    return folder_of(run_dir) / f"race-{nonce}"


def lock_path(run_dir: Path, nonce: str) -> Path:
    """The file that the first node has locked."""
    return folder_of(run_dir) / f"lock-{nonce}"


def clear(run_dir: Path | None) -> None:
    """The first node, at the end: what the examination wrote goes."""
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        for pattern in ("token-*", "race-*", "lock-*"):
            for path in folder_of(run_dir).glob(pattern):
                path.unlink(missing_ok=True)
        folder_of(run_dir).rmdir()


def around(question: Mapping[str, Any], situation: DoctorContext) -> dict[str, Any]:
    """Facts: "sees" rank -> "" or what was found instead; "won" the race; "lock" was refused, given, or an error."""
    if situation.run_dir is None:
        return {}
    run_dir, tokens = situation.run_dir, {one["rank"]: one["token"] for one in question["nodes"] if one["token"]}
    if situation.rank not in tokens:
        return {}
    others = sampled(situation.rank, sorted(tokens))
    deadline = time.monotonic() + PATIENCE_S
    sees = {str(rank): _wait_for(token_path(run_dir, rank), tokens[rank], deadline)[0] for rank in others}
    lock = "" if situation.rank == 0 else _try_lock(lock_path(run_dir, question["nonce"]))
    return {"sees": sees, "won": _try_create(race_path(run_dir, question["nonce"])), "lock": lock}


def again(question: Mapping[str, Any], situation: DoctorContext) -> dict[str, Any]:
    """Facts: "renewed_s", seconds until the first node's renamed file showed its new content; None if it never did."""
    if situation.run_dir is None or situation.rank == 0:
        return {}
    path = token_path(situation.run_dir, 0)
    # A node that does not share the folder need not wait for what it cannot see.
    deadline = time.monotonic() + PATIENCE_S * path.exists()
    error, waited = _wait_for(path, question["token"], deadline)
    return {"renewed_s": None if error else waited}


def _wait_for(path: Path, content: str, deadline: float) -> tuple[str, float]:
    """("" or what is wrong, seconds waited)."""
    began = time.monotonic()
    while True:
        try:
            found = within(LIMIT_S, partial(read_text, path))
            error = "" if found == content else "an older content"
        except OSError as failure:
            error = failure.strerror or str(failure)
        if not error or time.monotonic() > deadline:
            return error, time.monotonic() - began
        time.sleep(0.05)


def _try_create(path: Path) -> bool | str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError as error:
        return error.strerror or str(error)
    return True


def _try_lock(path: Path) -> str:
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "refused"
    except OSError as error:
        return error.strerror or str(error)
    return "given"


def evaluate(seen: Sequence[NodeFacts]) -> list[tuple[str, Finding]]:
    """Wrong: nodes that are apart from most others; a name created twice. Warnings: locks, late changes."""
    facts = {one.rank: one.facts[GROUP]["shared"] for one in seen if one.facts.get(GROUP, {}).get("shared")}
    if len(facts) < 2:
        return []
    names = {one.rank: one.node for one in seen}
    apart = _apart(facts)
    together = [rank for rank in facts if rank not in apart]
    found = [(names[rank], _not_shared(facts[rank], names, together)) for rank in apart]
    if not apart:
        ok = judged(GROUP, "shared by all nodes", "ok", f"{len(facts)} nodes read each other's files")
        found += [(names[rank], ok) for rank in together]
    found += [("", finding) for finding in _race(facts, together)]
    return [*found, *_locks_and_changes(facts, names, together)]


def _apart(facts: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Ranks outside the largest set that see each other, directly or by others; of equal sets, the lowest rank's."""
    leader = {rank: rank for rank in facts}

    def find(rank: int) -> int:
        while leader[rank] != rank:
            rank = leader[rank]
        return rank

    for rank, one in facts.items():
        for other, error in one["sees"].items():
            if not error and int(other) in leader:
                first, second = sorted((find(rank), find(int(other))))
                leader[second] = first
    sets = [[rank for rank in facts if find(rank) == root] for root in sorted(set(map(find, facts)))]
    largest = max(sets, key=len)
    return [rank for rank in facts if rank not in largest]


def _not_shared(one: Mapping[str, Any], names: Mapping[int, str], together: Sequence[int]) -> Finding:
    missing = [names[int(rank)] for rank, error in one["sees"].items() if error]
    found = f"does not see what {', '.join(missing) or 'the others'} wrote, nor they what it wrote"
    expected = f"the same folder as on {', '.join(names[rank] for rank in together[:3])}"
    fix = "mount the shared folder there, or choose a --run_dir that every node has"
    return judged(GROUP, "shared by all nodes", "wrong", found, expected, fix, setting=True)


def _race(facts: Mapping[int, Mapping[str, Any]], together: Sequence[int]) -> list[Finding]:
    winners = sum(1 for rank in together if facts[rank]["won"] is True)
    if winners == 1:
        return [judged(GROUP, "exclusive create between nodes", "ok", "one of all nodes won")]
    fix = "use a file system whose O_EXCL holds between nodes: two runs could own one folder"
    found = f"{winners} nodes created the same name"
    return [judged(GROUP, "exclusive create between nodes", "wrong", found, "1", fix, setting=True)]


def _locks_and_changes(
    facts: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], together: Sequence[int]
) -> list[tuple[str, Finding]]:
    found = []
    for rank in together:
        lock, renewed = facts[rank]["lock"], facts[rank].get("renewed_s", 0.0)
        if lock not in ("", "refused"):
            text = "holds on one node only" if lock == "given" else lock
            fix = "mount with locks between nodes; data is prepared by one node in any case"
            one = judged(GROUP, "flock between nodes", "warning", text, "refused on the others", fix, setting=True)
            found.append((names[rank], one))
        if renewed is None or renewed > SLOW_S:
            text = "never seen" if renewed is None else f"seen after {renewed:.0f} s"
            fix = "mount with shorter caches of attributes (nfs: actimeo), or expect stale reads after a restart"
            one = judged(GROUP, "changes of other nodes", "warning", text, f"within {SLOW_S:.0f} s", fix, setting=True)
            found.append((names[rank], one))
    if not found:
        ok = judged(GROUP, "between nodes", "ok", "locks hold, and a renamed file shows its new content at once")
        found = [(names[rank], ok) for rank in together]
    return found
