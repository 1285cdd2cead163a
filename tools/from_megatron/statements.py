"""A shell script cut into commands, each with its line and the operator behind it."""

import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from parallel.errors import UserError
from tools.from_megatron.gaps import gaps, without_gaps
from tools.from_megatron.words import closing

_OPERATORS = (";;", "&&", "||", "|&", ";", "&", "|", "\n")
_ARRAY = re.compile(r"(?:.*\s)?[A-Za-z_]\w*\+?=", re.DOTALL)
_TEST = re.compile(r"(?:(?:if|elif|while|until|then|else|do|!)\s+)*\[\[\s")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(slots=True)
class Statement:
    """One command as it stands in the script, without comments and with joined lines."""

    text: str
    line: int
    """Where it begins, from 1."""
    behind: str
    """The operator that ends it; a parenthesis of a group, function or pattern is one too."""


def split(script: str, first_line: int = 1) -> list[Statement]:
    """All commands of a script, in order. Raises UserError for a quote or bracket that is never closed."""
    cutter = _StatementCutter(script.replace("\r\n", "\n"), first_line)
    while cutter.at < len(cutter.script):
        cutter.step()
    cutter.end("\n")
    return cutter.found


class _StatementCutter:
    def __init__(self, script: str, first_line: int) -> None:
        self.script, self.first_line = script, first_line
        self.at = 0
        self.text = ""
        self.start = 0
        self.found: list[Statement] = []
        self.heredocs: list[str] = []

    def step(self) -> None:
        """Over a character, quoted text, comment, array or operator."""
        here = self.script[self.at]
        if self.script.startswith("\\\n", self.at):
            self.take(2, " ")
        elif here == "#" and (not self.text or self.text[-1].isspace()):
            end = self.script.find("\n", self.at)
            self.at = len(self.script) if end < 0 else end
        elif here == "\\":
            self.take(2)
        elif here in "'\"`":
            self.take(self.quoted(self.at) - self.at)
        elif self.script.startswith(("$(", "${"), self.at):
            self.take(self.closed(self.at + 1) - self.at)
        elif here == "(" and _ARRAY.fullmatch(self.text):
            self.array()
        elif match := _HEREDOC.match(self.script, self.at):
            self.heredocs.append(match[2])
            self.at = match.end()
        else:
            self.plain(here)

    def plain(self, here: str) -> None:
        in_test = bool(_TEST.match(self.text.lstrip() + " ")) and not re.search(r"\s\]\]", self.text)
        sign = next((sign for sign in _OPERATORS if self.script.startswith(sign, self.at)), None)
        descriptor = here == "&" and (self.text.endswith((">", "<")) or self.script.startswith("&>", self.at))
        if sign is not None and not descriptor and (not in_test or sign == "\n"):
            self.at += len(sign)
            self.end(sign)
            if sign == "\n":
                self.skip_heredocs()
        elif here in "()" and not in_test:
            self.at += 1
            self.end(here)
        else:
            self.take(1)

    def take(self, count: int, instead: str | None = None) -> None:
        """So many characters belong to the command."""
        taken = self.script[self.at : self.at + count] if instead is None else instead
        if not self.text.strip():
            self.start = self.at
        self.text += taken
        self.at += count

    def end(self, sign: str) -> None:
        """The command is complete."""
        if self.text.strip() or sign not in ("\n", ";"):
            line = self.first_line + self.script.count("\n", 0, self.start if self.text.strip() else self.at - 1)
            text = self.text.strip()
            text += " " * (text.endswith("\\") and not text.endswith("\\\\"))  # an escaped blank is a word
            self.found.append(Statement(text, line, sign))
        self.text = ""

    def array(self) -> None:
        """``( ... )`` of an assignment: comments go, and line ends become blanks."""
        end = self.at + 1
        kept = "("
        while end < len(self.script) and self.script[end] != ")":
            here = self.script[end]
            if here == "#" and kept[-1] in "( ":
                newline = self.script.find("\n", end)
                end = len(self.script) if newline < 0 else newline
            elif here in "'\"`":
                until = self.quoted(end)
                kept, end = kept + self.script[end:until], until
            elif self.script.startswith(("$(", "${"), end):
                until = self.closed(end + 1)
                kept, end = kept + self.script[end:until], until
            else:
                joined = self.script.startswith("\\\n", end)
                kept += " " if joined or here.isspace() else here
                end += 2 if joined else 1
        if end >= len(self.script):
            raise UserError(f"line {self.line()}: the array's ( is never closed.")
        self.take(end + 1 - self.at, kept + ")")

    def quoted(self, at: int) -> int:
        """Behind the quote that closes the one at this place."""
        quote, end = self.script[at], at + 1
        while end < len(self.script) and self.script[end] != quote:
            if quote == '"' and self.script.startswith(("$(", "${"), end):
                end = self.closed(end + 1)
            else:
                end += 2 if self.script[end] == "\\" and quote != "'" else 1
        if end >= len(self.script):
            raise UserError(f"line {self.line()}: a {quote} is never closed.")
        return end + 1

    def closed(self, at: int) -> int:
        end = closing(self.script, at)
        if end >= len(self.script) and self.script[-1:] not in ")}":
            raise UserError(f"line {self.line()}: a {self.script[at]} is never closed.")
        return end

    def line(self) -> int:
        return self.first_line + self.script.count("\n", 0, self.at)

    def skip_heredocs(self) -> None:
        """Over the texts that commands of this line read; they are not commands of this script."""
        for word in self.heredocs:
            match = re.compile(rf"^\t*{word}$\n?", re.MULTILINE).search(self.script, self.at)
            body = self.script[self.at : match.start() if match else len(self.script)]
            if ".py" in body and self.found:
                self.found.append(Statement("<<", self.line(), "\n"))
            self.at = match.end() if match else len(self.script)
        self.heredocs = []


# ---- whether [ ... ], [[ ... ]] and test hold. None: it cannot be known without running something


_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_AND, _OR = ("-a", "&&"), ("-o", "||")


def holds(words: list[str]) -> bool | None:
    """The words between the brackets, expanded. Undefined variables count as empty, as in the shell."""
    for signs, decisive in ((_OR, True), (_AND, False)):
        for at, word in enumerate(words):
            if word in signs and 0 < at < len(words) - 1 and not _is_operand(words, at):
                return _joined(holds(words[:at]), holds(words[at + 1 :]), decisive)
    if words[:1] == ["!"] and len(words) > 1:
        inner = holds(words[1:])
        return None if inner is None else not inner
    if words[:1] == ["("] and words[-1:] == [")"]:
        return holds(words[1:-1])
    if any(what.startswith("$(") for word in words for _, what in gaps(word)):
        return None
    return _simple([without_gaps(word) for word in words])


def _is_operand(words: list[str], at: int) -> bool:
    """Whether -a or -o at this place is compared with, or asks something of a file."""
    return words[at - 1] in ("=", "==", "!=") or (at == 1 and words[0].startswith("-") and len(words) == 2)


def _joined(left: bool | None, right: bool | None, decisive: bool) -> bool | None:
    """left or right (decisive True), left and right (decisive False), where one side may be unknown."""
    if left is decisive or right is decisive:
        return decisive
    return None if left is None or right is None else not decisive


def _simple(words: list[str]) -> bool | None:
    if not words:
        return False
    if len(words) == 1:
        return words[0] not in ("", "-n")
    if len(words) == 2:
        return {"-n": bool(words[1]), "-z": not words[1]}.get(words[0])
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(left or 0), int(right or 0))
        except ValueError:
            return None
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) is (sign != "!=")
    if sign == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return {"<": left < right, ">": left > right}.get(sign)
