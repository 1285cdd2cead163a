"""Passes exit code 2 (bad input) around torchrun, which makes 1 of every exit code.

Without the file, a 2 is Python's own: it could not open the program, which is no mistake of the input.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

EXIT_CODE_FILE = "TRIPLANE_EXIT_CODE_FILE"
"""Environment variable with the path of a file to leave when a process ends with exit code 2. It may exist, empty."""


@contextlib.contextmanager
def exit_code_file(environ: Mapping[str, str]) -> Iterator[None]:
    """Around ``sys.exit(main())``: exit code 2 is written to the file that the environment names, if it names one.

    All mistakes come this way, those of local ranks by their parent, flags by tyro's own SystemExit. The one exception
    is a rank that waits for another one to show what both have found, and is ended meanwhile
    (``training.cli.parse.fail``): the one that left before it has written the file. It is appended to: a rank that is
    ended between emptying a file and writing to it would take away what another one has written.
    """
    try:
        yield
    except SystemExit as stopped:
        if stopped.code == 2 and EXIT_CODE_FILE in environ:
            with contextlib.suppress(OSError), Path(environ[EXIT_CODE_FILE]).open("a") as file:
                file.write("2\n")
        raise
