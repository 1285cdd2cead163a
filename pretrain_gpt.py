"""Pretrain a GPT.  python pretrain_gpt.py [RECIPE.toml] [--section.field value ...]

The same command runs under torchrun and srun, which start the ranks themselves, and alone, where it starts
``nproc`` local ranks: forked on the CPU, new processes on GPUs.
"""

import os
import sys

from program import command


def main() -> int:
    """The exit code: 0 did what was asked, 2 bad input, 75 stopped on request and saved; anything else is a fault."""
    from training.start.ranks import main  # imports what a start needs, once Ctrl-C is looked after

    return main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    command.prepare_process("pretrain_gpt.py")
    from training.watchdog.exit_code_file import exit_code_file

    try:
        with exit_code_file(os.environ):
            sys.exit(command.run("pretrain_gpt.py", main))
    except SystemExit as stopped:
        command.leave(stopped.code)
