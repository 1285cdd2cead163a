"""Code of a user's that runs in a rank: an end of the process that it causes is a fault that names it.

``sys.exit(0)`` would end one rank as if all were done, 75 as if it had been asked to stop, 76 as if a stage were over;
``os._exit(0)`` ends it without a word; a forked child that comes back would go on as a second rank of the same number.
"""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import wraps

from program.errors import StoppedOnRequest, printable

end_now = os._exit
"""The one that nothing has been put in the place of: for this program's own ends."""
WAY_OUT = "a rank must not end by itself; an exception ends the run, StepRequests(stop=True) saves first"


class EndsProcess(Exception):
    """A user's code wanted to end its process."""


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Around it: what it raises is noted as raised by ``what``, what would end the process is an EndsProcess.

    A child that it forks may do as it likes and end; one that comes back is ended here.
    """
    rank = os.getpid()
    try:
        yield
    except BaseException as error:
        if isinstance(error, StoppedOnRequest) or _is_ctrl_c(error):
            raise
        if os.getpid() != rank:
            _end_child(what, traceback.format_exc())
        found = error
        if not isinstance(error, Exception):
            found = EndsProcess(f"{type(error).__name__}({str(error)!r}): {WAY_OUT}")
        found.add_note(f"raised by {what}")
        if found is error:
            raise
        raise found from error
    if os.getpid() != rank:
        _end_child(what)


def _is_ctrl_c(error: BaseException) -> bool:
    """A run that trains has a handler of its own, which does not raise this."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end_child(what: str, raised: str = "") -> None:
    text = f"{raised}a process that {what} has forked came back: it is ended, or it would go on as a second rank"
    _write(2, text)
    end_now(1)


def _write(descriptor: int, text: str) -> None:
    """Past what Python buffers, which is the parent's."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{printable(text)}\n".encode(errors="backslashreplace"))


def named[**P, T](what: str, call: Callable[P, T]) -> Callable[P, T]:
    """``call`` within ``users_code``."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with users_code(what):
            return call(*args, **kwargs)

    return called


@contextlib.contextmanager
def no_sudden_end() -> Iterator[None]:
    """Within, ``os._exit`` raises EndsProcess in this process; children that it forks end as ever.

    In another thread than the main one it would be raised unheard: there it ends the process, as a fault.
    """
    rank, before, console = os.getpid(), os._exit, os.dup(2)

    def refuse(status: int) -> None:
        if os.getpid() != rank:
            before(status)
        text = f"os._exit({status}): {WAY_OUT}"
        if threading.current_thread() is threading.main_thread():
            raise EndsProcess(text)
        _write(console, f"{''.join(traceback.format_stack())}{text}")
        end_now(1)

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = before
        os.close(console)
