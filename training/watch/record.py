"""RUN_DIR/watch: what the watchdogs of an attempt tell each other, and its one verdict. No torch here.

    node-HOST.json      one node's ranks, every few seconds, by the first watchdog of the node
    judge.json          who asks all nodes to answer, because nothing moves on its node
    stacks-HOST.txt     the Python stacks of a node's ranks; nccl-RANK: torch's NCCL flight recorder
    verdict.json        why the attempt ended: whoever creates it first

Files are replaced by rename: readers see whole ones, and over NFS a rename within the folder is what makes this host
look again for names that were missing a moment ago.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from training.watch.node import Report
from training.watch.stacks import Stand
from training.watch.verdict import NodeReport, Verdict

WATCH = "watch"
VERDICT = "verdict.json"
JUDGE = "judge.json"


def sweep(folder: Path) -> None:
    """An attempt begins: what earlier ones left is removed. By one process, before its ranks start or as rank 0."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.mkdir()


def replace(path: Path, entries: Any) -> None:
    """``entries`` as the JSON in ``path``, whole at any time. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(entries))
    unfinished.replace(path)


def content(path: Path) -> bytes | None:
    """What lies there; None where nothing does, or it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def mark(path: Path) -> str:
    """Tells what lies there from anything written there later; empty where nothing does."""
    text = content(path)
    return f"{zlib.crc32(text):08x}-{len(text)}" if text is not None else ""


def replace_verdict(folder: Path, verdict: Verdict) -> None:
    """A better one has come; said all the same where the folder takes no file."""
    with contextlib.suppress(OSError):
        replace(folder / VERDICT, dataclasses.asdict(verdict) | {"id": os.urandom(8).hex()})


def leave(folder: Path, verdict: Verdict, stale: str = "") -> bool:
    """Make ``verdict`` the attempt's, unless it has one: whether it is. stale: an earlier attempt's ``mark``.

    Where the folder takes no file (its disk is full) this is the verdict, so that it is said at all.
    """
    path = folder / VERDICT
    own = dataclasses.replace(verdict, id=os.urandom(8).hex())
    unfinished = folder / f".{VERDICT}.{own.id}"
    try:
        folder.mkdir(exist_ok=True)
        unfinished.write_text(json.dumps(dataclasses.asdict(own), indent=1) + "\n")
    except OSError:
        return True
    try:
        if stale and mark(path) == stale:
            path.unlink(missing_ok=True)
        _link(unfinished, path)
    except FileExistsError:
        found = read(folder)  # over NFS a link whose answer was lost is reported as existing
        return found is not None and found.id == own.id
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return True


def _link(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links there; a reader may see a part for a moment
        with path.open("x") as file:
            file.write(unfinished.read_text())


def read(folder: Path, stale: str = "") -> Verdict | None:
    """The attempt's verdict, if it has one; ``stale`` is the ``mark`` of an earlier attempt's."""
    text = content(folder / VERDICT)
    if text is None or (stale and mark(folder / VERDICT) == stale):
        return None
    with contextlib.suppress(ValueError, TypeError):
        return Verdict(**json.loads(text))
    return None


def tell(folder: Path, report: NodeReport) -> None:
    """This node's word. A disk that is full or away for a while is no reason to stop watching."""
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        replace(folder / f"node-{report.host}.json", dataclasses.asdict(report))


def told(folder: Path) -> list[NodeReport]:
    """All nodes' words. One read for each node: for the one who judges."""
    reports = []
    for path in sorted(folder.glob("node-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            entries = json.loads(path.read_bytes())
            entries["ranks"] = [_report(entry) for entry in entries["ranks"]]
            reports.append(NodeReport(**entries))
    return reports


def _report(entry: dict[str, Any]) -> Report:
    stand = entry.pop("stand")
    return Report(**entry, stand=Stand(**stand) if stand else None)
