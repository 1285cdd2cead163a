"""Which TP x PP x DP, how fast, how much memory, how sure: in seconds, without a GPU.

    python -m tools.plan --model llama3_70b --cluster h100_ib --num_gpus 512 --global_batch_size 1024 --seq_length 8192
    python -m tools.plan --recipe slurm/recipes/llama3_8b.toml --cluster h100_ib --num_gpus 64 --explain TP=4,PP=2
    python -m tools.plan --backtest tools/plan/backtest/published.csv

Legal layouts are priced from physics: matrix products, attention, memory traffic, links, the pipeline. Left out are
those that only cost: without sequence parallelism or overlap, unless a flag asks. The interval is what published runs,
held against the same prices, were off by. Exit code 0: answered; 2: bad input.
"""

import gc
import sys
from collections.abc import Sequence

import tyro

from parallel import command, output
from parallel.errors import UserError
from tools.plan.flags import Flags
from tools.plan.run import run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: answered; 2: bad input, in one message."""
    flags = tyro.cli(Flags, args=argv, use_underscores=True, prog="python -m tools.plan", description=__doc__)
    try:
        with output.for_a_reader():
            run(flags)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    gc.disable()  # among hundreds of thousands of layouts it takes a seventh of the time, and finds nothing
    raise SystemExit(command.run("tools.plan", main))
