"""From a script's text to words: quotes, $NAME, ${NAME...}, $( ), $(( ))."""

import bisect
import re
from abc import ABC, abstractmethod

from parallel.errors import UserError
from tools.from_megatron.shell.syntax import (
    ArithmeticExpansion,
    Command,
    CommandSubstitution,
    Literal,
    ParameterExpansion,
    Part,
    ProcessSubstitution,
    Word,
)

META = frozenset(" \t\n;&|<>()")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##|%%|//|/#|/%|\^\^|,,|[#%/^,@:]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_CODE = re.compile(r"([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})")
_PATTERNS = ("#", "##", "%", "%%", "/", "//", "/#", "/%", "^", "^^", ",", ",,")
MOST_NESTED = 40
"""Expansions within expansions."""


class WordReader(ABC):
    """A text, and how much of it has been read. All methods raise UserError where something is never closed."""

    def __init__(self, text: str, first_line: int = 1) -> None:
        self.text, self.first_line = text, first_line
        self.at = 0
        self._depth = 0
        self._ends = [found.start() for found in re.finditer("\n", text)]

    @abstractmethod
    def commands_until(self, end: str) -> list[Command]:
        """The commands up to a closing bracket, which is read too."""

    @abstractmethod
    def commands_of(self, text: str, line: int) -> list[Command]:
        """The commands of another text."""

    def line(self, at: int | None = None) -> int:
        """The line of a place, from 1."""
        return self.first_line + bisect.bisect_left(self._ends, self.at if at is None else at)

    def peek(self, count: int = 1) -> str:
        """The next characters."""
        return self.text[self.at : self.at + count]

    def open(self, what: str, at: int) -> UserError:
        """What to raise for something that is never closed."""
        return UserError(f"line {self.line(at)}: a {what} is never closed.")

    def word(self, ends: frozenset[str] = META) -> Word:
        """A word up to one of these characters outside of quotes; without any part where there is none."""
        parts: list[Part] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "<>" and self.text.startswith("(", self.at + 1) and "<" in ends and not parts:
                parts.append(self._process())
            elif here == "(" and _extends(parts):
                parts += self._bracketed()
            elif here in ends:
                break
            else:
                parts += self.part(ends)
        return merged(parts)

    def _bracketed(self) -> list[Part]:
        """The ``(a|b)`` of a pattern."""
        start, depth, parts = self.at, 0, list[Part]()
        while self.at < len(self.text):
            here = self.text[self.at]
            if here not in "(|)":
                parts += self.part(frozenset("(|)"))
                continue
            depth += (here == "(") - (here == ")")
            parts.append(Literal(here))
            self.at += 1
            if not depth:
                return parts
        raise self.open("(", start)

    def part(self, ends: frozenset[str]) -> list[Part]:
        """The next part outside of double quotes."""
        here = self.text[self.at]
        if here == "\\":
            self.at += 2
            escaped = self.text[self.at - 1 : self.at]
            return [Literal(escaped or "\\", quoted=True)] if escaped != "\n" else []
        if here == "'":
            return [Literal(self._until_quote("'"), quoted=True)]
        if here == '"':
            return list(self._double_quoted())
        if here in "$`":
            return [self.dollar(quoted=False)]
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends and self.text[self.at] not in "\\'\"$`":
            self.at += 1
        return [Literal(self.text[start : self.at])]

    def template(self, in_braces: bool = False, quotes: bool = False) -> Word:
        """Text in which only $ ` and \\ mean something: up to the end; in_braces: up to the } of ``"${NAME:-text}"``.

        quotes: double quotes are read, too.
        """
        parts: list[Part] = []
        plain: list[str] = []
        while self.at < len(self.text) and not (in_braces and self.text[self.at] == "}"):
            here = self.text[self.at]
            if here == "\\" and self.peek(2)[1:] in ("$", "`", '"', "\\", "\n", "}" if in_braces else "$"):
                following = self.peek(2)[1:]
                keeps = following == '"' and not (in_braces or quotes)
                plain.append("" if following == "\n" else "\\" * keeps + following)
                self.at += 2
            elif here in "$`" or (here == '"' and (in_braces or quotes)):
                parts.append(Literal("".join(plain), quoted=True))
                plain = []
                parts += self._double_quoted() if here == '"' else [self.dollar(quoted=True)]
            else:
                plain.append(here)
                self.at += 1
        return merged([*parts, Literal("".join(plain), quoted=True)], keep_empty=False)

    def _double_quoted(self) -> Word:
        start, parts = self.at, list[Part]()
        self.at += 1
        plain: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "\\" and self.peek(2)[1:] in ("$", "`", '"', "\\", "\n"):
                plain.append(self.peek(2)[1:].replace("\n", ""))
                self.at += 2
            elif here in "$`":
                parts.append(Literal("".join(plain), quoted=True))
                plain = []
                parts.append(self.dollar(quoted=True))
            else:
                plain.append(here)
                self.at += 1
        if self.at >= len(self.text):
            raise self.open('"', start)
        self.at += 1
        only_values = parts and not any(isinstance(part, Literal) and part.text for part in parts) and not any(plain)
        return merged([*parts, Literal("".join(plain), quoted=True)], keep_empty=not only_values)

    def dollar(self, quoted: bool) -> Part:
        """What begins with a $ or a backquote."""
        start = self.at
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise UserError(f"line {self.line()}: expansions within expansions, more than {MOST_NESTED} deep.")
        part = self._dollar(start, quoted)
        self._depth -= 1
        return part

    def _dollar(self, start: int, quoted: bool) -> Part:
        if self.text[start] == "`":
            return self._backquoted(quoted)
        if self.text.startswith("$((", start) and (inner := self._arithmetic(start + 1)) is not None:
            return ArithmeticExpansion(inner, self.text[start : self.at], quoted)
        if self.text.startswith("$(", start):
            self.at += 2
            body = self.commands_until(")")
            return CommandSubstitution(body, self.text[start : self.at], quoted)
        if self.text.startswith("${", start):
            return self._braced(start, quoted)
        if self.text.startswith("$[", start) and (end := self.text.find("]", start)) > 0:
            self.at = end + 1  # the older form of $(( ))
            return ArithmeticExpansion(
                self.inner(self.text[start + 2 : end], start), self.text[start : self.at], quoted
            )
        if not quoted and self.text.startswith(("$'", '$"'), start):
            self.at += 1
            return Literal(self._c_string(), quoted=True) if self.peek() == "'" else self._joined_quotes()
        if match := _PARAMETER.match(self.text, start + 1):
            self.at = match.end()
            return ParameterExpansion(match[0], f"${match[0]}", quoted)
        self.at += 1
        return Literal("$", quoted)

    def _joined_quotes(self) -> Part:
        """``$"..."``, which is translated to nothing else here."""
        parts = self._double_quoted()
        if len(parts) == 1:
            return parts[0]
        raise UserError(f'line {self.line()}: $"..." with variables is not followed. Write "..." instead.')

    def _until_quote(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.open(quote, self.at)
        inner, self.at = self.text[self.at + 1 : end], end + 1
        return inner

    def _c_string(self) -> str:
        """``$'...'``."""
        start, found = self.at, list[str]()
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != "'":
            here = self.text[self.at]
            self.at += 1
            if here != "\\":
                found.append(here)
            elif match := _CODE.match(self.text, self.at):
                octal = match[1]
                code = int(octal, 8) & 0xFF if octal else int(match[2] or match[3] or match[4], 16)
                found.append(chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else "")
                self.at = match.end()
            else:
                escaped = self.peek()
                found.append(_ESCAPES.get(escaped, escaped if escaped in "\\'\"?" else f"\\{escaped}"))
                self.at += 1
        if self.at >= len(self.text):
            raise self.open("$'", start)
        self.at += 1
        return "".join(found)

    def _backquoted(self, quoted: bool) -> Part:
        start, inner = self.at, list[str]()
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != "`":
            escaped = self.text[self.at] == "\\" and self.peek(2)[1:] in ('$`\\"' if quoted else "$`\\")
            inner.append(self.peek(2)[1:] if escaped and len(self.peek(2)) == 2 else self.peek())
            self.at += 2 if escaped and len(self.peek(2)) == 2 else 1
        if self.at >= len(self.text):
            raise self.open("`", start)
        self.at += 1
        return CommandSubstitution(
            self.commands_of("".join(inner), self.line(start)), self.text[start : self.at], quoted
        )

    def _process(self) -> Part:
        start = self.at
        self.at += 2
        return ProcessSubstitution(self.commands_until(")"), self.text[start : self.at])

    def _arithmetic(self, start: int) -> Word | None:
        """``(( ))`` from this place; None where it is a subshell within brackets."""
        depth, at = 0, start
        while at < len(self.text):
            here = self.text[at]
            if here in "'\"":
                at = self.text.find(here, at + 1)
                if at < 0:
                    return None
            depth += (here == "(") - (here == ")")
            at += 1
            if depth == 1 and here == ")":
                if not self.text.startswith(")", at):
                    return None
                break
            if depth == 0:
                return None
        if at >= len(self.text):
            return None
        word = self.inner(self.text[start + 2 : at - 1], start + 2)
        self.at = at + 1
        return word

    def inner(self, text: str, at: int) -> Word:
        """A part of the text as arithmetic: expansions are made in it as within double quotes."""
        reader = type(self)(text, self.line(at))
        reader._depth = self._depth
        return reader.template(quotes=True)

    def _braced(self, start: int, quoted: bool) -> Part:
        self.at += 2
        prefix = ""
        if self.peek() in ("#", "!") and self.text[self.at + 1 : self.at + 2] not in ("}", ""):
            following = _BRACED_PARAMETER.match(self.text, self.at + 1)
            if following and self.text[following.end() : following.end() + 1] in (
                ("}", "[") if self.peek() == "#" else ("}", "[", ":", "-", "@", "*", "#", "%", "/", "^", ",", "+", "=")
            ):
                prefix = self.peek()
                self.at += 1
        match = _BRACED_PARAMETER.match(self.text, self.at)
        if match is None:
            raise UserError(f"line {self.line(start)}: {self._shown(start)} is not an expansion of bash's.")
        self.at = match.end()
        index = self._index() if self.peek() == "[" else None
        operator = ""
        words: tuple[Word, ...] = ()
        if self.peek() != "}":
            operator, words = self._operation(start, quoted)
        if self.peek() != "}":
            raise self.open("${", start)
        self.at += 1
        return ParameterExpansion(match[0], self.text[start : self.at], quoted, index, prefix, operator, words)

    def _shown(self, start: int) -> str:
        return self.text[start : start + 30].partition("\n")[0]

    def _index(self) -> Word:
        start = self.at
        self.at += 1
        word = self.word(frozenset("]"))
        if self.peek() != "]":
            raise self.open("[", start)
        self.at += 1
        return word

    def _operation(self, start: int, quoted: bool) -> tuple[str, tuple[Word, ...]]:
        match = _OPERATOR.match(self.text, self.at)
        if match is None:
            if self.peek() == "*":  # ${!prefix*}
                self.at += 1
                return "*", ()
            raise UserError(f"line {self.line(start)}: {self._shown(start)} is not an expansion of bash's.")
        operator, self.at = match[0], match.end()
        if operator == ":":
            return operator, self._offsets()
        if operator in _PATTERNS:
            first = self._leading_slash() if operator == "//" else ()
            pattern = first + self.word(frozenset("/}" if operator[0] == "/" else "}"))
            if operator[0] != "/" or self.peek() != "/":
                return operator, (pattern,)
            self.at += 1
            return operator, (pattern, self.template(in_braces=True) if quoted else self.word(frozenset("}")))
        return operator, (self.template(in_braces=True) if quoted else self.word(frozenset("}")),)

    def _leading_slash(self) -> Word:
        """The / of ``${NAME////_}``, which does not end the pattern that it begins."""
        if self.peek() != "/":
            return ()
        self.at += 1
        return (Literal("/"),)

    def _offsets(self) -> tuple[Word, ...]:
        """``offset:length``, each arithmetic."""
        first = self._until_colon()
        if self.peek() != ":":
            return (first,)
        self.at += 1
        return first, self._until_colon()

    def _until_colon(self) -> Word:
        start, depth = self.at, 0
        while self.at < len(self.text) and (depth or self.text[self.at] not in ":}"):
            depth += (self.text[self.at] in "({[") - (self.text[self.at] in ")}]")
            self.at += 1
        return self.inner(self.text[start : self.at], start)


def _extends(parts: list[Part]) -> bool:
    """Whether an opening bracket behind these is an extended pattern's."""
    last = parts[-1] if parts else None
    return isinstance(last, Literal) and not last.quoted and last.text[-1:] in ("@", "?", "*", "+", "!")


def merged(parts: list[Part], keep_empty: bool = True) -> Word:
    """Parts with literals of one kind joined, and empty ones left out, where others hold the word's place."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(part, Literal) and isinstance(before, Literal) and part.quoted == before.quoted:
            found[-1] = Literal(before.text + part.text, part.quoted)
        elif not isinstance(part, Literal) or part.text or (part.quoted and keep_empty):
            found.append(part)
    return tuple(found)
