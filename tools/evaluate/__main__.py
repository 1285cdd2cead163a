"""A checkpoint's scores on tasks of lm-evaluation-harness, by the checkpoint itself: nothing is exported.

    python -m tools.evaluate runs/demo --tasks hellaswag,arc_easy

The table goes to stdout, all else to stderr. Tasks and their data sets are found before anything is computed. Exit code
2: bad input; 130: Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel import launch
from program import command
from program.errors import UserError
from program.flags import parse_flags
from program.limits import too_small
from tools.evaluate.work import PLACE, ScoringJob, evaluate
from tools.shared.loaded_model import on_ranks
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from tools.shared.written import check_file
from training.evaluation.tasks import TaskRequest, prepare_tasks

PROGRAM = "tools.evaluate"
WAITING_MINUTES = 60.0
"""How long ranks wait for rank 0, which adds up results and loads data sets."""


@dataclass(kw_only=True)
class Evaluate(ModelFlags):
    """Score a checkpoint's model on tasks."""

    tasks: str
    """Tasks, groups or tags, with commas between, as lm-evaluation-harness names them."""

    task_folder: str | None = None
    """Folder with task files (.yaml) of your own, beside those that the harness brings."""

    limit: int | None = None
    """Documents of each task, the first ones. None: all."""

    num_fewshot: int | None = None
    """Examples before each question. None: what the task's file says."""

    output: Path | None = None
    """File for the results as JSON, as lm-evaluation-harness writes them."""

    micro_batch_size: int = 1
    """Sequences of model.seq_length tokens that a forward pass may hold; of shorter requests it holds more."""

    def problems(self) -> list[str]:
        """What is wrong with the flags alone."""
        found = []
        if not self.names:
            found.append("--tasks: expected names, with commas between.")
        found += too_small(self, "--", 1, "limit", "micro_batch_size") + too_small(self, "--", 0, "num_fewshot")
        if self.output is not None and not self.output.parent.is_dir():
            found.append(f"--output: no folder {self.output.parent}.")
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks, each once."""
        return tuple(dict.fromkeys(name for part in self.tasks.split(",") if (name := part.strip())))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the table is printed; 2: bad input; 130: Ctrl-C."""
    flags = parse_flags(Evaluate, argv, f"python -m {PROGRAM}", __doc__)
    if problems := flags.problems():
        raise UserError("\n  ".join(problems))
    identity = launch.detect(os.environ)
    if flags.output is not None:
        check_file(flags.output, *PLACE)
    opened = open_checkpoint(flags, identity.world_size if identity else None)
    if opened.tokenizer is None:
        raise UserError(f"{opened.tokenizer_problem} Without a tokenizer there are no tasks.")
    request = TaskRequest(
        names=flags.names, folder=flags.task_folder, limit=flags.limit, num_fewshot=flags.num_fewshot,
        seq_length=opened.config.model.seq_length, flags="--",
    )  # fmt: skip
    tasks = None
    if identity is None or identity.rank == 0:
        tasks = prepare_tasks(request, partial(print, file=sys.stderr, flush=True))
    job = ScoringJob(tasks=tasks, micro_batch_size=flags.micro_batch_size, output=flags.output)
    return on_ranks(opened, PROGRAM, partial(evaluate, job), WAITING_MINUTES)


if __name__ == "__main__":
    command.prepare_process(PROGRAM)
    sys.exit(command.run(PROGRAM, main))
