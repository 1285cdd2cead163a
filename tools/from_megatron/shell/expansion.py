"""From words to the fields that a command receives: braces, expansions, splitting at blanks, quotes."""

import re
from collections.abc import Callable, Sequence

from parallel.errors import UserError
from tools.from_megatron.shell import patterns
from tools.from_megatron.shell.arithmetic import UnknownNumber, calculate
from tools.from_megatron.shell.braces import braces
from tools.from_megatron.shell.parameters import ParameterValue, expand_parameter
from tools.from_megatron.shell.syntax import (
    ArithmeticExpansion,
    Command,
    CommandSubstitution,
    Literal,
    ParameterExpansion,
    Part,
    Word,
)
from tools.from_megatron.shell.variables import BRACES, MOST_TEXT, Variables
from tools.from_megatron.unknown import Unknown, UnknownValues, has_unknown

type Piece = tuple[str, bool]
"""A text, and whether it is quoted."""

type _Item = tuple[str, bool, bool] | str
"""A text, whether it is quoted, and whether it is split at blanks; or a break between two elements of
``"${NAME[@]}"``, as what joins them where they become one text."""

_TILDE = re.compile(r"^((?:[A-Za-z_]\w*=)?)~(?=/|$)")
_TILDES = re.compile(r"(^|:)~(?=/|:|$)")
_HOME_OF = re.compile(r"~[A-Za-z_][\w.-]*(?=/|$)")
_UNCLEAR = "\0"
"""Between elements that bash joins now by a blank, now by $IFS."""
_ASSIGNS = re.compile(r"\+\+|--|[^=!<>]=(?!=)")


