"""Run a command, and start it again after a fault, as long as it gets further. For machines without a scheduler.

    python -m tools.supervise [--max_attempts 5] [--run_dir DIR] -- python pretrain_gpt.py RECIPE.toml [flags]
    python -m tools.supervise -- torchrun --nnodes 2 --node-rank 0 ... pretrain_gpt.py RECIPE.toml [flags]

The rule is that of slurm/pretrain.sbatch (tools.supervise.decide): done and bad input end it, a stop on request does
not count, other failures do until a checkpoint is committed. SIGTERM and Ctrl-C are passed on: the run saves and ends,
and is not started again. SIGUSR2 saves, ends and goes on. A second Ctrl-C does not wait. Each host has a supervisor
of its own: docs/without_slurm.md.

Exit code: that of the last attempt. 0: did what was asked; 2: bad input; 75: stopped on request, saved.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel import command
from parallel.errors import UserError, printable
from parallel.flags import number_problems, parse_flags
from tools.supervise.loop import Budget, supervise
from tools.supervise.notice import Notice
from tools.supervise.requests import Requests
from training.cli import parse

SCRIPT = "pretrain_gpt.py"


@dataclass(kw_only=True)
class Supervise:
    """Run a command, and start it again after a fault. The command follows after --."""

    max_attempts: int = 5
    """Give up after this many failures in a row without a new checkpoint."""

    backoff_s: float = 5.0
    """Seconds before the attempt after a failure; doubled with each further failure in a row."""

    max_backoff_s: float = 300.0
    """Upper limit of the backoff, seconds."""

    run_dir: Path | None = None
    """The run's folder, where progress is read and attempts.jsonl is written. None: the command's own run_dir."""

    notice_command: str = ""
    """A shell command that asks whether this machine is about to be taken away: exit code 0 is a notice, and the run
    saves, ends, and is started again when the notice is gone. Empty: none is run."""

    notice_interval_s: float = 5.0
    """Seconds between two calls of it."""

    def problems(self) -> list[str]:
        """What is wrong within these flags."""
        found = number_problems(self)
        if self.max_attempts < 1:
            found.append(f"--max_attempts must be at least 1, found {self.max_attempts}.")
        for name in ("backoff_s", "max_backoff_s", "notice_interval_s"):
            if getattr(self, name) < 0:
                found.append(f"--{name} must not be below 0, found {getattr(self, name)}.")
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: that of the last attempt."""
    own, command = split(list(sys.argv[1:] if argv is None else argv))
    job = parse_flags(Supervise, own, "python -m tools.supervise", __doc__)
    try:
        if problems := job.problems():
            raise UserError("\n".join(problems))
        if not command:
            raise UserError("no command. Give it after --, as in: -- python pretrain_gpt.py RECIPE.toml")
        run_dir = job.run_dir or run_dir_of(command)
        budget = Budget(max_attempts=job.max_attempts, backoff_s=job.backoff_s, max_backoff_s=job.max_backoff_s)
        requests = Requests()
        requests.listen()
        return supervise(command, run_dir, budget, requests, Notice(job.notice_command, job.notice_interval_s))
    except UserError as error:
        print(f"tools.supervise: {error}", file=sys.stderr)
    except OSError as error:
        print(printable(f"tools.supervise: {command[0]} cannot be started: {error.strerror}."), file=sys.stderr)
    return 2


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our flags, and the command after ``--``."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def run_dir_of(command: Sequence[str]) -> Path:
    """The folder that a command with ``pretrain_gpt.py RECIPE.toml ...`` in it writes to.

    Raises UserError where it has none, and for a bad recipe and bad flags, which need no attempt to be found.
    """
    scripts = [place for place, word in enumerate(command) if Path(word).name == SCRIPT]
    if not scripts:
        raise UserError(f"no {SCRIPT} in the command {' '.join(command)!r}: give the run's folder with --run_dir.")
    config = parse.parse_config(command[scripts[0] + 1 :])
    return Path(config.run_dir or parse.default_run_dir(None))


if __name__ == "__main__":
    raise SystemExit(command.run("tools.supervise", main))
