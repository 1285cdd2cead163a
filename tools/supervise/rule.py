"""Whether an ended run is started again. One pure function."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.failures import STOPPED
from program.schema import Text

BAD_INPUT = 2
"""Exit code of a run that was given something that cannot work: the same again cannot work either."""
MAX_REQUESTS = 20
"""Stops on request in a row during which nothing was committed: a time limit shorter than the start, say."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunAttempt:
    """One attempt to run, as far as it decides about the next one."""

    exit_code: int
    """Of the command that ran, 128 + N where a signal ended it. torchrun and srun hide what the ranks' were."""
    before: int | None = None
    """Iteration of the newest committed checkpoint at its start; None: there was none, or it is unknown."""
    after: int | None = None
    """The same at its end."""
    done: bool = False
    """It left the marker ``done``: all iterations that were asked for are trained."""
    requeue: bool = False
    """It left the marker ``requeue``: stopped on request, saved, to be continued."""
    verdict: Text = ""
    """Why it ended, in its own words; empty where it left none."""
    node: Text = ""
    """The node that the verdict names; empty where it names none."""
    cause: Text = ""
    """What would end every attempt alike: verdict and iteration. Empty where something else may have a part."""

    @property
    def progressed(self) -> bool:
        """Whether something was committed that the next attempt goes on from."""
        return self.after is not None and self.after > (self.before or 0)

    @property
    def requested(self) -> bool:
        """Whether it ended because it was asked to."""
        return self.exit_code == STOPPED or self.requeue

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than it was meant to."""
        return self.exit_code != 0 and not self.requested and not self.done


@dataclass(kw_only=True, slots=True, frozen=True)
class Decision:
    """Whether to start again, and the sentence that says why."""

    again: bool
    why: str
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt should do without."""


def decide(attempt: RunAttempt, earlier: Sequence[RunAttempt] = (), max_attempts: int = 5) -> Decision:
    """Whether to start again after ``attempt``; ``earlier``: those before it of the same job, oldest first.

    Failures are counted in a row while no checkpoint is committed; one that is committed sets the count to 0. Stops
    on request are no failures. What was asked for and is done, and bad input, is never started again; nor is what
    program and data have ended twice in a row, at the same iteration and in the same words.
    """
    attempts = [*earlier, attempt]
    if attempt.done:
        return Decision(again=False, why=f"done{_at(attempt)}")
    if attempt.exit_code == BAD_INPUT:
        why = f"bad input, which stays bad{_because(attempt)}: not started again"
        return Decision(again=False, why=why)
    if attempt.requested:
        return _after_request(attempt, attempts)
    if attempt.exit_code == 0:
        return Decision(again=False, why=f"did what was asked{_at(attempt)}")
    return _after_failure(attempt, attempts, max_attempts)


def _after_request(attempt: RunAttempt, attempts: Sequence[RunAttempt]) -> Decision:
    idle = _in_a_row([each for each in attempts if each.requested or each.progressed])
    if idle >= MAX_REQUESTS:
        why = f"stopped on request {idle} times in a row without a checkpoint in between: not started again"
        return Decision(again=False, why=why)
    why = f"stopped on request{_at(attempt)}: started again, which is no failure"
    return Decision(again=True, why=why)


def _after_failure(attempt: RunAttempt, attempts: Sequence[RunAttempt], max_attempts: int) -> Decision:
    what = f"{how(attempt.exit_code)}{_at(attempt)}{_because(attempt)}"
    if repeated_cause(attempts):
        why = f"{what}; the same as the last time, at the same iteration: program or data, not started again"
        return Decision(again=False, why=why)
    failures = _in_a_row([each for each in attempts if each.failed or each.progressed])
    if failures >= max_attempts:
        times = f"{failures} failures in a row without a new checkpoint" if failures > 1 else "no new checkpoint"
        why = f"{what}; {times}: not started again"
        return Decision(again=False, why=why)
    node = repeated_node(attempts)
    spared = f"; {node} was named twice in a row: better without it" if node else ""
    count = (
        f"failure {failures} of {max_attempts} without a new checkpoint" if failures else "there is a new checkpoint"
    )
    return Decision(
        again=True,
        why=f"{what}; {count}: started again{spared}",
        exclude=(node,) if node else (),
    )


def _in_a_row(attempts: Sequence[RunAttempt]) -> int:
    """How many of the last attempts committed nothing."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        count += 1
    return count


def repeated_node(attempts: Sequence[RunAttempt]) -> str:
    """The node that the last two verdicts both name, or empty. Requests to stop say nothing about nodes."""
    named = [attempt.node for attempt in attempts if attempt.failed][-2:]
    return named[0] if len(named) == 2 and named[0] == named[1] else ""


def repeated_cause(attempts: Sequence[RunAttempt]) -> bool:
    """Whether the last two failures had one cause, to the letter: the same again ends alike."""
    causes = [attempt.cause for attempt in attempts if attempt.failed][-2:]
    return len(causes) == 2 and causes[0] == causes[1] != ""


def how(code: int) -> str:
    """``exit code 1``, or the name of the signal where the code stands for one."""
    if code > 128 and code - 128 in set(signal.Signals):
        return f"ended by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _at(attempt: RunAttempt) -> str:
    return "" if attempt.after is None else f" with a checkpoint of iteration {attempt.after}"


def _because(attempt: RunAttempt) -> str:
    return f" ({attempt.verdict})" if attempt.verdict else ""
