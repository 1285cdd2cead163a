"""A command in a process forked from a warm one: what it says, how it ends, and whether it ends at all.

The process that forks has imported everything and computed nothing. The command has a session, a folder and limits
of its own; what it leaves running is killed with it.
"""

import contextlib
import fcntl
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.circumstances import ROOT

MEMORY_BYTES = 6 << 30
"""Address space that a command may have beyond what importing took: enough for small models, not for a runaway."""
MOST_SAID = 1 << 20
SCRIPT = "pretrain_gpt.py"
RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


@dataclass(frozen=True, slots=True)
class EndedProgram:
    """How a command ended."""

    code: int | None
    """The exit code, minus the signal that ended it; None: it hung, and was killed."""
    said: str
    """stdout and stderr, in one."""


def forked(
    words: Sequence[str],
    folder: Path,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    before: Callable[[], None] = lambda: None,
) -> EndedProgram:
    """Run ``pretrain_gpt.py ARGUMENTS`` or ``tools.NAME ARGUMENTS`` in ``folder``; ``before`` is called in it first."""
    console = os.memfd_create("console")
    try:
        pid = os.fork()
        if pid == 0:
            _become(words, folder, console, environ or {}, before)
        code = wait(pid, limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # whatever it started and left
        return EndedProgram(code, os.pread(console, MOST_SAID, 0).decode(errors="surrogateescape"))
    finally:
        os.close(console)


def in_surroundings(
    words: Sequence[str],
    folder: Path,
    limit_s: float,
    environ: Mapping[str, str],
    before: Callable[[], None],
    during: Callable[[int], None] = lambda _: None,
    new_interpreter: bool = False,
) -> EndedProgram:
    """As ``forked``, with surroundings that ``before`` changes in the process itself; ``during`` gets its pid.

    new_interpreter: one, as from a shell. The console is a pipe: limits on files do not touch it.
    """
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, MOST_SAID)
    os.set_blocking(reading, False)
    try:
        if new_interpreter:
            command = [sys.executable, str(ROOT / SCRIPT) if words[0] == SCRIPT else "", *words[1:]]
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, preexec_fn=before,
                env={**os.environ, **environ}, start_new_session=True,
            )  # fmt: skip
            pid = process.pid
        else:
            pid = os.fork()
            if pid == 0:
                _become(words, folder, writing, environ, before)
        during(pid)
        code = wait(pid, limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if new_interpreter:
            process.returncode = code
        try:
            said = os.read(reading, MOST_SAID)
        except BlockingIOError:
            said = b""
        return EndedProgram(code, said.decode(errors="surrogateescape"))
    finally:
        os.close(reading)
        os.close(writing)


def wait(pid: int, limit_s: float) -> int | None:
    """A child's exit code; None where it has not ended in time, and was killed."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        in_time = bool(poll.poll(limit_s * 1000))
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) if in_time else None
    finally:
        os.close(descriptor)


def _become(
    words: Sequence[str], folder: Path, console: int, environ: Mapping[str, str], before: Callable[[], None]
) -> None:
    """In the child: does not return."""
    code: object = 70
    before_us = sys.stdin, sys.stdout, sys.stderr  # kept: they would close these numbers when nothing names them
    try:
        os.setsid()
        for number in RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (console, 1), (console, 2)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        os.environ.update(environ)
        tempfile.tempdir = None  # looked up again in TMPDIR
        os.chdir(folder)
        _limit()
        before()
        code = _run(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        del before_us
        os._exit(code if isinstance(code, int) else int(code is not None))


def _run(words: Sequence[str]) -> int:
    sys.argv = list(words)
    if words[0] == SCRIPT:
        sys.argv[0] = str(ROOT / SCRIPT)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


def _limit() -> None:
    with open("/proc/self/statm") as file:  # noqa: PTH123  (a path object would do no more)
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
