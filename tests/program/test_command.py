"""How every program ends: one line, the right exit code, no traceback on the screen; whatever its streams are."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from program import command
from program.errors import SharedFault, UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no\x1b[31m such\x00 thing"), 2, r"tool: no\\x1b\[31m such\\x00 thing"),
        (SharedFault("the folder does not answer"), 1, "tool: the folder does not answer"),
        (KeyboardInterrupt(), 130, "tool: interrupted"),
        (OSError(28, "No space left on device", "/x/y"), 1, "tool: fault: /x/y: No space left on device"),
        (RecursionError("maximum recursion depth exceeded"), 1, "tool: fault: RecursionError: maximum recursion"),
        (MemoryError(), 1, "tool: fault: MemoryError"),
        (BrokenPipeError(32, "Broken pipe"), 0, ""),
    ],
)
def test_what_is_raised_is_a_line(
    error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, stdout = signal.getsignal(signal.SIGINT), os.dup(1)

    def main() -> int:
        raise error

    try:
        assert command.run("tool", main) == code
    finally:
        signal.signal(signal.SIGINT, before)
        os.dup2(stdout, 1)
    printed = capfd.readouterr().err
    assert re.match(said, printed)
    assert "Traceback" not in printed
    if "fault" in printed:
        assert "Traceback" in Path(printed.strip().rpartition("traceback: ")[2]).read_text()


def start(*argv: str, **more: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("argv", [("pretrain_gpt.py", "--help_all"), ("-m", "tools.plan", "--help")])
def test_ctrl_c_while_importing_is_a_line(argv: tuple[str, ...]) -> None:
    """From our first line on; before it, Python's own start is its own. What is imported is seen on stderr."""
    for moment_s in (0.02, 0.15):
        process = start("-X", "importtime", *argv)
        assert process.stderr is not None
        while "program.command" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        own = [line for line in said.splitlines() if not line.startswith("import time:")]
        if process.returncode:
            assert process.returncode in (75, 130)
            assert len(own) == 1 and "interrupted" in own[0], own


def test_closed_streams_are_no_fault(tmp_path: Path) -> None:
    shell = f"exec {sys.executable} pretrain_gpt.py slurm/recipes/debug.toml --dry_run"
    for closed in (">&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{shell} {closed}", shell=True, cwd=ROOT).returncode == 0
    assert subprocess.run(f"{shell} > /dev/full", shell=True, cwd=ROOT, capture_output=True).returncode == 1
