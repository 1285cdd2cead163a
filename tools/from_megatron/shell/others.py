"""What may be assumed otherwise, of what a script asks: values of variables, answers of programs, files that exist."""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from tools.from_megatron.shell.calls import FILE, FOLDER
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.shell.reading import Assumed, Reading
from tools.from_megatron.unknown import Marks, Unknown

_TEST = re.compile(r"\[\[ |'\[' |test |case |\(\( |let ")
_ASSIGNED = re.compile(r"(?:export |local |readonly |declare (?:-\w+ )*)?(\w+)\+?=(.*)", re.DOTALL)
_PATTERNS = re.compile(r"(?:\bin\b|;;|;&|\n)\s*\(?\s*([^\s()`$;]+(?:[ \t]*\|[ \t]*[^\s()`$;]+)*)[ \t]*\)")
ALL_ARGUMENTS = re.compile(r"\$[@*#]|\$\{[@*#]|\bshift\b|\bgetopts\b")
_WORD = re.compile(r"[\w./:@%+-]*\w[\w./:@%+-]*")
_OVER_FILES = r"\bfor\s+\w+\s+in\s[^;#]*[*?]"
_MOST_WORDS = 12
"""That one value is tried with."""


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A branch that depends on what is not known."""

    line: int
    written: str
    """What is asked."""
    taken: bool
    because: tuple[str, ...] = ()
    """Variables that were taken to be unset, on which alone it depends; empty: on files, or on a program."""


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """A branch that was guessed, and the command where it is taken otherwise."""

    question: OpenQuestion
    launch: Launch


@dataclass(frozen=True, slots=True)
class Other:
    """Something assumed otherwise."""

    name: str
    """Of a variable, or the number of an argument; the key of a command's mark; a file's path."""
    mark: str
    """What stands for it where it is not known; empty: nothing does."""
    value: str
    question: OpenQuestion
    change: Callable[[Assumed], Assumed]
    compared: bool = False
    """Whether the script compares it with that value."""


def all_changed(assumed: Assumed, others: Sequence[Other]) -> Assumed:
    """With each of them."""
    for other in others:
        assumed = other.change(assumed)
    return assumed


def of_value(
    name: str, unknown: Unknown, mark: str, value: str, question: OpenQuestion | None = None, compared: bool = False
) -> Other:
    """A variable, an argument or a command's output, with a value."""

    because = () if name.startswith("$(") else (name,)

    def change(assumed: Assumed) -> Assumed:
        if because == ():
            return replace(assumed, printed={**assumed.printed, name: value})
        return assumed.with_value(name, value)

    asked = question or OpenQuestion(unknown.line, unknown.written, False, because)
    return Other(name, mark, value, asked, change, compared)


def failing(run: Reading, marks: Marks, given: Container[str]) -> Iterator[Other]:
    """Commands that fail, but for those whose output is given."""
    for key in (key for key in run.commands if key not in given):
        known = marks.of(key)

        def change(assumed: Assumed, key: str = key) -> Assumed:
            return replace(assumed, failing=assumed.failing | {key})

        yield Other(key, marks.mark(known, key), "", OpenQuestion(known.line, known.written[2:-1], True), change)


def files(run: Reading, marks: Marks) -> Iterator[Other]:
    """Files that exist, and are asked for by a test."""
    for path, text in run.ran.asked.items():
        if _TEST.match(text) and (found := re.search(r" -([a-zA-Z]) ", text)):
            line = next((step.line for step in run.ran.steps if step.text == text), 0)
            mode = FOLDER if found[1] == "d" else FILE

            def change(assumed: Assumed, path: str = path, mode: int = mode) -> Assumed:
                return replace(assumed, there={**assumed.there, path: mode})

            yield Other(path, "", "", OpenQuestion(line, _shown(text, marks), "! -" in text), change)


def no_files(text: str) -> Iterator[Other]:
    """Loops over files, of which there are none."""
    if line := line_of(text, _OVER_FILES):
        written = text.splitlines()[line - 1].strip().partition(";")[0]
        yield Other("", "", "", OpenQuestion(line, written, True), lambda assumed: replace(assumed, no_files=True))


def further_arguments(text: str, assumed: Assumed, marks: Marks, most: int) -> Iterator[Other]:
    """One argument more than is given, two, and so on, where the script looks at them all."""
    first = len(assumed.arguments) + 1
    for count in range(1, most + 1) if ALL_ARGUMENTS.search(text) else ():
        given = {str(number): argument(text, number) for number in range(first, first + count)}

        def change(assumed: Assumed, given: dict[str, Unknown] = given) -> Assumed:
            for name, unknown in given.items():
                assumed = assumed.with_value(name, marks.mark(unknown))
            return assumed

        line = line_of(text, ALL_ARGUMENTS.pattern)
        question = OpenQuestion(line, "how many arguments there are", False, (str(first),))
        yield Other(str(first), marks.mark(given[str(first)]), "", question, change)


def argument(text: str, number: int) -> Unknown:
    """An argument that is not given."""
    return Unknown(f"${number}", line_of(text, rf"\$\{{?{number}\b"), (str(number),), "")


def line_of(text: str, pattern: str) -> int:
    """The first line where a pattern is found; 0: none."""
    return next((number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)), 0)


def questions(reading: Reading, marks: Marks, mark: str, because: tuple[str, ...]) -> list[OpenQuestion]:
    """Tests of a value, by its mark: the trace has the words of case and of arithmetic as the script has them."""
    holding, found = set(because), dict[str, OpenQuestion]()
    called = "".join(each.written for each in marks.found(mark))[:12]
    for step in reading.ran.steps:
        if assigned := _ASSIGNED.match(step.text):
            (holding.add if mark in assigned[2] else holding.discard)(assigned[1])
        elif _TEST.match(step.text):
            named = set(re.findall(r"\w+", step.text)) if step.text.startswith(("case ", "((", "let ")) else set()
            if mark in step.text or holding & named or (named and called.startswith("$(") and called in step.text):
                taken = bool(re.search(r" (-z|!=|!) ", step.text))
                found.setdefault(step.text, OpenQuestion(step.line, _shown(step.text, marks), taken, because))
    return list(found.values())


def _shown(text: str, marks: Marks) -> str:
    """A test as a script would have it."""
    text = re.sub(r"\\(.)", r"\1", marks.readable(text))
    return text.replace("'['", "[").replace("']'", "]").strip().removesuffix(" in")


def compared_words(asked: Sequence[OpenQuestion], text: str) -> list[tuple[OpenQuestion, str]]:
    """Values that tests compare with."""
    found: dict[str, OpenQuestion] = {}
    for question in asked:
        if question.written.startswith("case "):
            rest = "\n".join(text.splitlines()[max(question.line - 1, 0) :]).partition("esac")[0]
            words = [word.strip() for pattern in _PATTERNS.findall(rest) for word in pattern.split("|")]
        else:
            words = re.sub("[()|@]", " ", question.written).split()
        for word in words:
            plain = word.strip("\"'").strip("*")
            if re.fullmatch(r"\d{1,9}", plain):
                for number in (int(plain), int(plain) + 1, max(int(plain) - 1, 0)):
                    found.setdefault(str(number), question)
            elif _WORD.fullmatch(plain) and not re.fullmatch(r"-\w{1,2}|case|in|test", plain):
                found.setdefault(plain, question)
    return [(question, value) for value, question in list(found.items())[:_MOST_WORDS]]
