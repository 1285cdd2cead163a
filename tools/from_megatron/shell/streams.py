"""Where commands read and print: here-documents, pipes, files that a script writes. Nothing is read from a disk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from parallel.errors import UserError
from tools.from_megatron.shell.expansion import Expander
from tools.from_megatron.shell.syntax import Command, ProcessSubstitution, Redirection
from tools.from_megatron.shell.variables import MOST_TEXT, ShellState, Variables
from tools.from_megatron.unknown import UnknownValues, has_unknown


@dataclass(slots=True)
class PrintedText:
    """What a command prints, within $( ), a pipe or a redirection."""

    parts: list[str] = field(default_factory=list)
    unknown: bool = False
    """Whether something was printed that is not known."""
    size: int = 0


@dataclass(slots=True)
class InputText:
    """What a command reads, and how far."""

    text: str
    at: int = 0

    @property
    def rest(self) -> str:
        """What is not read."""
        return self.text[self.at :]


class ShellStreams(ABC):
    """Input, output and files of a shell. given: what --set says."""

    def __init__(self, state: ShellState, given: Mapping[str, str]) -> None:
        self.variables = Variables(state, UnknownValues(), given)
        self.expander = Expander(self.variables, self.capture)
        self.files: dict[str, str] = {}
        """By the path as the script writes it."""
        self.output: PrintedText | None = None
        """None: a terminal, or a file that no command in the script reads."""
        self.input: InputText | None = None
        """None: not known."""

    @abstractmethod
    def capture(self, body: Sequence[Command], shown: str) -> str:
        """The output of ``$( )``."""

    @property
    def unknowns(self) -> UnknownValues:
        """Of this reading."""
        return self.variables.unknowns

    def emit(self, text: str) -> None:
        """Print: only where somebody within the script reads it."""
        if self.output is not None:
            self.output.parts.append(text)
            self.output.size += len(text)
            if self.output.size > MOST_TEXT:
                raise UserError(f"line {self.variables.line}: an output of more than {MOST_TEXT:,} characters.")

    def print_unknown(self) -> None:
        """A program's output."""
        if self.output is not None:
            self.output.unknown = True

    def take_line(self, delimiter: str) -> tuple[str, bool] | None:
        """The next line of the input, and whether its end was there."""
        if self.input is None:
            return None
        end = self.input.text.find(delimiter, self.input.at)
        complete = end >= 0
        end = end if complete else len(self.input.text)
        line, self.input.at = self.input.text[self.input.at : end], min(end + 1, len(self.input.text))
        return line, complete

    @contextmanager
    def redirected(self, redirections: Sequence[Redirection], in_child: bool = False) -> Iterator[None]:
        """While a command runs with other input or output. in_child: what their expansion sets is lost, as is a
        program's."""
        if not redirections:
            yield
            return
        outer_output, outer_input = self.output, self.input
        files: list[tuple[str, str, PrintedText]] = []
        state = self.variables.state
        if in_child:
            self.variables.state = state.copied()
        for each in redirections:
            self.redirect(each, files)
        self.variables.state = state
        try:
            yield
        finally:
            self.output, self.input = outer_output, outer_input
            for operator, name, output in files:
                before = self.files.get(name, "") if operator in (">>", "&>>") else ""
                if output.unknown:
                    self.files.pop(name, None)
                else:
                    self.files[name] = before + "".join(output.parts)

    def redirect(self, redirection: Redirection, files: list[tuple[str, str, PrintedText]]) -> None:
        """One of them; files: what is to be written, with the operator and the name."""
        operator, target = redirection.operator, redirection.target
        if operator == "<" and len(target) == 1 and isinstance(target[0], ProcessSubstitution):
            text = self.capture(target[0].body, target[0].written)
            self.input = None if has_unknown(text) else InputText(text)
        elif operator == "<":
            found = self.files.get(self.expander.text(target))
            self.input = None if found is None else InputText(found)
        elif operator in ("<<", "<<-"):
            self.input = InputText(self.expander.text(target))
        elif operator == "<<<":
            self.input = InputText(self.expander.text(target) + "\n")
        elif operator in (">", ">>", ">|", "&>", "&>>") and redirection.descriptor in (None, 1):
            name = self.expander.text(target)
            self.output = PrintedText()
            files.append((operator, name, self.output))
        elif operator == ">&" and redirection.descriptor in (None, 1):
            self.output = None if self.expander.text(target) != "1" else self.output
