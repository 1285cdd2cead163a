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

from parallel.launch import STAGE, Identity
from program.errors import SharedMistake
from training.checkpoint.folders import checkpoints
from training.checkpoint.start import iteration_now
from training.cli.elastic import elastic_layout
from training.config.stages import Stage

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def follows(stage: Stage, run_dir: Path, identity: Identity | None) -> bool:
    """Whether this process is to begin another stage, now that one has ended with code 0: at its last iteration, and
    not because train.exit_interval or a callback asked for it."""
    if stage.begin.is_last or (identity is not None and identity.port is not None):  # a local rank: its parent does
        return False
    interval = stage.config.train.exit_interval
    asked = interval is not None and stage.end % interval == 0
    over = iteration_now(checkpoints(run_dir), stage.config.checkpoint) == stage.end
    return over and not asked and not (run_dir / "done").exists()


def begin(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start again with these arguments, in the environment that the launcher gave; does not return."""
    number = int(environ.get(STAGE, "0")) + 1
    sys.stdout.flush()
    sys.stderr.flush()
    for file in list(Path("/proc/self/fd").iterdir()):
        if int(file.name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(int(file.name), False)  # what a library has left open, as a socket that listens
    words = [sys.executable, str(PROGRAM), *argv]
    os.execve(sys.executable, words, {**environ, STAGE: str(number)})


def check_stages(later: Sequence[Stage], world_size: int, cuda: bool) -> None:
    """Raises SharedMistake with every problem of the stages to come on ``world_size`` ranks."""
    problems = []
    for stage in later:
        config = stage.config
        if config.device == "auto" and not cuda:
            config = replace(config, device="cpu")
        fitted = elastic_layout(config, world_size)
        found = fitted.config.problems(fitted.world_size)
        problems += [f'stage "{stage.name}": {one}' for one in found]
    if problems:
        raise SharedMistake("\n  ".join(["problems with stages to come:", *problems]))
