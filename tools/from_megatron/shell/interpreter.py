"""From commands to what they start. Nothing is run."""

from collections.abc import Sequence

from tools.from_megatron.shell import status as statuses
from tools.from_megatron.shell.branches import ShellBranches
from tools.from_megatron.shell.builtins import BUILTINS
from tools.from_megatron.shell.conditions import ShellError
from tools.from_megatron.shell.parser import ScriptParser
from tools.from_megatron.shell.simple_parser import DECLARES, plain_text_of
from tools.from_megatron.shell.starting import CONTROL, MOST_COMMANDS
from tools.from_megatron.shell.status import SUCCESS, UNKNOWN, EndlessLoop, ExitStatus, ShellExit
from tools.from_megatron.shell.streams import PrintedText
from tools.from_megatron.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    ArithmeticFor,
    Assignment,
    CaseCommand,
    Command,
    CommandGroup,
    ConditionCommand,
    ForCommand,
    FunctionDefinition,
    IfCommand,
    Pipe,
    SimpleCommand,
    WhileCommand,
    Word,
)
from tools.from_megatron.unknown import has_unknown


class Interpreter(ShellBranches):
    """One reading of a script."""

    ends_at: int | None = None
    """The line of what has ended the script before its last line."""
    substituted: ExitStatus = SUCCESS
    """Of the last $( ), which is that of an assignment."""

    def run_text(self, text: str, line: int = 1) -> ExitStatus:
        """A script's text, line by line."""
        with self.deeper("scripts within scripts"):
            parser, status = ScriptParser(text, line), SUCCESS
            self.reading.append(text)
            try:
                while (commands := parser.next_line()) is not None:
                    status = self.run_all(commands)
            finally:
                self.reading.pop()
            return status

    def run_all(self, commands: Sequence[Command]) -> ExitStatus:
        """Commands one after the other."""
        status = SUCCESS
        for command in commands:
            self.failure_counts = True
            if command.background:
                with self.subshell():
                    self.run(command)
                status = SUCCESS
            else:
                status = self.run(command)
            self.variables.last = status.code if status.certain else None
            failed = status.code not in (0, None) and self.failure_counts and not self.ignores_failure
            if failed and "e" in self.variables.state.options and not self.holds(status, command):
                raise ShellExit(status)
        return status

    def run(self, command: Command) -> ExitStatus:
        """One command."""
        self.commands += 1
        if self.commands > MOST_COMMANDS:
            if self.launches:
                raise ShellExit(UNKNOWN)
            said = f"line {command.line}: a loop that does not end within {MOST_COMMANDS:,} commands."
            raise EndlessLoop(said + self.last_question())
        self.variables.line = command.line or self.variables.line
        if isinstance(command, SimpleCommand):
            return self.simple(command)
        with self.redirected(command.redirections):
            return self.dispatch(command)

    def dispatch(self, command: Command) -> ExitStatus:
        """By the command's kind."""
        match command:
            case AndOr():
                return self.and_or(command)
            case Pipe():
                return self.pipe(command)
            case IfCommand():
                return self.branch(command)
            case CommandGroup():
                return self.group(command)
            case ForCommand():
                return self.for_each(command)
            case WhileCommand():
                return self.while_holds(command)
            case CaseCommand():
                return self.case(command)
            case ArithmeticFor():
                return self.arithmetic_for(command)
            case FunctionDefinition():
                self.variables.state.functions[command.name] = command.body
                return SUCCESS
            case ConditionCommand() | ArithmeticCommand():
                return self.condition(command)
        raise AssertionError(command)

    def simple(self, command: SimpleCommand) -> ExitStatus:
        """Assignments, or a program."""
        first = plain_text_of(command.words[0]) if command.words else None
        if first in DECLARES:
            for assignment in command.assignments:
                self.assign(assignment)
            with self.redirected(command.redirections):
                return self.declare(str(first), command.words[1:])
        self.substituted = SUCCESS
        words = [word for word in command.words if not isinstance(word, Assignment)]
        if first in ("[", "test"):
            with self.redirected(command.redirections):
                return self.test(words)
        fields = self.expander.fields(words)
        if not fields:
            with self.redirected(command.redirections):
                for assignment in command.assignments:
                    self.assign(assignment)
            return self.substituted
        own = fields[0] in CONTROL or fields[0] in BUILTINS or fields[0] in self.variables.state.functions
        with self.temporary(command.assignments), self.redirected(command.redirections, in_child=not own):
            return self.program(fields, command)

    def test(self, words: list[Word]) -> ExitStatus:
        """``[ ]``."""
        with self.assuming() as names:
            fields = self.expander.fields(words)
            try:
                if fields[0] == "[" and fields[-1] != "]":
                    return ExitStatus(2)
                holds = self.conditions.test(fields[1 : -1 if fields[0] == "[" else None])
            except ShellError:
                return ExitStatus(2, frozenset(names))
        return statuses.of(holds, frozenset(names))

    def capture(self, body: Sequence[Command], shown: str) -> str:
        """The output of ``$( )``; one unknown value where it is not known."""
        outer, self.output = self.output, PrintedText()
        assuming, self.variables.assuming = self.variables.assuming, None
        try:
            with self.subshell() as end:
                self.variables.state.options.discard("e")
                end.status = self.read_back(body) or self.run_all(body)
            output = self.output
        finally:
            self.output = outer
            self.variables.assuming = assuming
        self.substituted = end.status
        if output.unknown:
            return self.variables.output(" ".join(shown.split()))
        text = "".join(output.parts)
        if assuming is not None and has_unknown(text):
            assuming |= {name for each in self.unknowns.found(text) if each.assumed is not None for name in each.sets}
            text = self.unknowns.assumed(text)
        return text

    def read_back(self, body: Sequence[Command]) -> ExitStatus | None:
        """``$(<file)``; None for anything else."""
        [only] = body if len(body) == 1 else [None]
        if not isinstance(only, SimpleCommand) or only.words or only.assignments:
            return None
        if [each.operator for each in only.redirections] != ["<"]:
            return None
        text = self.files.get(self.expander.text(only.redirections[0].target))
        if text is None:
            self.print_unknown()
            return UNKNOWN
        self.emit(text)
        return SUCCESS
