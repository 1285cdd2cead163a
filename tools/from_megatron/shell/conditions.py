"""Whether [ ... ], [[ ... ]] and test hold. None: that cannot be known without running something."""

import operator
import re
from collections.abc import Callable, Sequence

from tools.from_megatron.shell import patterns
from tools.from_megatron.shell.arithmetic import UnknownNumber, calculate
from tools.from_megatron.shell.expansion import Expander, Piece
from tools.from_megatron.shell.syntax import Condition
from tools.from_megatron.unknown import has_unknown, without_marks

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_TEXTS = ("=", "==", "!=", "<", ">")
_FILES = tuple("abcdefghkprstuwxGLNOS")
"""Letters of unary operators about files."""
MOST_OF_EXPRESSION = 2000
MOST_TRIES = 10_000_000
"""Ways in which Python may come to look at one text."""


class ShellError(Exception):
    """What [ complains about, and then fails with status 2."""


class ConditionReader:
    """Conditions over the files that a script has written, and the variables of an expander."""

    def __init__(self, expander: Expander, files: dict[str, str]) -> None:
        self.expander, self.files = expander, files
        self.matched: list[str] | None = None
        """BASH_REMATCH of the last =~."""

    # ---- [ ]

    def test(self, words: Sequence[str]) -> bool | None:
        """The words between the brackets, expanded. Raises ShellError for what [ refuses."""
        if len(words) <= 3:
            return self._few(list(words))
        if words[0] == "!" and len(words) == 4:
            return _not(self._few(list(words[1:])))
        if words[0] == "(" and words[-1] == ")" and len(words) == 4:
            return self._few(list(words[1:-1]))
        return self._many(list(words))

    def _few(self, words: list[str]) -> bool | None:
        if not words:
            return False
        if len(words) == 1:
            return self._not_empty(words[0])
        if len(words) == 2:
            return _not(self._few(words[1:])) if words[0] == "!" else self._unary(words[0], words[1])
        if words[1] in _TEXTS or words[1] in _NUMBERS or words[1] in ("-nt", "-ot", "-ef"):
            return self._binary(words[0], words[1], words[2])
        if words[1] in ("-a", "-o"):
            join = _and if words[1] == "-a" else _or
            return join(self._not_empty(words[0]), self._not_empty(words[2]))
        if words[0] == "!":
            return _not(self._few(words[1:]))
        if words[0] == "(" and words[2] == ")":
            return self._few(words[1:2])
        raise ShellError

    def _many(self, words: list[str]) -> bool | None:
        """More than four words: -o binds weaker than -a, and ! and brackets stronger than both."""
        value, rest = self._any_of(words)
        if rest:
            raise ShellError
        return value

    def _any_of(self, words: list[str]) -> tuple[bool | None, list[str]]:
        value, rest = self._all_of(words)
        while rest and rest[0] == "-o":
            right, rest = self._all_of(rest[1:])
            value = _or(value, right)
        return value, rest

    def _all_of(self, words: list[str]) -> tuple[bool | None, list[str]]:
        value, rest = self._one_of(words)
        while rest and rest[0] == "-a":
            right, rest = self._one_of(rest[1:])
            value = _and(value, right)
        return value, rest

    def _one_of(self, words: list[str]) -> tuple[bool | None, list[str]]:
        if not words:
            raise ShellError
        if words[0] == "!":
            value, rest = self._one_of(words[1:])
            return _not(value), rest
        if words[0] == "(" and len(words) > 1:
            value, rest = self._any_of(words[1:])
            if rest[:1] != [")"]:
                raise ShellError
            return value, rest[1:]
        if len(words) > 2 and (words[1] in _TEXTS or words[1] in _NUMBERS or words[1] in ("-nt", "-ot", "-ef")):
            return self._binary(*words[:3]), words[3:]
        if len(words) > 1 and re.fullmatch(r"-[A-Za-z]", words[0]):
            return self._unary(words[0], words[1]), words[2:]
        return self._not_empty(words[0]), words[1:]

    def _binary(self, left: str, sign: str, right: str) -> bool | None:
        if sign in _NUMBERS:
            return self._compared(left, sign, right, arithmetic=False)
        if sign in ("-nt", "-ot", "-ef"):
            return None
        if has_unknown(left + right):
            return None if left != right or sign not in ("=", "==", "!=") else sign != "!="
        return {"=": left == right, "==": left == right, "!=": left != right, "<": left < right, ">": left > right}[
            sign
        ]

    def _compared(self, left: str, sign: str, right: str, arithmetic: bool) -> bool | None:
        numbers = []
        for text in (left, right):
            if has_unknown(text):
                return None
            if arithmetic:
                try:
                    numbers.append(calculate(text, self.expander.variables))
                except UnknownNumber:
                    return None
            elif re.fullmatch(r"\s*[-+]?\d+\s*", text) and len(text) < 40:
                numbers.append(int(text))
            else:
                raise ShellError
        return _NUMBERS[sign](*numbers)

    def _unary(self, sign: str, text: str) -> bool | None:
        if sign == "-n":
            return self._not_empty(text)
        if sign == "-z":
            return _not(self._not_empty(text))
        if sign == "-v":
            return None if has_unknown(text) else not self.expander.variables.is_unset(text)
        if sign in ("-o", "-R"):
            return None
        if sign[1:] in _FILES:
            return True if text in self.files and sign in ("-e", "-f", "-r", "-s") else None
        raise ShellError

    def _not_empty(self, text: str) -> bool | None:
        return True if without_marks(text) else None if has_unknown(text) else False

    # ---- [[ ]]

    def holds(self, condition: Condition) -> bool | None:
        """A condition of [[ ]]. Raises UserError for what is not followed, ShellError for what bash refuses."""
        sign = condition.operator
        if sign == "!":
            return _not(self.holds(condition.conditions[0]))
        if sign in ("&&", "||"):
            join, decisive = (_and, False) if sign == "&&" else (_or, True)
            value: bool | None = not decisive
            for each in condition.conditions:
                value = join(value, self.holds(each))
                if value is decisive:
                    break
            return value
        text = self.expander.text
        if len(condition.words) == 1:
            return self._unary(sign, text(condition.words[0]))
        left = text(condition.words[0])
        if sign in _NUMBERS:
            return self._compared(left, sign, text(condition.words[1]), arithmetic=True)
        if sign in ("=", "==", "!="):
            holds = self.fits(left, self.expander.pieces(condition.words[1]), extended=True)
            return holds if sign != "!=" else _not(holds)
        if sign == "=~":
            return self._expression(left, self.expander.pieces(condition.words[1]))
        return self._binary(left, sign, text(condition.words[1]))

    def fits(self, text: str, pieces: Sequence[Piece], extended: bool = False) -> bool | None:
        """Whether a text matches a pattern, as in case, too. extended: groups mean something without shopt."""
        options = self.expander.variables.state.options
        if "nocasematch" in options:
            [(text, _), *pieces] = patterns.folded([(text, True), *pieces])
        what = patterns.pattern(pieces, extended=extended or "extglob" in options)
        if what == [""]:
            return True
        if has_unknown(text) or any(has_unknown(piece) for piece, _ in pieces):
            return True if text == "".join(piece for piece, _ in pieces) else None
        return patterns.matches(what, text)

    def _expression(self, text: str, pieces: Sequence[Piece]) -> bool | None:
        expression = "".join(re.escape(piece) if quoted else piece for piece, quoted in pieces)
        if has_unknown(text + expression):
            return None
        for name, python in (("digit", "0-9"), ("alpha", "A-Za-z"), ("alnum", "A-Za-z0-9"), ("space", r"\s"),
                             ("upper", "A-Z"), ("lower", "a-z")):  # fmt: skip
            expression = expression.replace(f"[:{name}:]", python)
        if len(expression) > MOST_OF_EXPRESSION or "(?" in expression or _may_take_long(expression, text):
            return None
        if re.search(r"\\[A-Za-z0-9]", expression):
            return None  # Python's classes, which bash's expressions do not have
        try:
            no_case = "nocasematch" in self.expander.variables.state.options
            found = re.search(expression, text, re.IGNORECASE if no_case else 0)
        except re.error:
            raise ShellError from None
        # Of several alternatives bash takes the longest and Python the first, which groups may show.
        unclear = found is not None and "|" in expression
        self.matched = None if unclear or found is None else [found[0], *(group or "" for group in found.groups())]
        return found is not None


def _may_take_long(expression: str, text: str) -> bool:
    """Whether a repetition within a repetition, or many of them, would make Python try for very long."""
    plain = re.sub(r"\\.|\[[^]]*\]", "x", expression)
    repeats = len(re.findall(r"[*+}]", plain))
    open_groups: list[bool] = []
    for at, one in enumerate(plain):
        if one == "(":
            open_groups.append(False)
        elif one == ")" and open_groups:
            inner = open_groups.pop()
            if inner and plain[at + 1 : at + 2] in ("*", "+", "{"):
                return True
            if open_groups:
                open_groups[-1] |= inner
        elif one in "*+}" and open_groups:
            open_groups[-1] = True
    return (len(text) + 1) ** max(repeats - 1, 0) > MOST_TRIES


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _and(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _or(left: bool | None, right: bool | None) -> bool | None:
    if left is True or right is True:
        return True
    return None if left is None or right is None else False
