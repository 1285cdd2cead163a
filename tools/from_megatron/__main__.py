"""A Megatron-LM command line or launch script becomes a Triplane recipe, on stdout.

    python -m tools.from_megatron pretrain.sh > recipe.toml
    python -m tools.from_megatron "torchrun ... pretrain_gpt.py --num-layers 32 ..." > recipe.toml
    sed s/64/128/ pretrain.sh | python -m tools.from_megatron - > recipe.toml

Every flag is translated, or listed with the reason at the head of the recipe and on stderr. Bash runs the script in a
process that can start no program, write no file and open no connection; --arguments takes a command's words from a file
instead, and runs nothing. What a script takes from outside ($1, $SLURM_NNODES, the output of commands) is not known:
give it with --set, as in --set 1=/checkpoints --set SLURM_NNODES=8. Paths that stay unknown are left open; a number of
the model's that stays unknown is an error, which says the command to type.

Exit code 0: everything was translated, or changes nothing here.
Exit code 1: a recipe that trains what the script trains. Its head lists what else it lacks: paths that are left open,
ways to be faster or smaller that Triplane does not have, or what a run would refuse until it is mended.
Exit code 2: no recipe. Something is missing or cannot be read; or a flag that the recipe would lack changes the model,
the data or the schedule, or may do so since it is not known, as flags of forks are. --allow_partial writes the recipe
without such flags all the same, with exit code 1; its head lists them.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from program import command
from program.errors import UserError, printable
from program.flags import parse_flags
from program.untrusted import read_text
from tools.from_megatron.convert import convert_source
from tools.from_megatron.missing import typed_words
from tools.from_megatron.sources import Source
from tools.from_megatron.summary import refusal
from training.config.recipe import escaped

SHOWN = 1000
"""Characters of a message that quotes a script."""


@dataclass(kw_only=True)
class FromMegatron:
    """Translate a Megatron-LM command line or launch script."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")] = ""
    """A script's path, the text of a script or of a command line in quotes, or - for standard input."""

    arguments: str = ""
    """A file with the words of one command, or of its flags alone, in the place of SCRIPT. No shell reads it: quotes
    keep words together, and all else stands as it is."""

    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """A variable that the script takes from outside; 1=VALUE is its first argument, '$(command)=VALUE' what a command
    prints, as the script has it. Repeat for more."""

    shape: str = ""
    """The model by name, as in --model.shape: for a YAML file that changes a recipe of Megatron-Bridge's."""

    allow_partial: bool = False
    """Write a recipe although it makes another model, or trains it otherwise; its head says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all is translated; 1: something is not; 2: bad input, or another model."""
    given = sys.argv[1:] if argv is None else argv
    # A command line that begins with its first flag is one word here, not one of our flags.
    shielded = [f" {word}" if word.startswith("--") and len(word.split()) > 1 else word for word in given]
    job = parse_flags(FromMegatron, shielded, "python -m tools.from_megatron", __doc__)
    where = ""
    try:
        source = (
            read_command(job.arguments, job.source, job.shape)
            if job.arguments
            else read(job.source, settings(job.set), job.shape)
        )
        where = "" if source.path is None else f"{source.path}: "
        recipe, summary = convert_source(source, settings(job.set))
        if (summary.other_model or summary.not_understood) and not job.allow_partial:
            raise UserError(refusal(summary.other_model, summary.not_understood, source.typed))
    except UserError as error:
        said = "\n".join(map(cut, str(error).removeprefix(where).splitlines()))
        print(f"tools.from_megatron: {where}{said}", file=sys.stderr)
        return 2
    print(printable(escaped(recipe)), end="")
    for block in summary.blocks:
        print(printable("\n  ".join(map(cut, block))), file=sys.stderr)
    return 0 if summary.complete else 1


def cut(text: str) -> str:
    """Not more of a script than a message needs."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def settings(given: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping. Raises UserError for any other."""
    pairs = [_substitution(text) or text.partition("=") for text in given]
    if wrong := [name for name, equals, _ in pairs if not equals or not name]:
        raise UserError(f'--set {wrong[0]}: expected NAME=VALUE, as in "--set SLURM_NNODES=8".')
    if wrong := [name for name, _, _ in pairs if not re.fullmatch(r"[A-Za-z_][\w.]*|[1-9]\d{0,2}|[$`].*", name)]:
        raise UserError(
            f"--set {wrong[0]}=...: expected the name of a variable, the number of an argument from 1, or a command as "
            "the script has it, in quotes: '$(command)=VALUE'."
        )
    return {name: value for name, _, value in pairs}


def _substitution(text: str) -> tuple[str, str, str] | None:
    """``$(command)=VALUE`` as partition would have it: within the command, = may stand as well."""
    if not text.startswith(("$(", "`")):
        return None
    ends = [found.end() - 1 for found in re.finditer(r"[)`]=", text)]
    end = next((at for at in ends if text.count("(", 0, at) == text.count(")", 0, at)), None)
    return None if end is None else (" ".join(text[:end].split()), "=", text[end + 1 :])


def read(source: str, given: Mapping[str, str], shape: str = "") -> Source:
    """The text that is meant, and where it comes from.

    Raises UserError where it can be neither a file nor a command.
    """
    if not source:
        raise UserError("expected a script: its path, a command in quotes, or -; or --arguments FILE.")
    typed = typed_words(source, given) + (["--shape", shape] if shape else [])
    if source == "-":
        return Source(sys.stdin.read(), "from standard input.", typed=typed, shape=shape)
    path = Path(source)
    if "\n" not in source and not source.lstrip().startswith("--") and _is_there(path):
        try:
            return Source(read_text(path), f"from {source}.", path, typed, shape)
        except OSError as error:
            raise UserError(f"{source}: cannot be read: {error.strerror}.") from None
    if "--" not in source:
        raise UserError(f"{source[:200]}: no such file, and no command with flags either. Put a command in quotes.")
    return Source(source, "from a command line.", typed=typed, shape=shape)


def read_command(path: str, script: str, shape: str) -> Source:
    """The words of a command in a file. Raises UserError where a script or shape is given, and for open quotes."""
    if script:
        raise UserError(f"--arguments {path} beside {script[:200]}: give one of them.")
    if shape:
        raise UserError(f"--arguments {path} beside --shape {shape}: the arguments say their model; leave --shape out.")
    try:
        words = shlex.split(read_text(Path(path)).replace("\\\n", " "), comments=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path}: {str(error).lower()}: a quote is never closed.") from None
    if not words:
        raise UserError(f"{path}: expected flags of Megatron-LM's, and it is empty.")
    return Source("", f"from the arguments in {path}.", Path(path), ["--arguments", path], words=words)


def _is_there(path: Path) -> bool:
    """Whether it names something that exists; a command is too long for a name, or holds what none can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    raise SystemExit(command.run("tools.from_megatron", main))
