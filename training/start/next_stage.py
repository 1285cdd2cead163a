"""From one ``[[stage]]`` to the next: the program replaces itself by a new start of the same run.

A new process has nothing of the old one: no group, no memory of a GPU, no state of a library. It costs what a start
costs, some seconds a stage. Under torchrun and srun each rank does so, with its process number and its environment as
the launcher gave them; local ranks end, and their parent does.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from parallel.launch import STAGE
from program.errors import SharedMistake
from training.cli.elastic import elastic_layout
from training.config.run_config import RunConfig

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def saved(environ: Mapping[str, str]) -> int | None:
    """The iteration that ``begin`` was given by the process that this one was, if it was another."""
    number = environ.get(STAGE, "").rpartition(" ")[2]
    return int(number) if number.isdecimal() else None


def begin(argv: Sequence[str], environ: Mapping[str, str], saved: int) -> None:
    """Start again with these arguments, in the environment that the launcher gave; does not return.

    saved: the iteration of the checkpoint to continue, which a network's file system may be slow to list.
    """
    before = environ.get(STAGE, "0").partition(" ")[0]
    number = int(before) + 1 if before.isdecimal() else 1
    sys.stdout.flush()
    sys.stderr.flush()
    for file in list(Path("/proc/self/fd").iterdir()):
        if int(file.name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(int(file.name), False)  # what a library has left open, as a socket that listens
    words = [sys.executable, str(PROGRAM), *argv]
    os.execve(sys.executable, words, {**environ, STAGE: f"{number} {saved}"})


def check_stages(later: Sequence[RunConfig], world_size: int, at_work: int | None, cuda: bool) -> None:
    """Raises SharedMistake with every problem of the stages to come on ``world_size`` ranks.

    at_work: of ranks that a launcher has started, those that train now; the others end.
    """
    problems = []
    for config in later:
        if config.device == "auto" and not cuda:
            config = replace(config, device="cpu")
        fitted = elastic_layout(config, world_size)
        found = fitted.config.problems(fitted.world_size)
        if at_work is not None and fitted.world_size > at_work:
            found.append(
                f"parallel.elastic: {fitted.world_size} of {world_size} ranks fit it, and {at_work} the stage of now, "
                "after which the others are gone. Give the stages sizes that as many ranks fit."
            )
        problems += [f'stage "{config.own_stage.first.name}": {one}' for one in found]
    if problems:
        raise SharedMistake("\n  ".join(["problems with stages to come:", *problems]))