class Expander:
    """Expansion by the values of ``variables``; ``capture`` gives the output of commands."""

    def __init__(self, variables: Variables, capture: Callable[[Sequence[Command], str], str]) -> None:
        self.variables, self.capture = variables, capture

    @property
    def unknowns(self) -> UnknownValues:
        """Of the whole reading."""
        return self.variables.unknowns

    def fields(self, words: Sequence[Word], files: bool = False) -> list[str]:
        """The words of a command. files: every pattern stands for files, as in the list of a for.

        Raises UserError for what bash refuses, too, and for what is not followed.
        """
        found: list[str] = []
        size = 0
        for word in words:
            for one in self.braced(word):
                made = [self._field(pieces, files) for pieces in self._split(self._items(one))]
                size += sum(map(len, made)) + len(made)
                if size > MOST_TEXT:
                    raise UserError(f"line {self.variables.line}: words of more than {MOST_TEXT:,} characters.")
                found += made
        return found

    def braced(self, word: Word) -> list[Word]:
        """The words that its braces make of one."""
        return braces(word, self.variables.line) if BRACES in self.variables.state.options else [word]

    def text(self, word: Word, assigns: bool = False) -> str:
        """A word as one text: the right-hand side of an assignment, a here-document."""
        items = self._items(word, _TILDES if assigns else _TILDE)
        text = "".join(item if isinstance(item, str) else item[0] for item in items)
        if _UNCLEAR in items:
            return self.derived("${...[@]}", text.replace(_UNCLEAR, self.unknowns.mark(Unknown("$IFS"))), None)
        if len(text) > MOST_TEXT:
            raise UserError(f"line {self.variables.line}: a text of more than {MOST_TEXT:,} characters.")
        return text

    def pieces(self, word: Word) -> list[Piece]:
        """A word as a pattern: what is quoted in it means itself."""
        return [(item, True) if isinstance(item, str) else item[:2] for item in self._items(word)]

    def number(self, text: str) -> int:
        """The whole number that an expression makes. Raises UserError where it is not known."""
        try:
            return calculate(text, self.variables)
        except UnknownNumber as error:
            written = error.unknown.written if error.unknown else text
            raise UserError(
                f"line {self.variables.line}: a number here depends on {written}, which the script does not set. "
                + (f"Give it with --set {error.unknown.sets[0]}=VALUE." if error.unknown and error.unknown.sets
                   else "Write its value in its place.")
            ) from None  # fmt: skip

    def arithmetic(self, word: Word, written: str) -> str:
        """``$(( ))``."""
        text = self.text(word)
        try:
            return str(calculate(text, self.variables))
        except UnknownNumber as error:
            sets = error.unknown.sets if error.unknown else ()
            return self.unknowns.mark(Unknown(written, self.variables.line, sets, self._assumed_number(word, text)))

    def _assumed_number(self, word: Word, text: str) -> str | None:
        """What it is where nothing is given."""
        if self.variables.assuming is not None or _ASSIGNS.search(text):
            return None
        self.variables.assuming = set()
        try:
            return str(calculate(self.text(word), self.variables))
        except (UnknownNumber, UserError):
            return None
        finally:
            self.variables.assuming = None

    def derived(self, written: str, text: str, change: Callable[[str], str] | None) -> str:
        """A text changed; of one with unknown parts, an unknown one by the name of the expansion that changes it."""
        if not has_unknown(text) and change is not None:
            return change(text)
        unknowns = self.unknowns.found(text)
        assumed = self.unknowns.assumed(text)
        known = None if has_unknown(assumed) or change is None else change(assumed)
        sets = tuple(dict.fromkeys(name for each in unknowns for name in each.sets))
        return self.unknowns.mark(Unknown(written, unknowns[0].line or self.variables.line, sets, known))

    # ---- parts of words

    def _items(self, word: Word, tilde: re.Pattern[str] = _TILDE) -> list[_Item]:
        items: list[_Item] = []
        for number, part in enumerate(word):
            if isinstance(part, Literal):
                text = part.text
                if not part.quoted and number == 0 and "~" in text:
                    text = self._home(text, tilde)
                items.append((text, part.quoted, False))
            else:
                items += self._expanded(part)
        return items

    def _home(self, text: str, tilde: re.Pattern[str]) -> str:
        """``~`` is $HOME, which is not known here unless it is given; ``~name`` never is."""
        if match := _HOME_OF.match(text):
            return self.unknowns.mark(Unknown(match[0], self.variables.line)) + text[match.end() :]
        return tilde.sub(lambda match: match[1] + (self.variables.text("HOME") or ""), text)

    def _expanded(self, part: Part) -> list[_Item]:
        if isinstance(part, ParameterExpansion):
            value = expand_parameter(part, self)
            return self._elements(value, part.quoted) if isinstance(value, ParameterValue) else self._word(value, part)
        if isinstance(part, ArithmeticExpansion):
            return [(self.arithmetic(part.expression, part.written), part.quoted, not part.quoted)]
        if isinstance(part, CommandSubstitution):
            text = self.capture(part.body, part.written).rstrip("\n")
            return [(text, part.quoted, not part.quoted)]
        assert not isinstance(part, Literal)
        return [(self.unknowns.mark(Unknown(part.written, self.variables.line)), True, False)]

    def _elements(self, value: ParameterValue, quoted: bool) -> list[_Item]:
        if quoted and value.star:
            separator = self.variables.separators()[:1]
            return [(separator.join(value.elements), True, False)]
        if quoted and not value.is_list:
            return [("".join(value.elements), True, False)]
        items: list[_Item] = []
        separator = self.variables.separators()[:1]
        between = separator if value.star else " " if separator == " " or not value.changed else _UNCLEAR
        unusual = value.is_list and separator not in (" ", "")
        if not quoted and unusual and (value.changed or "" in value.elements):
            return [(self.unknowns.mark(Unknown("$IFS", self.variables.line)), False, True)]  # empty words or none
        for number, text in enumerate(value.elements):
            text = self.unknowns.splitting(text) if value.may_be_none else text
            items += [between] * (number > 0)
            items.append((text, quoted, not quoted))
        return items

    def _word(self, word: Word, part: ParameterExpansion) -> list[_Item]:
        """A default: what is not quoted in it is split like a value."""
        items = self._items(word)
        if part.quoted:
            return items or [("", True, False)]
        return [item if isinstance(item, str) or item[1] else (item[0], False, True) for item in items]

    # ---- splitting

    def _split(self, items: list[_Item]) -> list[list[Piece]]:
        found: list[list[Piece]] = []
        current: list[Piece] | None = None
        separators = self.variables.separators()
        for item in items:
            if isinstance(item, str):
                if current is not None:
                    found.append(current)
                current = None
                continue
            text, quoted, splits = item
            if not splits:
                if text or quoted:
                    current = [*(current or []), (text, quoted)]
                continue
            text = self.unknowns.splitting(text) if has_unknown(text) else text
            for field, begins in split_fields(text, separators):
                if begins and current is not None:
                    found.append(current)
                    current = None
                if field is not None:
                    current = [*(current or []), (field, False)]
        if current is not None:
            found.append(current)
        return found

    def _field(self, pieces: list[Piece], files: bool) -> str:
        text = "".join(piece for piece, _ in pieces)
        extended = "extglob" in self.variables.state.options
        globs = any(sign in text for sign in "*?[(") and patterns.has_glob(pieces, extended)
        if globs and (files or _names_files(text)):
            shown = self.unknowns.readable(text)
            return self.unknowns.mark(Unknown(shown, self.variables.line, splits=True))
        return text


def _names_files(text: str) -> bool:
    """Whether a pattern may be the name of a file, unlike a list such as "([0]*3+[1]*58)", "Et*3|t|L" or "M-M*-"."""
    if set("'\"") & set(text):
        return False  # quotes that eval is to read: no file has such a name
    if re.fullmatch(r"[MGE*+|/-]+", text) and set("MG") & set(text):
        return False
    layers = re.fullmatch(r"[\d\[\]()*+,|EtmL-]*[\d\])L|]", text)
    return layers is None or not set("[|") & set(text)


def split_fields(text: str, separators: str) -> list[tuple[str | None, bool]]:
    """The fields of an unquoted value, each with whether a separator stands before it; None: nothing follows it."""
    if not separators:
        return [(text, False)] if text else []
    blanks = "".join(one for one in separators if one in " \t\n")
    others = "".join(one for one in separators if one not in " \t\n")
    found: list[tuple[str | None, bool]] = []
    at, begins = 0, False
    while at < len(text) and text[at] in blanks:
        at, begins = at + 1, True
    while at < len(text):
        end = at
        while end < len(text) and text[end] not in separators:
            end += 1
        found.append((text[at:end], begins))
        at, begins = end, False
        while at < len(text) and text[at] in blanks:
            at, begins = at + 1, True
        if at < len(text) and text[at] in others:
            at, begins = at + 1, True
            while at < len(text) and text[at] in blanks:
                at += 1
    if begins:
        found.append((None, True))
    return found
