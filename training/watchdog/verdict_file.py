"""RUN_DIR/watch/start-...: what the watchdogs of a start tell each other, and its one verdict.

    node-HOST.json      one node's ranks, every few seconds, by the first watchdog of the node
    judge.json          asks all nodes to answer, because nothing moves on one node, or a peer is lost
    stacks-HOST.txt     the Python stacks of a node's ranks; nccl-RANK: torch's NCCL flight recorder
    verdict.json        why the start ended: the first to create it wins

Files are replaced by rename: readers see whole ones, and over NFS a rename within the folder is what makes this host
look again for names that were missing a moment ago.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from program.durable import replace_file
from program.untrusted import if_readable, read_bytes, read_json, read_text
from training.watchdog.verdict import NodeReport, Verdict

WATCH = "watch"
START = "start-"
"""Begins the name of a start's folder, see ``starts``."""
VERDICT = "verdict.json"
JUDGE = "judge.json"


def newest(run_dir: Path) -> Path | None:
    """The verdict.json of the start that left its verdict last; None where none did."""
    found = []
    with contextlib.suppress(OSError):
        for path in (run_dir / WATCH).glob(f"{START}*/{VERDICT}"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None


def replace(path: Path, entries: Any) -> None:
    """``entries`` as the JSON in ``path``, whole at any time. Raises OSError."""
    replace_file(path, json.dumps(entries).encode(), suffix=f".{os.getpid()}", durable=False)


def content(path: Path) -> bytes | None:
    """What lies there; None where nothing does, or it cannot be read."""
    return if_readable(read_bytes, path)


def replace_verdict(folder: Path, verdict: Verdict) -> None:
    """A better one has come; said all the same where the folder takes no file."""
    with contextlib.suppress(OSError):
        replace(folder / VERDICT, dataclasses.asdict(verdict) | {"id": os.urandom(8).hex()})


def leave(folder: Path, verdict: Verdict) -> bool:
    """Make ``verdict`` the start's, unless it has one: whether it is.

    Where the folder takes no file (its disk is full) this is the verdict, so that it is said at all.
    """
    own = dataclasses.replace(verdict, id=os.urandom(8).hex())
    try:
        _create(folder / VERDICT, json.dumps(dataclasses.asdict(own), indent=1) + "\n")
    except FileExistsError:
        found = read(folder)  # over NFS a link whose answer was lost is reported as existing
        return found is not None and found.id == own.id
    except OSError:
        pass
    return True


def ask(folder: Path, judging: str) -> None:
    """Ask all nodes to answer ``judging``, unless another node asks already. Raises OSError where that is unknown."""
    with contextlib.suppress(FileExistsError):
        _create(folder / JUDGE, json.dumps(judging))


def asked(folder: Path) -> str:
    """What the nodes are asked to answer; empty: nothing."""
    found = content(folder / JUDGE)
    return "" if found is None else found.decode(errors="replace").strip('"')


def drop(folder: Path) -> None:
    """Nothing is asked any more."""
    with contextlib.suppress(OSError):
        (folder / JUDGE).unlink()


def _create(path: Path, text: str) -> None:
    """A new file, whole at once. Raises FileExistsError, or another OSError."""
    with contextlib.suppress(FileExistsError):  # a file may lie there; then the next line says so
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        unfinished.write_text(text)
        _link(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _link(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links there; a reader may see a part for a moment
        with path.open("x") as file:
            file.write(read_text(unfinished))


def read(folder: Path) -> Verdict | None:
    """The start's verdict, if it has one."""
    return if_readable(read_json, folder / VERDICT, Verdict)


def tell(folder: Path, report: NodeReport) -> None:
    """This node's word. A disk that is full or away for a while is no reason to stop watching."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / f"node-{report.host}.json", dataclasses.asdict(report))


def node_reports(folder: Path) -> list[NodeReport]:
    """All nodes' words. One read for each node: for the one who judges."""
    found = (if_readable(read_json, path, NodeReport) for path in sorted(folder.glob("node-*.json")))
    return [one for one in found if one is not None]
