"""``[[ ]]``: from text to conditions."""

import re

from tools.from_megatron.shell.simple_parser import SimpleParser
from tools.from_megatron.shell.syntax import Command, Condition, ConditionCommand, Literal, Word, plain_text
from tools.from_megatron.shell.word_reader import merged

_UNARY = re.compile(r"-[a-zA-Z]$")
_BINARY = ("=", "==", "!=", "=~", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef")
_CONDITION_WORD = frozenset(" \t\n;&|<>()")


class ConditionParser(SimpleParser):
    """Conditions, besides simple commands."""

    def _condition_command(self) -> Command:
        start = self.at
        self.at += 2
        condition = self._condition_or()
        self._newlines()
        if self.peek(2) != "]]":
            raise self.open("[[", start)
        self.at += 2
        return ConditionCommand(condition=condition)

    def _condition_or(self) -> Condition:
        found = [self._condition_and()]
        while self._sign_of_condition() == "||":
            self.at += 2
            found.append(self._condition_and())
        return found[0] if len(found) == 1 else Condition("||", conditions=tuple(found))

    def _condition_and(self) -> Condition:
        found = [self._condition()]
        while self._sign_of_condition() == "&&":
            self.at += 2
            found.append(self._condition())
        return found[0] if len(found) == 1 else Condition("&&", conditions=tuple(found))

    def _sign_of_condition(self) -> str:
        self._newlines()
        return self.peek(2)

    def _condition(self) -> Condition:
        self._newlines()
        if re.match(r"!\s", self.peek(2)):
            self.at += 1
            return Condition("!", conditions=(self._condition(),))
        if self.peek() == "(":
            self.at += 1
            inner = self._condition_or()
            self._newlines()
            if self.peek() != ")":
                raise self._unexpected()
            self.at += 1
            return inner
        first = self._condition_word()
        text = plain_text(first)
        self._blanks()
        ends = self.peek(2) in ("]]", "&&", "||") or self.peek() == ")"
        if text and _UNARY.match(text) and not ends:
            return Condition(text, (self._condition_word(),))
        if ends or self._at_line_end():
            return Condition("-n", (first,))
        sign = max((sign for sign in _BINARY if self.text.startswith(sign, self.at)), key=len, default="")
        if not sign:
            raise self._unexpected()
        self.at += len(sign)
        self._blanks()
        second = self._regular_expression() if sign == "=~" else self._condition_word()
        return Condition(sign, (first, second))

    def _condition_word(self) -> Word:
        self._blanks()
        word = self.word(_CONDITION_WORD)
        if not word:
            raise self._unexpected()
        return word

    def _regular_expression(self) -> Word:
        """Behind =~: up to a blank outside of brackets."""
        word: Word = ()
        while self.at < len(self.text) and self.peek() not in " \t\n":
            if self.peek() == "(":
                word = merged([*word, *self._group_of_expression()])
            elif self.peek() in ";&|<>)":
                word = merged([*word, Literal(self.peek())])
                self.at += 1
            else:
                word = merged([*word, *self.part(frozenset(" \t\n();&|<>"))])
        return word

    def _group_of_expression(self) -> Word:
        start, depth = self.at, 0
        word: Word = ()
        while self.at < len(self.text):
            here = self.peek()
            if here in "()" or here in " \t;&|<>":
                depth += (here == "(") - (here == ")")
                word = merged([*word, Literal(here)])
                self.at += 1
            else:
                word = merged([*word, *self.part(frozenset(" \t\n();&|<>"))])
            if not depth:
                return word
        raise self.open("(", start)
