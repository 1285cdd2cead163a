"""Which TP x PP x DP, how fast, how much memory, how sure: in seconds, without a GPU.

    python -m tools.plan --model llama3_70b --cluster h100_ib --num_gpus 512 --global_batch_size 1024 --seq_length 8192
    python -m tools.plan explain TP=4,PP=2 --recipe slurm/recipes/llama3_8b.toml --cluster h100_ib --num_gpus 64

    search     price every legal layout and show the best (what is done without a subcommand)
    explain    one layout against the best of all, or why it is rejected
    stages     a recipe's [[stage]] tables, and the whole run
    size       how many GPUs, and of which cluster; memory by number format and ZeRO stage
    trace      bytes and collectives of the best layouts, by running the program with tensors without values
    calibrate  measure this machine into a cluster file
    compare    predicted against measured steps on this machine
    backtest   the planner against published runs, or yours
    goodput    the share of time that is training, between failures

Legal layouts are priced from physics: matrix products, attention, memory traffic, links, the pipeline. Left out are
those that only cost: without sequence parallelism or overlap, unless a flag asks. The interval is what published runs,
held against the same prices, were off by. Exit code 0: answered; 2: bad input. Each subcommand has a --help.
"""

import difflib
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from program import command, printing
from program.errors import UserError
from program.flags import parse_flags
from tools.plan import flags, run, stages
from tools.plan.goodput.command import Goodput, goodput

SUBCOMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "search": (flags.SearchFlags, run.search),
    "explain": (flags.ExplainFlags, run.explain),
    "size": (flags.SizeFlags, run.size),
    "stages": (flags.StagesFlags, stages.stages),
    "trace": (flags.TraceFlags, run.trace),
    "calibrate": (flags.CalibrateFlags, run.calibrate),
    "compare": (flags.CompareFlags, run.compare),
    "backtest": (flags.BacktestFlags, run.backtest),
    "goodput": (Goodput, goodput),
}
MOVED = {
    "--explain": "explain TP=8,PP=4", "--why": "explain TP=8,PP=4", "--memory": "size --show memory",
    "--smallest": "size --show smallest", "--sizing": "size --show clusters", "--trace": "trace --layouts 3",
    "--calibrate": "calibrate FILE.toml", "--compare": "compare",
}  # fmt: skip
"""Flags before 0.2.0, and the subcommand that does the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: answered; 2: bad input, in one message."""
    given = list(sys.argv[1:] if argv is None else argv)
    name, rest = subcommand(given)
    if name == "search" and rest and not rest[0].startswith("-"):
        near = difflib.get_close_matches(rest[0], SUBCOMMANDS, n=1)
        meant = f' Did you mean "{near[0]}"?' if near else ""
        print(f'"{rest[0]}": expected a flag or one of {", ".join(SUBCOMMANDS)}.{meant}', file=sys.stderr)
        return 2
    kind, act = SUBCOMMANDS[name]
    if name != "backtest" and (moved := [flag for flag in rest if flag in MOVED]):
        print(f"{moved[0]} is a subcommand now: python -m tools.plan {MOVED[moved[0]]} ...", file=sys.stderr)
        return 2
    description = __doc__ if name == "search" else kind.__doc__
    program = "python -m tools.plan" + (f" {name}" if name in given[:1] else "")
    asked: Any = parse_flags(kind, rest, program, description)
    try:
        with printing.for_a_reader():
            act(asked)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def subcommand(argv: list[str]) -> tuple[str, list[str]]:
    """Its name and what follows. The old spelling ``--backtest CSV`` stands for the subcommand."""
    if argv and argv[0] in SUBCOMMANDS:
        return argv[0], argv[1:]
    argv = [part for given in argv for part in (given.split("=", 1) if given.startswith("--") else [given])]
    if "--backtest" in argv:
        at = argv.index("--backtest")
        return "backtest", [*argv[at + 1 : at + 2], *argv[:at], *argv[at + 2 :]]
    return "search", argv


if __name__ == "__main__":
    gc.disable()  # among hundreds of thousands of layouts it takes a seventh of the time, and finds nothing
    raise SystemExit(command.run("tools.plan", main))
