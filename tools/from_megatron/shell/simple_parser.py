"""Simple commands: assignments, arrays, words, redirections with here-documents; blanks, comments, ends of lines."""

import re

from parallel.errors import UserError
from tools.from_megatron.shell.syntax import (
    ArrayElement,
    Assignment,
    Command,
    Literal,
    Redirection,
    SimpleCommand,
    Word,
    plain_text,
)
from tools.from_megatron.shell.word_reader import WordReader

DECLARES = ("export", "declare", "local", "readonly", "typeset")
_KEYWORDS = "if then elif else fi for while until select do done case esac function time coproc { } !".split()
_KEYWORD = re.compile(rf"(?:{'|'.join(map(re.escape, _KEYWORDS))})(?=[\s;&|<>()]|$)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[|\+?=)")
_REDIRECTION = re.compile(r"(\d+|\{[A-Za-z_]\w*\})?(<<-|<<<|<<|<>|<&|<(?!\()|>>|>\||>&|>(?!\())|(&>>|&>)")
_BLANKS = re.compile(r"(?:[ \t\r]|\\\r?\n)*")


class SimpleParser(WordReader):
    """Simple commands of a text. All methods raise UserError for what bash refuses, too."""

    def __init__(self, text: str, first_line: int = 1) -> None:
        super().__init__(text.replace("\r\n", "\n"), first_line)
        self._heredocs: list[tuple[list[Redirection], int, str, bool]] = []

    def _simple(self) -> Command:
        start = self.at
        command = SimpleCommand()
        while True:
            self._blanks()
            if self._redirection(command.redirections):
                continue
            declares = bool(command.words) and plain_text_of(command.words[0]) in DECLARES
            assignment = self._assignment() if not command.words or declares else None
            if assignment is not None:
                (command.words if declares else command.assignments).append(assignment)
                continue
            if self.peek() == "(" and command.words:
                raise self._unexpected()
            word = self.word()
            if not word:
                break
            command.words.append(word)
        if self.at == start:
            raise self._unexpected()
        return self._placed(command, start)

    def _assignment(self) -> Assignment | None:
        match, before = _ASSIGNMENT.match(self.text, self.at), self.at
        if match is None:
            return None
        self.at, index, sign = match.end(), None, match[2]
        if sign == "[":
            self.at -= 1
            index = self._index()
            found = re.compile(r"\+?=").match(self.text, self.at)
            if found is None:
                self.at = before
                return None
            sign, self.at = found[0], found.end()
        if self.peek() == "(" and index is None:
            return Assignment(match[1], elements=self._array(), append=sign == "+=")
        return Assignment(match[1], self.word(), append=sign == "+=", index=index)

    def _array(self) -> tuple[ArrayElement, ...]:
        start = self.at
        self.at += 1
        elements: list[ArrayElement] = []
        while True:
            self._newlines()
            if self.at >= len(self.text):
                raise UserError(f"line {self.line(start)}: the array's ( is never closed.")
            if self.peek() == ")":
                break
            index, before = None, self.at
            if self.peek() == "[":
                index = self._index()
                if self.peek() != "=":
                    index, self.at = None, before
                else:
                    self.at += 1
            word = self.word()
            if not word and index is None:
                raise self._unexpected()
            elements.append(ArrayElement(word, index))
        self.at += 1
        return tuple(elements)

    def _redirection(self, redirections: list[Redirection]) -> bool:
        """Whether one was read; a here-document's text is read with the end of the line."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        operator = match[2] or match[3]
        self.at = match.end()
        self._blanks()
        target_at = self.at
        target = self.word()
        if not target:
            raise self._unexpected()
        descriptor = int(match[1]) if match[1] and match[1].isdigit() else None
        redirections.append(Redirection(operator, target, descriptor))
        if operator in ("<<", "<<-"):
            written = self.text[target_at : self.at]
            quoted = any(sign in written for sign in "'\"\\")
            delimiter = plain_text(target)
            if delimiter is None:
                raise UserError(f"line {self.line()}: a here-document that ends with {written}.")
            self._heredocs.append((redirections, len(redirections) - 1, delimiter, quoted))
        return True

    # ---- blanks, comments, ends of lines

    def _keyword(self) -> str:
        match = _KEYWORD.match(self.text, self.at)
        return match[0] if match else ""

    def _sign(self, count: int) -> str:
        """The characters behind blanks."""
        self._blanks()
        return self.peek(count)

    def _blanks(self) -> None:
        """Over blanks, joined lines and a comment."""
        match = _BLANKS.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.peek() == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;&|()"):
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end

    def _newlines(self) -> None:
        """Over blanks, comments and ends of lines, and over the here-documents that begin there."""
        self._blanks()
        while self.peek() == "\n":
            self.at += 1
            self._read_heredocs()
            self._blanks()

    def _read_heredocs(self) -> None:
        waiting, self._heredocs = self._heredocs, []
        for redirections, number, delimiter, quoted in waiting:
            operator = redirections[number].operator
            tabs = operator == "<<-"
            line, lines = self.line(), list[str]()
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                one, self.at = self.text[self.at : end], min(end + 1, len(self.text))
                one = one.lstrip("\t") if tabs else one
                if one == delimiter:
                    break
                lines.append(one + "\n")
            text = "".join(lines)
            body = (Literal(text, quoted=True),) if quoted else type(self)(text, line).template()
            redirections[number] = Redirection(operator, body, redirections[number].descriptor)

    def _at_line_end(self) -> bool:
        return self.at >= len(self.text) or self.peek() == "\n"

    def _placed(self, command: Command, start: int) -> Command:
        """The command with its line and its text."""
        command.line, command.written = self.line(start), self.text[start : self.at].partition("\n")[0].strip()
        return command

    def _unexpected(self) -> UserError:
        start = self.text.rfind("\n", 0, self.at) + 1
        line = self.text[start:].partition("\n")[0].strip()
        if re.search(r"=[\"']?<[A-Za-z][^<>]*", line):
            said = f"a value that is to be filled in: {line[:80]}. Write it in its place."
            return UserError(f"line {self.line(start)}: {said}")
        shown = re.match(r"[^\s]{0,20}", self.text[self.at :])
        what = shown[0] if shown and shown[0] else "the end"
        hints = {"then": "without an if", "elif": "without an if", "else": "without an if", "fi": "without an if",
                 "do": "without a loop", "done": "without a loop", "esac": "without a case"}  # fmt: skip
        name = re.match(r"[a-z]*", what)
        hint = hints.get(name[0] if name else "", "not expected here")
        return UserError(f"line {self.line()}: {what} {hint}.")


def plain_text_of(word: Word | Assignment) -> str | None:
    """As ``plain_text``; None for an assignment."""
    return None if isinstance(word, Assignment) else plain_text(word)
