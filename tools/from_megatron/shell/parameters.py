"""``${NAME...}``: defaults, lengths, parts, patterns, letters' case."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from parallel.errors import UserError
from tools.from_megatron.shell import patterns
from tools.from_megatron.shell.syntax import ParameterExpansion, Word, plain_text
from tools.from_megatron.shell.variables import Variables
from tools.from_megatron.unknown import Unknown, UnknownValues, has_unknown, head_and_tail, without_marks

_DEFAULTS = ("-", ":-", "=", ":=", "?", ":?", "+", ":+")


class WordExpander(Protocol):
    """What expands the words within ``${ }``."""

    variables: Variables

    @property
    def unknowns(self) -> UnknownValues:
        """Of the whole reading."""

    def text(self, word: Word) -> str:
        """A word as one text."""

    def pieces(self, word: Word) -> list[tuple[str, bool]]:
        """A word as a pattern."""

    def number(self, text: str) -> int:
        """The whole number that an expression makes."""

    def derived(self, written: str, text: str, change: Callable[[str], str] | None) -> str:
        """A text changed."""


@dataclass(frozen=True, slots=True)
class ParameterValue:
    """What a parameter is before an operator changes it."""

    elements: list[str]
    """Of ``$NAME`` one, or none where it is unset."""
    is_list: bool = False
    star: bool = False
    """As ``$*``: joined where it is quoted."""
    may_be_none: bool = False
    """Whether nothing sets it, so that even quoted it may be no word at all."""
    changed: bool = False
    """Whether it is a list of what an operator has made."""

    @property
    def is_empty(self) -> bool:
        """As ``${NAME:-...}`` asks."""
        return not any(self.elements) if len(self.elements) < 2 else False


def expand_parameter(part: ParameterExpansion, expander: WordExpander) -> ParameterValue | Word:
    """The value; or the word that stands for it, as in ``${NAME:-word}``."""
    name, index = part.name, part.index
    if part.prefix == "!":
        if part.operator in ("*", "@") and not plain_text(part.words[0] if part.words else ()):
            return _names(name, part.operator, expander)
        if index is not None and plain_text(index) in ("@", "*"):
            return _keys(name, plain_text(index) == "*", expander)
        name, index = _named_by(part, expander)
    value = _value(name, index, expander)
    if part.prefix == "#":
        return _length(part, value, expander)
    if part.operator in _DEFAULTS:
        return _default(part, name, index, value, expander)
    if part.operator == ":":
        return _slice(part, name, value, expander)
    if part.operator:
        elements = [_changed(part, text, expander) for text in value.elements]
        return replace(value, elements=elements, changed=True)
    return value


def _value(name: str, index: Word | None, expander: WordExpander) -> ParameterValue:
    variables = expander.variables
    if name in ("@", "*"):
        return ParameterValue(variables.arguments(), True, name == "*")
    which = None if index is None else plain_text(index)
    if which in ("@", "*"):
        outside = name not in variables.state.values
        return ParameterValue(variables.elements(name), True, which == "*", outside)
    text = variables.text(name) if index is None else element(name, index, expander)
    return ParameterValue([] if text is None else [text])


def element(name: str, index: Word, expander: WordExpander) -> str | None:
    """``${NAME[index]}``."""
    value = expander.variables.get(name)
    if value is None:
        return None
    key = element_key(name, index, expander)
    if isinstance(value, str):
        return value if key in (0, -1) or has_unknown(value) else None
    if isinstance(key, int):
        before = [text for number, text in value.items() if key < 0 or not isinstance(number, int) or number < key]
        if any(map(expander.unknowns.splits, before)):
            return expander.derived(f"${{{name}[{key}]}}", "".join(before), None)
        if key < 0:
            key += max((number for number in value if isinstance(number, int)), default=-1) + 1
    return value.get(key)


def element_key(name: str, index: Word, expander: WordExpander) -> int | str:
    """An index as a number, or of a table as a text. Raises UserError where it is not known."""
    text = expander.text(index)
    if name in expander.variables.state.tables:
        return text
    return expander.number(text)


def _named_by(part: ParameterExpansion, expander: WordExpander) -> tuple[str, Word | None]:
    """The parameter that ``${!NAME}`` means. Raises UserError where that is not known."""
    named = _value(part.name, part.index, expander)
    text = named.elements[0] if named.elements else ""
    if has_unknown(text) or not (text.isidentifier() or text.isdigit()):
        said = expander.unknowns.readable(text) or "nothing"
        raise UserError(
            f"line {expander.variables.line}: {part.written} means the variable that ${part.name} names, which is "
            f"{said}. Write that variable in its place."
        )
    return text, None


def _names(prefix: str, operator: str, expander: WordExpander) -> ParameterValue:
    names = sorted(name for name in expander.variables.state.values if name.startswith(prefix))
    return ParameterValue(names, True, operator == "*")


def _keys(name: str, star: bool, expander: WordExpander) -> ParameterValue:
    value = expander.variables.get(name)
    if isinstance(value, str) and expander.variables.is_outside(value):
        return ParameterValue([value], True, star, may_be_none=True)
    if isinstance(value, dict) and any(map(expander.unknowns.splits, value.values())):
        keys = [expander.derived(f"${{!{name}[@]}}", "".join(value.values()), None)]
        return ParameterValue(keys, True, star, may_be_none=True)
    keys = [] if value is None else ["0"] if isinstance(value, str) else [str(key) for key in value]
    return ParameterValue(keys, True, star, changed=True)


def _length(part: ParameterExpansion, value: ParameterValue, expander: WordExpander) -> ParameterValue:
    if value.is_list:
        return _count(part, value, expander)
    text = value.elements[0] if value.elements else ""
    return ParameterValue([expander.derived(part.written, text, lambda known: str(len(known)))])


def _count(part: ParameterExpansion, value: ParameterValue, expander: WordExpander) -> ParameterValue:
    """How many elements; of a variable that nothing sets, there may be one or none."""
    if [expander.variables.is_outside(text) for text in value.elements] == [True]:
        asked = Unknown(part.written, expander.variables.line, (part.name,), assumed="0")
        return ParameterValue([expander.unknowns.mark(asked)])
    if any(map(expander.unknowns.splits, value.elements)):
        return ParameterValue([expander.derived(part.written, "".join(value.elements), None)])
    return ParameterValue([str(len(value.elements))])


def _default(
    part: ParameterExpansion, name: str, index: Word | None, value: ParameterValue, expander: WordExpander
) -> ParameterValue | Word:
    variables, sign = expander.variables, part.operator[-1]
    unset = not value.elements
    if not value.is_list and index is None:
        unset = unset or variables.is_unset(name)
    empty = value.is_empty or (len(value.elements) == 1 and variables.is_outside(value.elements[0]))
    absent = unset or (part.operator[0] == ":" and empty)
    text = "" if unset or not value.elements else value.elements[0]
    if sign == "+":
        if not absent and part.operator[0] == ":" and _may_be_empty(text, value):
            return ParameterValue([expander.derived(part.written, text, lambda _: part.written)])
        return ParameterValue([] if value.is_list else [""], value.is_list) if absent else part.words[0]
    if not absent:
        return value
    if sign == "?":
        asked = Unknown(f"${name}", variables.line, (name,) if name.isidentifier() or name.isdigit() else ())
        return ParameterValue([expander.unknowns.mark(asked)])
    if sign == "=":
        text = expander.text(part.words[0])
        if index is None:
            variables.set_text(name, text)
        else:
            variables.set_element(name, element_key(name, index, expander), text)
        return ParameterValue([text])
    return part.words[0]


def _may_be_empty(text: str, value: ParameterValue) -> bool:
    """Whether nothing of a text is known."""
    return len(value.elements) == 1 and has_unknown(text) and not without_marks(text)


def _slice(part: ParameterExpansion, name: str, value: ParameterValue, expander: WordExpander) -> ParameterValue:
    offset = expander.number(expander.text(part.words[0]))
    length = expander.number(expander.text(part.words[1])) if len(part.words) > 1 else None
    if value.is_list:
        elements = value.elements
        if name in ("@", "*"):  # $0 is the element before the first
            elements = [expander.variables.text("0") or "", *elements]
        start = offset if offset >= 0 else offset + len(elements)
        if length is not None and length < 0:
            raise UserError(f"line {expander.variables.line}: {part.written} takes a negative number of elements.")
        if any(map(expander.unknowns.splits, elements)):
            some = [expander.derived(part.written, "".join(elements), None)]
            return ParameterValue(some, True, value.star, may_be_none=True)
        kept = elements[start:] if length is None else elements[start : start + length]
        return ParameterValue(kept if start >= 0 else [], True, value.star, changed=True)
    text = value.elements[0] if value.elements else ""

    def cut(known: str) -> str:
        start = offset if offset >= 0 else offset + len(known)
        end = len(known) if length is None else length + (start if length >= 0 else len(known))
        if start < 0 or start > len(known):
            return ""
        if end < start:
            raise UserError(f"line {expander.variables.line}: {part.written} ends before it begins.")
        return known[start:end]

    return ParameterValue([expander.derived(part.written, text, cut)])


def _changed(part: ParameterExpansion, text: str, expander: WordExpander) -> str:
    """One text by an operator of patterns or letters."""
    operator = part.operator
    if operator == "@":
        return _transformed(part, text, expander)
    pieces = expander.pieces(part.words[0])
    if any(has_unknown(piece) for piece, _ in pieces):
        return expander.derived(part.written, text + "".join(piece for piece, _ in pieces), None)
    options = expander.variables.state.options
    no_case = operator in ("/", "//", "/#", "/%") and "nocasematch" in options
    what = patterns.pattern(patterns.folded(pieces) if no_case else pieces, "extglob" in options)
    by = expander.text(part.words[1]) if operator[0] == "/" and len(part.words) > 1 else ""
    change = _change(operator, what, by, no_case)
    if has_unknown(text) or has_unknown(by):
        exact = _around_unknown(operator, what, text)
        return exact if exact is not None else expander.derived(part.written, text, change)
    return change(text)


def _around_unknown(operator: str, what: patterns.Pattern, text: str) -> str | None:
    """The result where it does not depend on the unknown parts of a text; None where it does."""
    head, tail = head_and_tail(text)
    if operator == "%":
        lengths = patterns.suffixes(what, tail)
        return text[: len(text) - lengths[0]] if lengths else None
    if operator == "#":
        lengths = patterns.prefixes(what, head)
        return text[lengths[0] :] if lengths else None
    literal = [one for one in what if isinstance(one, str) and len(one) == 1]
    if operator == "##" and what[:1] == [""] and len(literal) == len(what) - 1 > 0:
        at = tail.rfind("".join(literal))
        return tail[at + len(literal) :] if at >= 0 else None
    if operator == "%%" and what[-1:] == [""] and len(literal) == len(what) - 1 > 0:
        at = head.find("".join(literal))
        return head[:at] if at >= 0 else None
    return None


def _change(operator: str, what: patterns.Pattern, by: str, no_case: bool) -> Callable[[str], str]:
    def change(text: str) -> str:
        [(compared, _)] = patterns.folded([(text, True)]) if no_case else [(text, True)]
        if operator in ("#", "##"):
            lengths = patterns.prefixes(what, text)
            return text[lengths[0 if operator == "#" else -1] :] if lengths else text
        if operator in ("%", "%%"):
            lengths = patterns.suffixes(what, text)
            return text[: len(text) - lengths[0 if operator == "%" else -1]] if lengths else text
        if operator == "/#":
            lengths = patterns.prefixes(what, compared)
            return by + text[lengths[-1] :] if lengths else text
        if operator == "/%":
            lengths = patterns.suffixes(what, compared)
            return text[: len(text) - lengths[-1]] + by if lengths else text
        if operator[0] == "/":
            return patterns.replaced(what, text, by, operator == "//", compared) if what else text
        return _cased(operator, what, text)

    return change


def _cased(operator: str, what: patterns.Pattern, text: str) -> str:
    change = str.upper if operator[0] == "^" else str.lower
    fits = [not what or patterns.matches(what, one) for one in text]
    last = len(text) if len(operator) == 2 else 1
    return "".join(
        change(one) if fit and at < last else one for at, (one, fit) in enumerate(zip(text, fits, strict=True))
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _transformed(part: ParameterExpansion, text: str, expander: WordExpander) -> str:
    known: dict[str | None, Callable[[str], str]] = {
        "U": str.upper, "L": str.lower, "u": lambda one: one[:1].upper() + one[1:], "Q": _quoted,
    }  # fmt: skip
    letter = plain_text(part.words[0])
    if letter not in known:
        raise UserError(
            f"line {expander.variables.line}: {part.written} is not followed. Write its value in its place."
        )
    return expander.derived(part.written, text, known[letter])
