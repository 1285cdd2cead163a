"""A Megatron-LM command line or launch script becomes a Triplane recipe, on stdout.

    python -m tools.from_megatron pretrain.sh > recipe.toml
    python -m tools.from_megatron "torchrun ... pretrain_gpt.py --num-layers 32 ..." > recipe.toml
    sed s/64/128/ pretrain.sh | python -m tools.from_megatron - > recipe.toml

Every flag is translated, or listed with the reason at the head of the recipe and on stderr. A script is read, never
run: running it could start jobs, delete files or need another machine. What it takes from outside ($1, $SLURM_NNODES,
the output of commands) is not known: give it with --set, as in --set 1=/checkpoints --set SLURM_NNODES=8. Paths that
stay unknown are left open; a number of the model's that stays unknown is an error.

Exit code 0: everything was translated or changes nothing here. 1: something is unsupported, unknown, left open or
would be refused by a run; the recipe is complete apart from it. 2: nothing could be read.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from parallel.errors import UserError
from tools.from_megatron.convert import convert


@dataclass(kw_only=True)
class FromMegatron:
    """Translate a Megatron-LM command line or launch script."""

    source: tyro.conf.Positional[str]
    """A script's path, the text of a script or of a command line in quotes, or - for standard input."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE of variables that the script takes from outside, as often as needed; 1=VALUE is its first argument."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all is translated; 1: something is not; 2: bad input."""
    given = sys.argv[1:] if argv is None else argv
    # A command line that begins with its first flag is one word here, no flag of ours.
    shielded = [f" {word}" if word.startswith("--") and len(word.split()) > 1 else word for word in given]
    job = tyro.cli(
        FromMegatron, args=shielded, use_underscores=True, prog="python -m tools.from_megatron", description=__doc__
    )
    try:
        text, origin = read(job.source)
        recipe, summary = convert(text, origin, settings(job.set))
    except UserError as error:
        print(f"tools.from_megatron: {error}", file=sys.stderr)
        return 2
    print(recipe, end="")
    for block in summary.blocks:
        print("\n  ".join(block), file=sys.stderr)
    return 0 if summary.complete else 1


def settings(given: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping. Raises UserError for any other."""
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, equals, _ in pairs if not equals or not name]:
        raise UserError(f'--set {wrong[0]}: expected NAME=VALUE, as in "--set SLURM_NNODES=8".')
    return {name: value for name, _, value in pairs}


def read(source: str) -> tuple[str, str]:
    """The text that is meant, and a sentence on where it comes from.

    Raises UserError where it can be neither a file nor a command.
    """
    if source == "-":
        return sys.stdin.read(), "from standard input."
    if "\n" not in source and len(source) < 4096 and not source.lstrip().startswith("--") and Path(source).is_file():
        try:
            return Path(source).read_text(), f"from {source}."
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: cannot be read: {error}") from None
    if "--" not in source:
        raise UserError(f"{source}: no such file, and no command with flags either. Put a command in quotes.")
    return source, "from a command line."


if __name__ == "__main__":
    raise SystemExit(main())
