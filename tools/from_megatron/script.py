"""A launch script, read and not run: which command starts Megatron-LM, with which flags.

Running a stranger's script could start jobs or delete files, and it expects another machine. ``shell`` follows it as
bash would; what depends on files, on programs or on variables from outside is asked for, or said to have been guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallel.errors import UserError
from parallel.untrusted import InputError, read_text
from tools.from_megatron.shell.decisions import MOST_QUESTIONS, Decisions, OpenQuestion
from tools.from_megatron.shell.interpreter import Interpreter
from tools.from_megatron.shell.programs import directives
from tools.from_megatron.shell.starting import Launch
from tools.from_megatron.shell.status import EndlessLoop, ShellExit
from tools.from_megatron.shell.variables import ShellState
from tools.from_megatron.unknown import Unknown, without_marks

MOST_BYTES = 1 << 20
"""Of another file that is read."""
MOST_COMMANDS = 60_000
"""Over all readings of a script; questions that are left then count as if they mattered not."""


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """A branch that was guessed, and the command where it is taken otherwise."""

    question: OpenQuestion
    launch: Launch | None
    """None: it cannot be followed."""
    error: str = ""
    """Why."""


@dataclass(slots=True)
class ScriptReading:
    """What a script says."""

    launches: list[Launch] = field(default_factory=list)
    """Commands that start Megatron-LM, each once."""
    not_followed: list[str] = field(default_factory=list)
    """What was not followed and may set or start something: sentences with their lines."""
    answers: list[OtherAnswer] = field(default_factory=list)
    """Guesses that matter."""
    overwritten: dict[str, int] = field(default_factory=dict)
    """What --set gives to no effect, as the script sets it, with the line."""
    not_read: list[str] = field(default_factory=list)
    """What --set gives and the script asks for nowhere."""
    names: set[str] = field(default_factory=set)
    """What it does ask for."""
    other_tasks: list[str] = field(default_factory=list)
    """Programs of Megatron-LM's that it starts and that train nothing."""
    within_words: list[str] = field(default_factory=list)
    """Commands of which a word would start it: sentences with their lines."""
    holding_flags: list[str] = field(default_factory=list)
    """Variables that hold flags of Megatron-LM's in the end."""
    other_starts: list[OtherAnswer] = field(default_factory=list)
    """Other commands that it starts, by answers that are as good as the one taken: without any, it starts none."""
    ends_at: int | None = None
    """The line of what ends it before its last line."""


def read_script(
    text: str, starts_megatron: Callable[[Sequence[str]], bool], given: Mapping[str, str], path: Path | None = None
) -> ScriptReading:
    """Follow a script as far as that is possible without running anything.

    starts_megatron: whether these words are a Megatron-LM command's. given: variables from outside. path: of its file.
    Raises UserError for what is no shell script, and for what cannot be followed.
    """
    rounds = _Rounds(without_marks(text), starts_megatron, given, path)
    reversed_, run, others = _reaching_a_launch(rounds)
    reading = ScriptReading(run.launches, run.not_followed, overwritten=run.variables.overwritten)
    reading.other_tasks, reading.other_starts, reading.ends_at = run.other_tasks, others, run.ends_at
    reading.within_words = run.within_words
    if run.launches:
        reading.answers = _answers_that_matter(rounds, reversed_, run)
    reading.names = rounds.names
    arguments = "#" in rounds.names
    reading.not_read = [name for name in given if name not in rounds.names and not (arguments and name.isdigit())]
    for name, value in run.variables.state.values.items():
        words = value.split() if isinstance(value, str) else [str(each) for each in value.values()]
        reading.holding_flags += [name] if starts_megatron(words) else []
    return reading


class _Rounds:
    """Readings of one script, with one set of decisions each."""

    def __init__(
        self, text: str, starts_megatron: Callable[[Sequence[str]], bool], given: Mapping[str, str], path: Path | None
    ) -> None:
        self.text, self.starts_megatron, self.given = text, starts_megatron, given
        self.path = None if path is None else path.resolve()
        self.commands = 0
        self.names: set[str] = set()
        """Of variables that any reading has asked for."""

    def read(self, reversed_: frozenset[int], always: frozenset[tuple[int, str]] = frozenset()) -> Interpreter:
        """Once through the script. Raises UserError."""
        name = "" if self.path is None else str(self.path)
        state = ShellState(name=name, slurm=directives(self.text), arguments_open=True)
        reader = Interpreter(self.starts_megatron, self.given, Decisions(reversed_, always), self.read_file, state)
        named = {name: value for name, value in self.given.items() if name.isidentifier()}
        state.values |= state.slurm | named
        state.exported |= {*state.slurm, *named}
        numbers = [int(name) for name in self.given if name.isdigit() and 0 < int(name) < 1000]
        state.positional = [self._argument(reader, number) for number in range(1, max(numbers, default=0) + 1)]
        try:
            reader.run_text(self.text)
        except ShellExit:
            reader.ends_at = reader.variables.line
        except RecursionError:
            raise UserError(f"line {reader.variables.line}: it nests too deep.") from None
        finally:
            self.commands += reader.commands
            self.names |= reader.variables.read | reader.variables.overwritten.keys()
        return reader

    def read_otherwise(
        self, reversed_: frozenset[int], always: frozenset[tuple[int, str]] = frozenset()
    ) -> Interpreter | UserError | None:
        """As ``read``, or its error; None where enough has been read: loops that wait for something have no end so."""
        if self.commands > MOST_COMMANDS:
            return None
        try:
            return self.read(reversed_, always)
        except EndlessLoop:
            return None
        except UserError as error:
            return error

    def _argument(self, reader: Interpreter, number: int) -> str:
        name = str(number)
        return self.given.get(name) or reader.unknowns.mark(Unknown(f"${name}", sets=(name,), assumed=""))

    def read_file(self, name: str, folder: str | None) -> str | None:
        """A file in the script's folder or below; None for any other."""
        if self.path is None:
            return None
        home = self.path.parent
        roots = (
            [Path(folder)] if folder else [home, *(each for each in home.parents if each.is_relative_to(Path.cwd()))]
        )
        for root in roots:
            try:
                path = (root / name).resolve()
                if path.is_relative_to(home) and path.is_file():
                    return without_marks(read_text(path, MOST_BYTES))
            except (OSError, ValueError, InputError):
                continue
        return None


