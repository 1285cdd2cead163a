"""Flags from dataclasses."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from program.flags import number_problems, parse_flags
from tools.doctor.__main__ import main as doctor


@dataclass(kw_only=True)
class Shared:
    """Flags of two commands."""

    folder: Path
    """Where it lies: a folder that exists, on a disk that every node mounts, and that
    this user may write to."""


@dataclass(kw_only=True)
class Copy(Shared):
    """Copies.

    From here to there.
    """

    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))


def test_a_docstring_of_two_lines_is_one_paragraph_and_inherited(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_flags(Copy, ["--help"], "python -m copy")
    said = capsys.readouterr().out
    assert "usage: python -m copy" in said and "From here to there." in said and "(default: 1 2)" in said
    assert "every node mounts, and that this user may" in said  # on one line


def test_values_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_flags(Copy, ["--folder", "x", "--sizes", "3"], "copy") == Copy(folder=Path("x"), sizes=(3,))
    assert parse_flags(Copy, ["--folder", "x"], "copy").sizes == (1, 2)
    with pytest.raises(SystemExit, match="2"):
        parse_flags(Copy, [], "copy")
    assert "--folder" in capsys.readouterr().err


@dataclass(kw_only=True)
class Wait:
    """Waits."""

    pause_s: float = 1.0
    tokens: float | None = None
    shares: tuple[float, ...] = ()
    count: int = 1
    copy: Copy | None = None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pause_s nan", "--pause_s must be a finite number, found nan"),
        ("--pause_s inf", "--pause_s must be a finite number, found inf"),
        ("--pause_s -1e300", "--pause_s must be from -1e+09 to 1e+09, found -1e+300"),
        ("--tokens 1e19", "--tokens must be from -1e+18 to 1e+18, found 1e+19"),
        ("--shares 1 nan", "--shares must be a finite number, found nan"),
        (f"--count {'9' * 400}", "--count must be from -1e+18 to 1e+18, found more digits"),
    ],
)
def test_a_number_that_no_flag_means_is_named(words: str, says: str) -> None:
    assert number_problems(parse_flags(Wait, words.split(), "python -m wait")) == [f"{says}."]
    assert not number_problems(parse_flags(Wait, ["--tokens", "15e12"], "python -m wait"))


@dataclass(kw_only=True)
class Ended:
    """Has ended."""

    code: int | None = None
    """Exit code."""


@pytest.mark.parametrize("code", ["9" * 5000, "x" * 5000])
def test_of_a_long_word_a_message_repeats_the_first_part(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_flags(Ended, ["--code", code], "python -m ended")
    said = capsys.readouterr().err
    assert "--code" in said and code[:20] in said and len(said) < 2000
    assert parse_flags(Shared, ["--folder", code], "copy").folder == Path(code)


@pytest.mark.parametrize("flag", ["--meeting_s", "--time_limit_s", "--free_gib"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_a_doctor_waits_no_such_time(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor([flag, value]) == 2
    assert f"doctor: {flag} must be" in capsys.readouterr().err
