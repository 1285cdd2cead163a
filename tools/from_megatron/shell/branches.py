"""Compound commands: branches, loops, pipes and conditions as bash has them."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tools.from_megatron.shell import status as statuses
from tools.from_megatron.shell.arithmetic import UnknownNumber, calculate
from tools.from_megatron.shell.conditions import ConditionReader, ShellError
from tools.from_megatron.shell.decisions import Decisions
from tools.from_megatron.shell.starting import ReadScript, ShellPrograms
from tools.from_megatron.shell.status import SUCCESS, UNKNOWN, ExitStatus, LoopEnd
from tools.from_megatron.shell.streams import InputText, PrintedText
from tools.from_megatron.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    ArithmeticFor,
    CaseCommand,
    Command,
    CommandGroup,
    ConditionCommand,
    ForCommand,
    IfCommand,
    Pipe,
    WhileCommand,
    Word,
    assigned_names,
)
from tools.from_megatron.shell.variables import ShellState


class ShellBranches(ShellPrograms):
    """Which commands run, by one set of decisions; the rest as ``ShellPrograms``."""

    def __init__(
        self,
        starts_megatron: Callable[[Sequence[str]], bool],
        given: Mapping[str, str],
        decisions: Decisions,
        read_file: ReadScript,
        state: ShellState,
    ) -> None:
        super().__init__(starts_megatron, given, read_file, state)
        self.decisions = decisions
        self.conditions = ConditionReader(self.expander, self.files)
        self.ignores_failure = 0  # within a condition, where set -e means nothing
        self.failure_counts = True

    @abstractmethod
    def run_all(self, commands: Sequence[Command]) -> ExitStatus:
        """Commands one after the other."""

    def holds(self, status: ExitStatus, command: Command) -> bool:
        """Whether a command succeeds, as far as is known."""
        return self.decisions.holds(status, command.line, command.written)

    def last_question(self) -> str:
        """A sentence on the last condition that is not known."""
        asked = self.decisions.asked[-1:]
        return "".join(f" What it asks is not known: {each.written[:80]} (line {each.line})." for each in asked)

    def group(self, command: CommandGroup) -> ExitStatus:
        """``{ }`` and ``( )``."""
        if not command.subshell:
            return self.run_all(command.body)
        with self.subshell() as end:
            end.status = self.run_all(command.body)
        self.failure_counts = True
        return end.status

    def and_or(self, command: AndOr) -> ExitStatus:
        """``a && b || c``."""
        last, status = len(command.commands) - 1, SUCCESS
        for number, (operator, each) in enumerate(zip(command.operators, command.commands, strict=True)):
            if number:
                before = command.commands[number - 1]
                if self.holds(status, before) is not (operator == "&&"):
                    self.leave_unset([each], status.because)
                    if status.code is not None:
                        self.failure_counts = False
                    continue
            self.failure_counts = True
            if number == last:
                status = self.run(each)
            else:
                with self.ignoring_failure():
                    status = self.run(each)
                self.failure_counts = False
            self.variables.last = status.code if status.certain else None
        return status

    @contextmanager
    def ignoring_failure(self) -> Iterator[None]:
        """Where set -e means nothing."""
        self.ignores_failure += 1
        try:
            yield
        finally:
            self.ignores_failure -= 1

    def leave_unset(self, commands: Sequence[Command], because: Iterable[str] = ()) -> None:
        """Variables of a branch that is not taken are unset, unless something else sets them.

        because: variables that are not given, for want of which it is not taken.
        """
        state, names = self.variables.state, tuple(sorted(because))
        state.unset |= {name: names for name in assigned_names(commands) if name not in state.values}

    def pipe(self, command: Pipe) -> ExitStatus:
        """``! a | b``."""
        if len(command.commands) == 1:
            if command.negated:
                with self.ignoring_failure():
                    status = self.run(command.commands[0])
                self.failure_counts = False
                return status.negated()
            return self.run(command.commands[0])
        found, given, outer = list[ExitStatus](), self.input, self.output
        for number, each in enumerate(command.commands):
            last = number == len(command.commands) - 1
            self.output = outer if last else PrintedText()
            with self.subshell() as end:
                self.input = given
                end.status = self.run(each)
            found.append(end.status)
            if self.output is not None and not last:
                given = None if self.output.unknown else InputText("".join(self.output.parts))
        self.output = outer
        self.failure_counts = True
        failed = [status for status in found if status.code not in (0, None)]
        status = failed[-1] if "P" in self.variables.state.options and failed else found[-1]
        self.failure_counts = not command.negated
        return status.negated() if command.negated else status

    def branch(self, command: IfCommand) -> ExitStatus:
        """``if``."""
        because = set[str]()
        for number, (condition, body) in enumerate(command.branches):
            if condition is not None:
                with self.ignoring_failure():
                    status = self.run_all(condition)
                because |= status.because
                if not self.decisions.holds(status, condition[0].line if condition else command.line,
                                            written(condition)):  # fmt: skip
                    self.leave_unset(body, because)
                    continue
            for _, other in command.branches[number + 1 :]:
                self.leave_unset(other, because)
            self.failure_counts = True
            return self.run_all(body)
        return SUCCESS

    def loop(self, body: Sequence[Command]) -> bool:
        """One round of a loop: whether another may follow."""
        self.loops += 1
        try:
            self.run_all(body)
        except LoopEnd as leave:
            if leave.levels > 1 and self.loops > 1:
                raise LoopEnd(leave.levels - 1, leave.again) from None
            return leave.again
        finally:
            self.loops -= 1
        return True

    def for_each(self, command: ForCommand) -> ExitStatus:
        """``for NAME in words``."""
        if command.select:
            self.not_followed.append(f"line {command.line}: a select, which asks whoever starts it, is not followed.")
            self.leave_unset(command.body)
            return UNKNOWN
        if command.words is None:
            items = self.variables.arguments()
        else:
            with self.assuming():
                items = self.expander.fields(command.words, files=True)
        if not items:
            self.leave_unset([command])
        for item in items:
            if self.unknowns.splits(item) and not self.holds(UNKNOWN, command):
                continue  # it may be no item at all
            self.variables.set_text(command.name, self.unknowns.plain(item))
            if not self.loop(command.body):
                break
        return SUCCESS

    def while_holds(self, command: WhileCommand) -> ExitStatus:
        """``while`` and ``until``."""
        entered = False
        while True:
            with self.ignoring_failure():
                status = self.run_all(command.condition)
            if command.until:
                status = status.negated()
            line = command.condition[0].line if command.condition else command.line
            if not self.decisions.holds(status, line, written(command.condition)):
                break
            entered = True
            if not self.loop(command.body):
                break
        if not entered:
            self.leave_unset(command.body, status.because)
        return SUCCESS

    def arithmetic_for(self, command: ArithmeticFor) -> ExitStatus:
        """``for ((first; condition; step))``."""
        self.number_status(command.first)
        while True:
            empty = not self.expander.text(command.condition).strip()
            status = SUCCESS if empty else self.number_status(command.condition)
            if not self.decisions.holds(status, command.line, command.written) or not self.loop(command.body):
                return SUCCESS
            self.number_status(command.step)

    def case(self, command: CaseCommand) -> ExitStatus:
        """``case``."""
        status, falls = SUCCESS, False
        with self.assuming() as names:  # once: what is in it may count, or print
            text = self.expander.text(command.word)
        rest = list(command.branches)
        while rest:
            patterns, body, end = rest.pop(0)
            if not falls and not any(self.fits(text, names, pattern, command) for pattern in patterns):
                self.leave_unset(body, names)
                continue
            status = self.run_all(body)
            falls = end == ";&"
            if end == ";;":
                break
        for _, body, _ in rest:
            self.leave_unset(body, names)
        return status

    def fits(self, text: str, names: set[str], pattern: Word, command: CaseCommand) -> bool:
        """Whether a case's word matches one of its patterns. names: variables that it takes to be unset."""
        with self.assuming() as of_pattern:
            pieces = self.expander.pieces(pattern)
            fits = self.conditions.fits(text, pieces)
        certain = [piece for piece, quoted in pieces if not quoted] == ["*"]
        status = SUCCESS if certain else statuses.of(fits, frozenset(names | of_pattern))
        return self.decisions.holds(status, command.line, command.written)

    @contextmanager
    def assuming(self) -> Iterator[set[str]]:
        """Variables that nothing sets are unset here, as in bash; gives their names."""
        before = self.variables.assuming
        names = self.variables.assuming = set()
        try:
            yield names
        finally:
            self.variables.assuming = before
            if before is not None:
                before |= names

    def condition(self, command: ConditionCommand | ArithmeticCommand) -> ExitStatus:
        """``[[ ]]`` and ``(( ))``."""
        if isinstance(command, ArithmeticCommand):
            return self.number_status(command.expression)
        with self.assuming() as names:
            try:
                holds = self.conditions.holds(command.condition)
            except ShellError:
                return ExitStatus(2, frozenset(names))
        if self.conditions.matched is not None:
            self.variables.state.values["BASH_REMATCH"] = dict(enumerate(self.conditions.matched))
            self.conditions.matched = None
        elif "=~" in command.written:
            self.variables.state.values.pop("BASH_REMATCH", None)
        return statuses.of(holds, frozenset(names))

    def number_status(self, expression: Word) -> ExitStatus:
        """Of ``(( ))``: fails where it is 0."""
        with self.assuming() as names:
            try:
                value = calculate(self.expander.text(expression), self.variables)
            except UnknownNumber:
                return statuses.of(None, frozenset(names))
        return statuses.of(value != 0, frozenset(names))


def written(commands: Sequence[Command]) -> str:
    """A condition as it stands in the script."""
    return "; ".join(command.written for command in commands)
