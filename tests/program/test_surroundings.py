"""Settings of the surroundings that are in the way: one message that names them, exit code 2."""

import errno
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch once)
from parallel import failures
from parallel.launch import Identity
from parallel.lean_imports import lean
from program import command, surroundings


def in_child(do: Callable[[], None]) -> tuple[int, str]:
    """Of ``command.run`` around ``do`` in a forked process: its exit code, and what it said."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 2)
        code = 70
        try:
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115

            def main() -> int:
                do()
                return 0

            code = command.run("program", main)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def raises(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


def limited(size: int) -> Callable[[], None]:
    def do() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        with lean("cpu"):
            pass

    return do


def of_torch() -> None:
    os.environ["TORCH_LOGS"] = "nonsense"
    from torch._logging._internal import _init_logs

    _init_logs()


def warned() -> None:
    warnings.simplefilter("error")
    warnings.warn("a library is old", stacklevel=1)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (warned, "warnings are errors here (PYTHONWARNINGS or -W), and a library warns: a library is old."),
        (of_torch, "TORCH_LOGS='nonsense' in the environment: Invalid log settings"),
        (limited(2 << 30), "limited to 2.00 GiB (ulimit -v), which is too little for torch"),
        (raises(PermissionError(errno.EACCES, "Permission denied", "theirs/x")), "theirs/x: Permission denied. Ask"),
    ],
    ids=["warnings", "TORCH_LOGS", "ulimit", "rights"],
)  # fmt: skip
def test_one_message_and_exit_code_2(do: Callable[[], None], says: str) -> None:
    code, said = in_child(do)
    assert code == 2 and says in said and len(said.splitlines()) == 1, said


def test_a_variable_that_a_library_complains_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "nonsense")
    found = surroundings.problem(ValueError("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."))
    assert found is not None and found.startswith("TORCH_DISTRIBUTED_DEBUG='nonsense' in the environment: The value")
    assert surroundings.problem(ValueError("of our own")) is None
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    advice = RuntimeError("NCCL error in: X.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for details)")
    assert surroundings.problem(advice) is None
    assert surroundings.problem(OSError(errno.ENOSPC, "No space left on device", "x")) is None


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    def gone() -> None:
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        Path.cwd()

    (tmp_path / "gone").mkdir()
    code, said = in_child(gone)
    assert code == 2 and "the folder that it was started in has been removed" in said


def test_no_control_character_of_an_exception_reaches_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def red() -> int:
        error = ValueError("\x1b[31mred\x07")
        error.add_note("\x9b1m")
        raise error

    code, failure = failures.guard(lambda _: red(), Identity())
    assert code == 1 and failure is not None
    failures.report(failure, tmp_path, 1)
    said = capsys.readouterr().err
    assert said.replace("\n", "").isprintable() and r"\x1b[31mred\x07" in said and r"\x9b1m" in said
    assert (tmp_path / "rank-00000.failed.log").read_text().replace("\n", "").isprintable()
