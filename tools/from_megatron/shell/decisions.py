"""Branches that cannot be decided without running something: which way is taken, and what hangs on it.

A script is read once as it stands, each open question answered by a guess. Then it is read once more for each question
with the other answer: where the command that starts the training is the same, the question does not matter.
"""

from dataclasses import dataclass, field

from tools.from_megatron.shell.status import ExitStatus

MOST_QUESTIONS = 60
"""Asked of one script; further ones stay as guessed."""


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A branch that depends on what is not known."""

    line: int
    written: str
    """What is asked, as it stands in the script."""
    taken: bool
    because: tuple[str, ...] = ()
    """Variables that were taken to be unset, on which alone it depends; empty: on files, or on a program."""


@dataclass(slots=True)
class Decisions:
    """Answers while a script is read."""

    reversed: frozenset[int] = frozenset()
    """Numbers of the questions that are answered against the guess."""
    always_reversed: frozenset[tuple[int, str]] = frozenset()
    """Places (line, what is asked) whose questions all are."""
    asked: list[OpenQuestion] = field(default_factory=list)

    def holds(self, status: ExitStatus, line: int, written: str) -> bool:
        """Whether a command succeeds: known, or guessed and noted."""
        if status.certain:
            return status.succeeds
        against = len(self.asked) in self.reversed or (line, written) in self.always_reversed
        taken = status.succeeds is not against
        because = tuple(sorted(status.because)) if status.code is not None else ()
        self.asked.append(OpenQuestion(line, written, taken, because))
        return taken
