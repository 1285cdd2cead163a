"""Whether a command succeeded, and how certain that is; and what ends more than one command."""

from dataclasses import dataclass

from parallel.errors import UserError


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Of a command that was followed, or that only running it would show."""

    code: int | None = 0
    """None: not known."""
    because: frozenset[str] = frozenset()
    """Variables that were taken to be unset; another value of them may change it."""
    guess: bool = True
    """Of an unknown one: whether to go on as if it had succeeded."""

    @property
    def succeeds(self) -> bool:
        """As far as is known, or guessed."""
        return self.guess if self.code is None else self.code == 0

    @property
    def certain(self) -> bool:
        """Whether nothing from outside can change it."""
        return self.code is not None and not self.because

    def negated(self) -> "ExitStatus":
        """As behind ``!``."""
        code = None if self.code is None else int(self.code == 0)
        return ExitStatus(code, self.because, not self.guess)


SUCCESS, FAILURE = ExitStatus(0), ExitStatus(1)
UNKNOWN = ExitStatus(None)
"""Of a program: most succeed."""


def of(holds: bool | None, because: frozenset[str] = frozenset()) -> ExitStatus:
    """Of a test; one of files or of a program's output is guessed not to hold."""
    return ExitStatus(None if holds is None else int(not holds), because, guess=False)


class EndlessLoop(UserError):
    """More commands than a script needs."""


class ShellExit(Exception):
    """``exit``, and what ends a script otherwise."""

    def __init__(self, status: ExitStatus = SUCCESS) -> None:
        super().__init__()
        self.status = status


class FunctionReturn(Exception):
    """``return``."""

    def __init__(self, status: ExitStatus) -> None:
        super().__init__()
        self.status = status


class LoopEnd(Exception):
    """``break`` and ``continue``."""

    def __init__(self, levels: int, again: bool) -> None:
        super().__init__()
        self.levels, self.again = levels, again
