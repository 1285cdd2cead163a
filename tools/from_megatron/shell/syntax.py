"""A shell script as a tree: words with their parts, and commands."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as it stands."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class ParameterExpansion:
    """``$NAME``, ``${NAME[index]:-other}`` and their like."""

    name: str
    written: str
    quoted: bool = False
    index: "Word | None" = None
    prefix: str = ""
    """``#``: the length; ``!``: of the variable that it names."""
    operator: str = ""
    words: "tuple[Word, ...]" = ()
    """Behind the operator: a default, a pattern and its replacement, an offset and a length."""


@dataclass(frozen=True, slots=True)
class CommandSubstitution:
    """``$( )`` and backquotes."""

    body: "Sequence[Command]"
    written: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class ArithmeticExpansion:
    """``$(( ))``."""

    expression: "Word"
    written: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class ProcessSubstitution:
    """``<( )`` and ``>( )``."""

    body: "Sequence[Command]"
    written: str


type Part = Literal | ParameterExpansion | CommandSubstitution | ArithmeticExpansion | ProcessSubstitution
type Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """One of ``( )`` behind an assignment's =; with an index or key where it says so."""

    value: Word
    index: Word | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=value``, ``NAME+=value``, ``NAME[index]=value``, ``NAME=(values)``."""

    name: str
    value: Word = ()
    elements: tuple[ArrayElement, ...] | None = None
    """Of an array."""
    append: bool = False
    index: Word | None = None


@dataclass(frozen=True, slots=True)
class Redirection:
    """``2>file``; of a here-document its body."""

    operator: str
    target: Word
    descriptor: int | None = None


@dataclass(slots=True, kw_only=True)
class Command:
    """What every command has."""

    line: int = 0
    written: str = ""
    """Its first line, as it stands in the script."""
    redirections: list[Redirection] = field(default_factory=list)
    background: bool = False


@dataclass(slots=True, kw_only=True)
class SimpleCommand(Command):
    """Assignments and words; assignments behind export and its like are words of it."""

    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word | Assignment] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Pipe(Command):
    """``a | b``, and ``! a``."""

    commands: list[Command]
    negated: bool = False


@dataclass(slots=True, kw_only=True)
class AndOr(Command):
    """``a && b || c``: the operators stand before the command of the same place."""

    operators: list[str]
    commands: list[Command]


@dataclass(slots=True, kw_only=True)
class CommandGroup(Command):
    """``{ }`` and ``( )``."""

    body: list[Command]
    subshell: bool = False


@dataclass(slots=True, kw_only=True)
class IfCommand(Command):
    """Conditions with their branches; the last one of ``else`` has no condition."""

    branches: list[tuple[list[Command] | None, list[Command]]]


@dataclass(slots=True, kw_only=True)
class WhileCommand(Command):
    """``while`` and ``until``."""

    condition: list[Command]
    body: list[Command]
    until: bool = False


@dataclass(slots=True, kw_only=True)
class ForCommand(Command):
    """``for NAME in words``; None: the positional parameters."""

    name: str
    words: list[Word] | None
    body: list[Command]
    select: bool = False


@dataclass(slots=True, kw_only=True)
class ArithmeticFor(Command):
    """``for ((first; condition; step))``."""

    first: Word
    condition: Word
    step: Word
    body: list[Command]


@dataclass(slots=True, kw_only=True)
class CaseCommand(Command):
    """Patterns with their commands and what ends them: ;; or ;& or ;;&."""

    word: Word
    branches: list[tuple[list[Word], list[Command], str]]


@dataclass(slots=True, kw_only=True)
class FunctionDefinition(Command):
    """``NAME() { }``."""

    name: str
    body: Command


@dataclass(slots=True, kw_only=True)
class ArithmeticCommand(Command):
    """``(( ))``."""

    expression: Word


@dataclass(frozen=True, slots=True)
class Condition:
    """Part of ``[[ ]]``: ``&&``, ``||``, ``!`` over conditions; an operator over words."""

    operator: str
    words: tuple[Word, ...] = ()
    conditions: "tuple[Condition, ...]" = ()


@dataclass(slots=True, kw_only=True)
class ConditionCommand(Command):
    """``[[ ]]``."""

    condition: Condition


def assigned_names(commands: Sequence[Command]) -> set[str]:
    """Variables that commands would set: a branch that is not taken leaves them unset."""
    names: set[str] = set()
    for command in commands:
        match command:
            case SimpleCommand():
                declared = [word for word in command.words if isinstance(word, Assignment)]
                names |= {each.name for each in (*command.assignments, *declared)}
                names |= _read_names(command)
            case Pipe() | AndOr():
                names |= assigned_names(command.commands)
            case CommandGroup() | ArithmeticFor():
                names |= assigned_names(command.body)
            case ForCommand():
                names |= {command.name} | assigned_names(command.body)
            case WhileCommand():
                names |= assigned_names(command.condition) | assigned_names(command.body)
            case IfCommand():
                for condition, body in command.branches:
                    names |= assigned_names(condition or []) | assigned_names(body)
            case CaseCommand():
                for _, body, _ in command.branches:
                    names |= assigned_names(body)
            case FunctionDefinition():
                names |= assigned_names([command.body])
    return names


def _read_names(command: SimpleCommand) -> set[str]:
    """Of ``read A B``."""
    words = [plain_text(word) for word in command.words if not isinstance(word, Assignment)]
    return {word for word in words[1:] if word and word.isidentifier()} if words[:1] == ["read"] else set()


def plain_text(word: Word) -> str | None:
    """The text of a word without expansions; None for another."""
    texts = [part.text for part in word if isinstance(part, Literal)]
    return "".join(texts) if len(texts) == len(word) else None
