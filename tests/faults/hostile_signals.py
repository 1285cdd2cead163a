"""Signals at random moments of a run of two ranks: it ends as asked within seconds, and goes on bit for bit."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from random import Random

from tests.faults.hostile_judge import CaseVerdict, ugliness
from tests.faults.hostile_process import SCRIPT, forked, in_surroundings
from tests.faults.hostile_targets import digest
from training.checkpoint import folders
from training.checkpoint.format.verify import damages
from training.metrics.jsonl import read_jsonl

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ITERATIONS = 12
FLAGS = ("--nproc", "2", "--run_dir", "signalled", "--train.train_iters", str(ITERATIONS))
LIMIT_S = 60.0
TENSORS = "tensors.txt"
"""Beside the scenes: ``last_tensors`` of an undisturbed run."""
WHOLE_S = 2.5
"""A run of two ranks takes about so long, from its start to its end."""
MOST_LINES = 4
"""Said of the request and its end, beside what a run says anyway."""


def one(draw: Random, scenes: Path, folder: Path) -> tuple[str, str, CaseVerdict]:
    """A case: (kind, what was done, what came of it)."""
    copy = folder / "copy"
    shutil.copytree(scenes / "run", copy, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    names = draw.choices(SIGNALS, k=draw.choice([1, 1, 1, 2]))
    moments = [draw.uniform(0, WHOLE_S), draw.choice([0.0, draw.uniform(0, 0.5)])]
    to_group = draw.random() < 0.4
    environ = {"TMPDIR": str(folder)}

    def during(pid: int) -> None:
        for name, moment in zip(names, moments, strict=False):
            time.sleep(moment)
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_group else os.kill)(pid, getattr(signal, name))

    words = (SCRIPT, "recipe.toml", *FLAGS)
    ended = in_surroundings(words, copy, LIMIT_S, environ, lambda: None, during)
    who = "its group" if to_group else "the launcher"
    text = f"{', '.join(names)} to {who} after {moments[0]:.2f} s and {moments[1]:.2f} s more"
    kind = "signals"
    if ended.code is None:
        return kind, text, CaseVerdict("hang", ended.said[-300:])
    untouched = not (copy / "signalled").exists()
    by_itself = ended.code < 0 and -ended.code in [getattr(signal, name) for name in names] and untouched
    if not by_itself and (ugly := ugliness(ended)):  # the system ends a process that is not listening yet
        return kind, text, CaseVerdict("traceback", ugly)
    if not by_itself and ended.code not in (0, 75, 130):
        return kind, text, CaseVerdict("poor", f"exit code {ended.code}: {ended.said[-300:]!r}")
    for path in folders.complete(copy / "signalled/checkpoints"):
        if found := damages(path, "hashes"):
            return kind, text, CaseVerdict("loss", f"{path.name}: {found[0].text}")
    again = forked(words, copy, LIMIT_S, environ)
    if again.code:
        return kind, text, CaseVerdict("loss", f"the next start ended with {again.code}: {again.said[-300:]!r}")
    if (seen := losses(copy)) != (expected := undisturbed(scenes)):
        return kind, text, CaseVerdict("silent", f"expected losses {expected}, found {seen}")
    return kind, text, CaseVerdict("handled")


def last_tensors(copy: Path) -> str:
    """Digests of the fourth checkpoint's files, as a text; empty where it has none."""
    return " ".join(digest(path) for path in sorted((copy / "run/checkpoints/iter_0000004").glob("*.bin")))


def losses(copy: Path) -> list[float]:
    """Of all iterations."""
    return [line["loss"] for line in read_jsonl(copy / "signalled/metrics.jsonl") if "loss" in line]


def undisturbed(scenes: Path) -> list[float]:
    """Those of an undisturbed run, made once by ``make``."""
    return [float(line) for line in (scenes / "losses.txt").read_text().split()]


def make(scenes: Path, scratch: Path) -> None:
    """Note losses and tensors of an undisturbed run. Raises RuntimeError where it fails."""
    copy = scratch / "undisturbed"
    shutil.copytree(scenes / "run", copy)
    ended = forked((SCRIPT, "recipe.toml", *FLAGS), copy, LIMIT_S)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with {ended.code}: {ended.said}")
    (scenes / "losses.txt").write_text("\n".join(map(repr, losses(copy))))
    ended = forked((SCRIPT, "recipe.toml", "--run_dir", "run"), copy, LIMIT_S)
    if ended.code:
        raise RuntimeError(f"the undisturbed run ended with {ended.code}: {ended.said}")
    (scenes / TENSORS).write_text(last_tensors(copy))
    shutil.rmtree(copy)