def _reaching_a_launch(rounds: _Rounds) -> tuple[frozenset[int], Interpreter, list[OtherAnswer]]:
    """The reading by guesses; where that starts nothing, one with other answers that does: scripts end early where a
    file is missing, an argument or a program. With what starts other commands as well as that."""
    reversed_, left = frozenset[int](), MOST_QUESTIONS
    run = first = rounds.read(reversed_)
    seen = set[tuple[int, str]]()
    while not run.launches and not run.other_tasks and left > 0:
        places = {(asked.line, asked.written): number for number, asked in enumerate(run.decisions.asked)}
        numbers = [number for place, number in places.items() if place not in seen and number not in reversed_]
        if not numbers:
            return frozenset(), first, []
        for number in sorted(numbers, reverse=True)[:left]:
            left -= 1
            other = rounds.read_otherwise(reversed_ | {number})
            if isinstance(other, Interpreter) and other.launches:
                return reversed_ | {number}, other, _other_starts(rounds, reversed_, run, number, other)
        last = max(numbers)  # the way there may be longer than one answer: go on behind the last one
        seen.add((run.decisions.asked[last].line, run.decisions.asked[last].written))
        other = rounds.read_otherwise(reversed_ | {last})
        reversed_, run = (reversed_ | {last}, other) if isinstance(other, Interpreter) else (reversed_, run)
    return (reversed_, run, []) if run.launches else (frozenset(), first, [])


def _other_starts(
    rounds: _Rounds, reversed_: frozenset[int], run: Interpreter, number: int, found: Interpreter
) -> list[OtherAnswer]:
    """What the values of a variable start that nothing sets, where its answer to one question starts ``found``."""
    others: list[OtherAnswer] = []
    if run.decisions.asked[number].because:
        for other, asked in list(enumerate(run.decisions.asked))[:MOST_QUESTIONS]:
            if asked.because and other not in reversed_ | {number}:
                others += _answers(asked, found, [rounds.read_otherwise(reversed_ | {other})])
    return [answer for answer in others if answer.launch is not None]


def _answers_that_matter(rounds: _Rounds, reversed_: frozenset[int], run: Interpreter) -> list[OtherAnswer]:
    """A question may matter only where it is answered so each time that it is asked, or where others are, too."""
    found: list[OtherAnswer] = []
    places: dict[tuple[int, str], list[int]] = {}
    for number, asked in enumerate(run.decisions.asked):
        places.setdefault((asked.line, asked.written), []).append(number)
    for place, numbers in list(places.items())[:MOST_QUESTIONS]:
        counts = "$#" in place[1]  # further arguments can only change what is asked when those that are given are gone
        others = [rounds.read_otherwise(reversed_ ^ {numbers[-1 if counts else 0]})]
        if len(numbers) > 1 and not counts:
            others.append(rounds.read_otherwise(reversed_, frozenset({place})))
        found += _answers(run.decisions.asked[numbers[0]], run, others)[:1]
    if not found and len(places) > 1:
        found += _answers(run.decisions.asked[0], run, [rounds.read_otherwise(reversed_, frozenset(places))])
    return found


def _answers(
    question: OpenQuestion, run: Interpreter, others: Sequence[Interpreter | UserError | None]
) -> list[OtherAnswer]:
    """Those readings that end in another command, or in an error."""
    found = []
    for other in others:
        if isinstance(other, UserError):
            found.append(OtherAnswer(question, None, str(other)))
        elif other is not None and other.launches and not _same(other.launches[0], run.launches[0]):
            found.append(OtherAnswer(question, other.launches[0]))
    return found


def _same(one: Launch, other: Launch) -> bool:
    return (one.flags, str(one.program)) == (other.flags, str(other.program))
