"""The programs beside training: ``python -m tools.NAME``."""

import sys

from program import command

if sys.argv[:1] == ["-m"]:  # Python looks for the one to run, and imports this package first
    command.prepare_process(sys.orig_argv[sys.orig_argv.index("-m") + 1])
