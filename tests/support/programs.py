"""``pretrain_gpt.py`` as a process of its own, to be killed and stopped, that need not import torch: it is forked.

This process has imported it all and never computed, as the program itself has when it forks its ranks. What is to be
shown of the start itself (imports, launchers) runs the command instead.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import ranks  # noqa: F401  (imports torch and megatron once)
import runs
import training.train  # noqa: F401
from training.watchdog.heartbeat import STACKS_SIGNAL

ENDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Program:
    """One that runs, in a session of its own, with the part of subprocess.Popen's face that tests of it look at."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        environ: Mapping[str, str] | None = None,
        module: str = "",
        folder: Path = runs.ROOT,
    ) -> None:
        """``pretrain_gpt.py ARGUMENTS``, or ``-m module ARGUMENTS``, in ``folder``; output: ``output``.out and .err."""
        self.returncode: int | None = None
        self._files = output.with_suffix(".out"), output.with_suffix(".err")
        self.pid = os.fork()
        if self.pid == 0:
            code: object = 70
            try:
                code = self._run(arguments, environ or {}, module, folder)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):  # whatever happens, this process is not to go on as pytest
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code if isinstance(code, int) else bool(code))

    def _run(self, arguments: Sequence[str], environ: Mapping[str, str], module: str, folder: Path) -> object:
        """What it exits with; pretrain_gpt.py does that by os._exit, and does not come back."""
        os.setsid()
        faulthandler.disable()  # pytest's
        faulthandler.unregister(STACKS_SIGNAL)  # of a test in this process: it would think that its handler is there
        for number in ENDED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, path in zip((1, 2), self._files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), target)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        os.environ.update(environ)
        sys.argv = [module or "pretrain_gpt.py", *arguments]
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(runs.ROOT / "pretrain_gpt.py"), run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0

    def poll(self) -> int | None:
        """The exit code, minus the signal for one that was killed; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, timeout: float = 200.0) -> tuple[str, str]:
        """Wait for the end: what was printed to stdout and stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, "still running"
            time.sleep(0.01)
        return self._files[0].read_text(), self._files[1].read_text()

    def send_signal(self, number: int) -> None:
        """To this process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """With SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """With SIGKILL, all of its session's first group; nothing where it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.communicate()
