"""Commands of bash's own that change variables: read, set, shift, getopts, unset, let, printf -v, mapfile, cd."""

import posixpath
import re
from collections.abc import Callable
from typing import Protocol

from tools.from_megatron.shell import text_programs
from tools.from_megatron.shell.arithmetic import UnknownNumber, calculate
from tools.from_megatron.shell.expansion import split_fields
from tools.from_megatron.shell.status import FAILURE, SUCCESS, UNKNOWN, ExitStatus, of
from tools.from_megatron.shell.variables import Variables
from tools.from_megatron.unknown import Unknown, has_unknown

KNOWN_OPTIONS = frozenset(("extglob", "nocasematch"))
"""Of shopt."""


class BuiltinShell(Protocol):
    """What these commands need of a shell."""

    variables: Variables

    def take_line(self, delimiter: str) -> tuple[str, bool] | None:
        """The next line of its input, and whether its end was there; None where the input is not known."""

    def emit(self, text: str) -> None:
        """Print."""


def unset(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``unset NAME``; -f: a function."""
    functions = "-f" in words
    for word in map(shell.variables.unknowns.readable, words):  # to the shell, X[1] may be the name of a file
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:\[(.+)\])?", word)
        if match is None:
            continue
        name, index = match.groups()
        if functions:
            shell.variables.state.functions.pop(name, None)
            continue
        if index is None:
            shell.variables.remove(name)
        elif isinstance(table := shell.variables.state.values.get(name), dict):
            _unset_element(shell, name, index, table)
    return SUCCESS


def _unset_element(shell: BuiltinShell, name: str, index: str, table: dict[int | str, str]) -> None:
    state = shell.variables.state
    key: str | int = index
    if index in ("@", "*"):
        shell.variables.remove(name)
        return
    if name not in state.tables:
        try:
            key = calculate(index, shell.variables)
        except UnknownNumber:
            _unknown_names(shell, [name])
            return
        key += max((int(number) for number in table), default=-1) + 1 if key < 0 else 0
    state.values[name] = {one: text for one, text in table.items() if one != key}


def shift(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``shift [N]``."""
    state = shell.variables.state
    count = int(words[0]) if words and words[0].isdigit() else 1
    if any(map(shell.variables.unknowns.splits, state.positional[:count])):
        mark = Unknown("$@", shell.variables.line, splits=True)
        state.positional = [shell.variables.unknowns.mark(mark)]
        return UNKNOWN
    if count > len(state.positional) and not state.arguments_open:
        return FAILURE
    state.positional = state.positional[count:]
    state.shifted += count * state.arguments_open
    return SUCCESS


def set_options(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``set -- words`` and ``set -e``."""
    state, at = shell.variables.state, 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" or not re.fullmatch(r"[-+][A-Za-z]+|[-+]", word):
            state.positional, state.arguments_open = words[at - (word != "--") :], False
            break
        names = {"errexit": "e", "nounset": "u", "allexport": "a", "pipefail": "P", "braceexpand": "B"}
        letters = word[1:]
        if "o" in letters and at < len(words):
            letters = letters.replace("o", names.get(words[at], ""))
            at += 1
        state.options = state.options | set(letters) if word[0] == "-" else state.options - set(letters)
    return SUCCESS


def shopt(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``shopt -s NAME``; -q asks. Of those that are not known here, it is not known."""
    options, letters = shell.variables.state.options, {word for word in words if word.startswith("-")}
    names = set(words) - letters
    if "-s" in letters:
        shell.variables.state.options = options | names
    elif "-u" in letters:
        shell.variables.state.options = options - names
    elif "-q" not in letters or not names <= KNOWN_OPTIONS:
        return UNKNOWN
    else:
        return of(names <= options)
    return SUCCESS


def read(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``read [-r] [-a NAME] [-d X] NAMES``."""
    raw, array, delimiter, names = False, "", "\n", list[str]()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.fullmatch(r"-[A-Za-z]+.*", word) or names:
            names.append(word)
            continue
        raw |= "r" in word
        letter = next((letter for letter in word[1:] if letter in "adinNptu"), "")
        if letter:
            value = word.partition(letter)[2]
            if not value and at < len(words):
                value, at = words[at], at + 1
            array = value if letter == "a" else array
            delimiter = (value[:1] or "\0") if letter == "d" else delimiter
            if letter in "nNu":
                return _unknown_names(shell, names or words[at:] or ["REPLY"])
    names = names or ([] if array else ["REPLY"])
    line = shell.take_line(delimiter)
    if line is None:
        return _unknown_names(shell, [*names, *([array] if array else [])])
    text, complete = line
    if not raw and "\\" in text:
        return _unknown_names(shell, [*names, *([array] if array else [])])
    _assign_fields(shell, text, names, array)
    return SUCCESS if complete else FAILURE


def _unknown_names(shell: BuiltinShell, names: list[str]) -> ExitStatus:
    for name in names:
        mark = Unknown(f"${name}", shell.variables.line, (name,))
        shell.variables.set_text(name, shell.variables.unknowns.mark(mark))
    return of(None)


def _assign_fields(shell: BuiltinShell, text: str, names: list[str], array: str) -> None:
    separators = shell.variables.separators()
    blanks = "".join(one for one in separators if one in " \t\n")
    if array:
        fields = [field for field, _ in split_fields(text, separators) if field is not None]
        shell.variables.set(array, dict(enumerate(fields)))
        return
    if has_unknown(text) and len(names) > 1:
        _unknown_names(shell, names)
        return
    rest = text.strip(blanks) if names != ["REPLY"] else text
    for number, name in enumerate(names):
        if number == len(names) - 1:
            fields = [field for field, _ in split_fields(rest, separators) if field is not None]
            alone = len(fields) == 1 and len(names) > 1  # a last separator goes, where one field is left
            shell.variables.set_text(name, fields[0] if alone else rest)
            return
        end = next((at for at, one in enumerate(rest) if one in separators), len(rest))
        shell.variables.set_text(name, rest[:end])
        rest = rest[end:].lstrip(blanks)
        if rest[:1] and rest[0] in separators and rest[0] not in blanks:
            rest = rest[1:].lstrip(blanks)


def mapfile(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``mapfile -t NAME``."""
    options = [word for word in words if word.startswith("-")]
    names = [word for word in words if not word.startswith("-")] or ["MAPFILE"]
    lines: dict[int | str, str] = {}
    while (line := shell.take_line("\n")) is not None and (line[0] or line[1]):
        lines[len(lines)] = line[0] + ("" if "-t" in options else "\n" * line[1])
    if line is None or set(options) - {"-t"}:
        return _unknown_names(shell, names[-1:])
    shell.variables.set(names[-1], lines)
    return SUCCESS


def getopts(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``getopts LETTERS NAME [words]``."""
    variables = shell.variables
    if len(words) < 2:
        return ExitStatus(2)
    letters, name = words[0], words[1]
    given = words[2:] or variables.state.positional
    if any(map(variables.unknowns.splits, given)):
        return _unknown_names(shell, [name, "OPTARG"])
    at, within = _option_index(variables)
    word = given[at - 1] if at <= len(given) else ""
    if within == 0 and (not word.startswith("-") or word in ("-", "--")):
        variables.set_text("OPTIND", str(at + (word == "--")))
        variables.set_text(name, "?")
        return FAILURE
    letter = word[within + 1]
    takes = letters.lstrip(":").partition(letter)[2].startswith(":")
    known = letter in letters.lstrip(":").replace(":", "")
    more = len(word) > within + 2
    value = ""
    if not known:
        value = letter if letters.startswith(":") else ""
    elif takes and more:
        value, more = word[within + 2 :], False
    elif takes and at < len(given):
        value, at = given[at], at + 1
    elif takes:
        known, value = False, letter if letters.startswith(":") else ""
        variables.set_text(name, ":" if letters.startswith(":") else "?")
    if known or not takes:
        variables.set_text(name, letter if known else "?")
    if takes or not known:
        variables.set_text("OPTARG", value)
    else:
        variables.remove("OPTARG")
    variables.set_text("OPTIND", str(at if more else at + 1))
    variables.state.option_at = within + 1 if more else 0
    return SUCCESS


def _option_index(variables: Variables) -> tuple[int, int]:
    text = variables.text("OPTIND") or "1"
    at = int(text) if text.isdigit() else 1
    return max(at, 1), variables.state.option_at


def let(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``let EXPRESSIONS``."""
    value = 0
    for word in words:
        try:
            value = calculate(word, shell.variables)
        except UnknownNumber:
            return of(None)
    return of(value != 0)


def printf(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``printf [-v NAME]``."""
    name = words[1] if words[:1] == ["-v"] and len(words) > 2 else ""
    text = text_programs.printf(words[2:] if name else words, None)
    if name and text is not None:
        shell.variables.set_text(name, text)
    elif name:
        return _unknown_names(shell, [name])
    elif text is not None:
        shell.emit(text)
    else:
        return UNKNOWN
    return SUCCESS


def cd(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``cd FOLDER``: known afterwards where it is an absolute path, or relative to a known one."""
    state = shell.variables.state
    targets = [word for word in words if not re.fullmatch(r"-[LPe@]*-?", word)]
    target = targets[0] if targets else ""
    if target.startswith("/") or (state.folder is not None and target and not has_unknown(target[:1])):
        state.folder = posixpath.normpath(posixpath.join(state.folder or "/", target))
    else:
        state.folder = None
    return UNKNOWN


def pwd(shell: BuiltinShell, words: list[str]) -> ExitStatus:
    """``pwd``."""
    variables = shell.variables
    shell.emit(f"{variables.state.folder or variables.text('PWD')}\n")
    return SUCCESS


BUILTINS: dict[str, Callable[[BuiltinShell, list[str]], ExitStatus]] = {
    "unset": unset, "shift": shift, "set": set_options, "read": read, "mapfile": mapfile, "readarray": mapfile,
    "getopts": getopts, "let": let, "shopt": shopt, "printf": printf, "cd": cd, "pwd": pwd,
}  # fmt: skip
