"""Whether all nodes see the same run folder: what a rank on one node writes, the others must find."""

import contextlib
import os
import secrets
import time
from functools import partial
from pathlib import Path

from parallel.groups import Ranks
from parallel.launch import node_name
from program.untrusted import read_text
from training.checkpoint.agreement import gathered, on_first_rank
from training.run_dir.errors import has_trained, shared_run_dir_error

WAIT_S = 10.0
"""How long a node may take to see a new file. NFS answers from what it knows of a folder for some seconds, but a name
that has not been asked for before is not cached."""


def check_shared(run_dir: Path, ranks: Ranks, wait_s: float = WAIT_S) -> None:
    """The first rank of every node looks for a file that rank 0 has just written. All ranks call this.

    Costs one small file, one broadcast and one reduction; nothing where all ranks are on one node. Raises
    SharedMistake with the nodes that do not see it: they would write parts of checkpoints that are never found. Where
    the run has checkpoints it is a SharedFault: the folder was shared once, and only the file server is slow, or away.
    """
    if ranks.identity.world_size == ranks.identity.local_world_size:
        return
    trained, name, word, problem = on_first_rank(partial(_leave, run_dir), ranks)
    if problem:
        raise shared_run_dir_error(trained, f"run_dir {run_dir}: cannot be written: {problem}.")
    blind = []
    if ranks.identity.local_rank == 0 and not _sees(run_dir / name, word, wait_s):
        blind = [node_name(os.environ)]
    blind = sorted(set(gathered(blind, ranks)))
    if ranks.rank == 0:
        with contextlib.suppress(OSError):
            (run_dir / name).unlink()
    if blind:
        raise shared_run_dir_error(
            trained,
            f"run_dir {run_dir}: not the same folder on all nodes. What rank 0 wrote there within the last "
            f"{wait_s:.0f} s cannot be read on {', '.join(blind)}. Choose a folder on a file system that all nodes "
            "share, with --run_dir.",
        )


def _leave(run_dir: Path) -> tuple[bool, str, str, str]:
    """Write a file with a new name: whether the run has checkpoints, its name, content, what failed."""
    word = secrets.token_hex(8)
    path = run_dir / f".seen-by-all-{word}"
    try:
        path.write_text(word)
    except OSError as error:
        return has_trained(run_dir), "", "", error.strerror or str(error)
    return has_trained(run_dir), path.name, word, ""


def _sees(path: Path, word: str, wait_s: float) -> bool:
    """Open and read, again and again: stat of the name alone may be answered from a cache."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            if read_text(path) == word:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
