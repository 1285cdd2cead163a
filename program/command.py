"""How every program begins and ends: streams that exist, Ctrl-C as one line, no traceback on the screen.

A user's mistake is its message and exit code 2. Any other uncaught exception is a short line with the path of
the saved traceback, and exit code 1: a screen full of frames hides the one sentence that counts.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from program import surroundings
from program.errors import SharedFault, UserError, printable

INTERRUPTED = 130
"""128 + SIGINT, as a shell has it."""
_ROOT = Path(__file__).resolve().parent.parent


def prepare_process(name: str) -> None:
    """Before anything else is imported: Ctrl-C from here on is one line and exit code 130.

    Nothing has been begun that would need an end, so the process leaves from within the handler: an exception could be
    swallowed by an import. Streams that the parent process has closed are opened on /dev/null: a file that is opened
    later, a checkpoint's say, must not get the number of stdout.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may be no UTF-8, a locale no more than ASCII

    def leave(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)


def run(name: str, main: Callable[[], int]) -> int:
    """What ``main`` returns, or the exit code of what it raised, which is said. Ctrl-C raises KeyboardInterrupt in it.

    ``prepare_process`` comes first. SystemExit goes through: its reason was printed where it was raised.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if surroundings.folder_is_gone():
            raise UserError(surroundings.GONE)
        code = main()
        with contextlib.suppress(ValueError):  # closed by main
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _say(f"{name}: interrupted", INTERRUPTED)
    except UserError as error:
        return _say(f"{name}: {error}", 2)
    except SharedFault as fault:
        return _say(f"{name}: {printable(str(fault))}", 1)
    except BrokenPipeError:  # the reader of our output, say head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if problem := surroundings.problem(error):
            return _say(f"{name}: {printable(problem)}", 2)
        return _say(f"{name}: {fault_line(error)}", 1)


def leave(code: object) -> None:
    """End this process. What libraries have left for the interpreter's end (wandb waits for a server that does not
    answer) must not hold the nodes of a job that is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def os_error(name: str, error: OSError) -> int:
    """Say what the system says of a file: the exit code, 2 where it is a right that is missing."""
    code = 2 if isinstance(error, PermissionError) else 1
    return _say(printable(f"{name}: {error.filename or 'a file'}: {error.strerror or error}"), code)


def fault_line(error: BaseException) -> str:
    """A fault of the program or the machine in a line: what, where in our code, and where the traceback lies."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(f"{_ROOT}/") and "/.venv/" not in frame.filename]
    place = f" (in {Path(ours[-1].filename).relative_to(_ROOT)}:{ours[-1].lineno})" if ours else ""
    first = printable(what).splitlines()[0][:500]
    return f"fault: {first}{place}; {_saved(error)}"


def _saved(error: BaseException) -> str:
    """Where the traceback lies, or, where no disk takes it, the traceback."""
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="triplane-fault-", suffix=".txt")
        with os.fdopen(descriptor, "w", errors="backslashreplace") as file:
            file.write(text)
        return f"traceback: {path}"
    except OSError:
        return f"the traceback cannot be saved:\n{printable(text)}"


def _say(text: str, code: int) -> int:
    """On stderr, which may be closed or full."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
    return code
