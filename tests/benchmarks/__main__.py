"""Measure Triplane on a CPU against peers, and write docs/benchmarks/*.json.

    python -m tests.benchmarks step          a training step against plain PyTorch, ranks' first step, --help
    python -m tests.benchmarks checkpoint    save, load and convert against the disk and megatron-core
    python -m tests.benchmarks data          tokenise and load against Megatron-LM and other loaders
    python -m tests.benchmarks optimizers    1,000 iterations of Muon beside AdamW, and a picture; 15 minutes
    python -m tests.benchmarks mup           learning rates at two widths, with muP and without, a picture; 5 minutes

Each has --help. Exit code 0: measured, whether the goals were met or not (data: all goals met); 1: otherwise.
"""

import importlib
import sys
from collections.abc import Sequence

from program import command
from program.errors import UserError

SUBCOMMANDS = ("step", "checkpoint", "data", "optimizers", "mup")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the subcommand. Raises UserError for a name that is none."""
    name, *flags = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in SUBCOMMANDS:
        found = f'"{name}"' if name else "nothing"
        raise UserError(f"expected a subcommand, {', '.join(SUBCOMMANDS)}; found {found}. See --help.")
    code: int = importlib.import_module(f"tests.benchmarks.{name}.command").main(flags)
    return code


if __name__ == "__main__":
    raise SystemExit(command.run("tests.benchmarks", main))
