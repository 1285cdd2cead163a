"""From a command line to a checked ``RunConfig``.

``python -m training.cli.parse [RECIPE.toml] [flags]`` prints the run's folder, for batch scripts.

A TOML recipe (``training/config/recipe.py``) gives the defaults that flags (``training/cli/flags.py``) override.
"""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from program import command
from program.errors import SharedMistake, UserError
from training.cli.flags import given, override
from training.config.import_path import add_folders
from training.config.recipe import dump, load
from training.config.run_config import RunConfig
from training.run_dir.branch import resolved

__all__ = ["check", "default_run_dir", "dump", "explicit_fields", "fail", "load", "parse_config"]

QUIET_S = 5.0  # how much later another rank may find the mistake: processes that share a node start unevenly


def parse_config(argv: Sequence[str]) -> RunConfig:
    """The configuration that ``[RECIPE.toml] [flags]`` asks for.

    Raises UserError for a bad recipe, unknown flags and values of a wrong type. --help ends the process.
    """
    arguments = list(argv)
    recipe = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    default = load(recipe) if recipe else RunConfig()
    config = override(default, arguments, f"pretrain_gpt.py {recipe or '[RECIPE.toml]'}")
    if config.import_paths or config.stage:
        add_folders(recipe)
    return resolved(dataclasses.replace(config, run_dir=config.run_dir or str(default_run_dir(recipe))))


def explicit_fields(argv: Sequence[str]) -> frozenset[str]:
    """Dotted names of the fields that a command line's flags set."""
    return given(argv[1:] if argv and not argv[0].startswith("-") else argv)


def default_run_dir(recipe: Path | None) -> Path:
    """``runs/NAME`` after the recipe; a run's own ``config.toml`` continues that run.

    A checkpoint's ``config.toml`` starts a new run named after its run and it; a run never writes into one.
    """
    if recipe is None:
        return Path("runs/run")
    if recipe.name != "config.toml":
        return Path("runs") / recipe.stem
    folder = recipe.resolve().parent
    if (folder / "state.json").exists():
        run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
        return Path("runs") / f"from_{run.name}_{folder.name}"
    return folder


def check(config: RunConfig, world_size: int, ranks_per_node: int | None = None) -> None:
    """Raises SharedMistake with every problem of this configuration on ``world_size`` ranks, all at once.

    ranks_per_node: of an allocation; the nearest numbers of nodes that fit are named then.
    """
    problems, fix = config.problems(world_size), []
    if problems and ranks_per_node and world_size % ranks_per_node == 0:
        fix = _nodes_that_fit(config, world_size // ranks_per_node, ranks_per_node)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise SharedMistake("\n  ".join([f"{count} with this configuration:", *problems, *fix]))


def _nodes_that_fit(config: RunConfig, nodes: int, ranks_per_node: int) -> list[str]:
    """One line with the nearest counts below and above; none where no number of nodes helps."""
    fits = [count for count in range(1, max(2 * nodes, 32) + 1) if not config.problems(count * ranks_per_node)]
    nearest = [count for count in fits if count < nodes][-1:] + [count for count in fits if count > nodes][:1]
    if not nearest:
        return []
    counts = " or ".join(map(str, nearest))
    return [f"It fits an allocation of {counts} nodes with {ranks_per_node} ranks each; this one has {nodes}."]


def fail(error: UserError, quiet: bool = False) -> NoReturn:
    """Show a user's mistake, without a traceback, and leave with exit code 2.

    quiet: another rank shows it, and is waited for, since launchers end the others when the first rank leaves;
    what they end them with (SIGTERM) must not hide the code.
    """
    if quiet:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(QUIET_S)
    else:
        print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def main(argv: Sequence[str]) -> int:
    """Print the folder of the run that a command line asks for. Exit code 2, with a message, for a bad one."""
    try:
        print(parse_config(argv).run_dir)
    except UserError as error:
        fail(error)
    return 0


if __name__ == "__main__":
    command.prepare_process("training.cli.parse")
    sys.exit(command.run("training.cli.parse", lambda: main(sys.argv[1:])))
