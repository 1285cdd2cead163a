"""From a script's text to commands, a line at a time: what stands behind an exit need not be a script."""

import re
from collections.abc import Callable

from parallel.errors import UserError
from tools.from_megatron.shell.condition_parser import ConditionParser
from tools.from_megatron.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    ArithmeticFor,
    CaseCommand,
    Command,
    CommandGroup,
    ForCommand,
    FunctionDefinition,
    IfCommand,
    Pipe,
    SimpleCommand,
    WhileCommand,
    Word,
    plain_text,
)
from tools.from_megatron.shell.word_reader import MOST_NESTED

_FUNCTION = re.compile(r"([^\s;&|<>()$'\"`\\=]+)[ \t]*\([ \t]*\)")


class ScriptParser(ConditionParser):
    """Commands of a text, one complete line of them after the other. Raises UserError with the line."""

    def next_line(self) -> list[Command] | None:
        """The commands up to the end of a line; None at the end of the text."""
        self._newlines()
        if self.at >= len(self.text):
            return None
        found = [self._and_or()]
        while self._separator(found[-1]) and not self._at_line_end():
            found.append(self._and_or())
        self._blanks()
        if self.at < len(self.text) and self.peek() != "\n":
            raise self._unexpected()
        if self._heredocs:
            self.at += 1
            self._read_heredocs()
        return found

    def commands_until(self, end: str) -> list[Command]:
        """Commands up to a closing bracket, which is read too."""
        start = self.at
        found = self._list((end,))
        if self.peek(len(end)) != end:
            raise self.open("(", start - 1)
        self.at += len(end)
        return found

    def commands_of(self, text: str, line: int) -> list[Command]:
        """All commands of another text."""
        inner = ScriptParser(text, line)
        inner._depth = self._depth
        found: list[Command] = []
        while (commands := inner.next_line()) is not None:
            found += commands
        return found

    def _body(self, ends: tuple[str, ...]) -> list[Command]:
        """As ``_list``; bash takes no empty one here."""
        found = self._list(ends)
        if not found and self.at < len(self.text):
            raise self._unexpected()
        return found

    def _list(self, ends: tuple[str, ...]) -> list[Command]:
        """Commands up to one of these keywords or signs, which is not read."""
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise UserError(f"line {self.line()}: commands within commands, more than {MOST_NESTED} deep.")
        found: list[Command] = []
        self._newlines()
        while self.at < len(self.text) and not self._ends_here(ends):
            found.append(self._and_or())
            if not self._separator(found[-1]):
                self._blanks()
                if not self._ends_here(ends) and self.at < len(self.text) and self.peek() != "\n":
                    raise self._unexpected()
            self._newlines()
        self._depth -= 1
        return found

    def _ends_here(self, ends: tuple[str, ...]) -> bool:
        keyword = self._keyword()
        words = [end for end in ends if end.isalpha() or end == "}"]
        return keyword in words or self.text.startswith(tuple(set(ends) - set(words)) or "\0", self.at)

    def _separator(self, command: Command) -> bool:
        """Over ; or &; whether more may stand on this line."""
        self._blanks()
        if self.peek() == ";" and self.peek(2) not in (";;", ";&"):
            self.at += 1
        elif self.peek() == "&" and self.peek(2) != "&&":
            self.at += 1
            command.background = True
        else:
            return False
        self._blanks()
        return True

    def _and_or(self) -> Command:
        start = self.at
        commands, operators = [self._pipe()], [""]
        while (sign := self._sign(2)) in ("&&", "||"):
            self.at += 2
            self._newlines()
            operators.append(sign)
            commands.append(self._pipe())
        if len(commands) == 1:
            return commands[0]
        return self._placed(AndOr(operators=operators, commands=commands), start)

    def _pipe(self) -> Command:
        start, negated = self.at, False
        while (keyword := self._keyword()) in ("!", "time"):
            self.at += len(keyword)
            self._blanks()
            if keyword == "time" and self.text.startswith("-p", self.at):
                self.at += 2
                self._blanks()
            negated ^= keyword == "!"
        commands = [self._command()]
        while self._sign(1) == "|" and self.peek(2) != "||":
            self.at += 2 if self.peek(2) == "|&" else 1
            self._newlines()
            commands.append(self._command())
        if len(commands) == 1 and not negated:
            return commands[0]
        return self._placed(Pipe(commands=commands, negated=negated), start)

    def _command(self) -> Command:
        self._blanks()
        start = self.at
        compound = self._compound()
        if compound is None:
            return self._simple()
        self._placed(compound, start)
        self._blanks()
        while self._redirection(compound.redirections):
            self._blanks()
        return compound

    def _compound(self) -> Command | None:
        if self.peek(2) == "((" and (inner := self._arithmetic(self.at)) is not None:
            return ArithmeticCommand(expression=inner)
        if self.peek() == "(":
            self.at += 1
            body = self.commands_until(")")
            if not body:
                raise self._unexpected()
            return CommandGroup(body=body, subshell=True)
        if re.match(r"\[\[(?=\s)", self.text[self.at : self.at + 3]):
            return self._condition_command()
        keyword = self._keyword()
        readers: dict[str, Callable[[], Command]] = {
            "if": self._if, "while": self._while, "until": self._while, "for": self._for, "select": self._for,
            "case": self._case, "function": self._function, "{": self._group,
        }  # fmt: skip
        if keyword in readers:
            return readers[keyword]()
        if keyword == "coproc":
            raise UserError(f"line {self.line()}: coproc is not followed. Write out what it does.")
        if keyword:
            raise self._unexpected()
        if (match := _FUNCTION.match(self.text, self.at)) is not None:
            self.at = match.end()
            return self._function_body(match[1])
        return None

    def _expect(self, word: str, what: str, start: int) -> None:
        if self._keyword() != word:
            if self.at >= len(self.text):
                raise UserError(f"line {self.line(start)}: the {what} that begins here has no {word}.")
            raise self._unexpected()
        self.at += len(word)

    def _group(self) -> Command:
        start = self.at
        self.at += 1
        body = self._body(("}",))
        self._expect("}", "{", start)
        return CommandGroup(body=body)

    def _if(self) -> Command:
        start = self.at
        branches: list[tuple[list[Command] | None, list[Command]]] = []
        self.at += 2
        while True:
            condition = self._body(("then",))
            self._expect("then", "if", start)
            branches.append((condition, self._body(("elif", "else", "fi"))))
            if self._keyword() != "elif":
                break
            self.at += 4
        if self._keyword() == "else":
            self.at += 4
            branches.append((None, self._body(("fi",))))
        self._expect("fi", "if", start)
        return IfCommand(branches=branches)

    def _while(self) -> Command:
        start, until = self.at, self._keyword() == "until"
        self.at += 5
        condition = self._body(("do",))
        return WhileCommand(condition=condition, body=self._loop_body(start), until=until)

    def _loop_body(self, start: int) -> list[Command]:
        self._newlines()
        if self._keyword() == "{":
            group = self._group()
            assert isinstance(group, CommandGroup)
            return group.body
        self._expect("do", "loop", start)
        body = self._body(("done",))
        self._expect("done", "loop", start)
        return body

    def _for(self) -> Command:
        start, select = self.at, self._keyword() == "select"
        self.at += 6 if select else 3
        self._blanks()
        if self.peek(2) == "((":
            return self._arithmetic_for(start)
        name = plain_text(self.word())
        if not name or not name.isidentifier():
            raise UserError(f"line {self.line(start)}: a loop without a variable's name.")
        self._newlines()
        words: list[Word] | None = None
        if re.match(r"in(?=[\s;])", self.text[self.at : self.at + 3]):
            self.at += 2
            words = []
            while self._sign(1) not in ("", ";", "\n"):
                word = self.word()
                if not word:
                    raise self._unexpected()
                words.append(word)
        self._blanks()
        if self.peek() == ";":
            self.at += 1
        return ForCommand(name=name, words=words, body=self._loop_body(start), select=select)

    def _arithmetic_for(self, start: int) -> Command:
        begin = self.at
        if self._arithmetic(self.at) is None:
            raise self.open("((", begin)
        parts = self.text[begin + 2 : self.at - 2].split(";")
        if len(parts) != 3:
            raise UserError(f"line {self.line(start)}: for (( )) takes three expressions, found {len(parts)}.")
        first, condition, step = (self.inner(part, begin) for part in parts)
        self._blanks()
        if self.peek() == ";":
            self.at += 1
        return ArithmeticFor(first=first, condition=condition, step=step, body=self._loop_body(start))

    def _case(self) -> Command:
        start = self.at
        self.at += 4
        self._blanks()
        word = self.word()
        self._newlines()
        self._in(start)
        branches: list[tuple[list[Word], list[Command], str]] = []
        self._newlines()
        while self._keyword() != "esac":
            if self.at >= len(self.text):
                raise UserError(f"line {self.line(start)}: the case that begins here has no esac.")
            branches.append(self._branch())
            self._newlines()
        self.at += 4
        return CaseCommand(word=word, branches=branches)

    def _in(self, start: int) -> None:
        if not re.match(r"in(?=\s|$)", self.text[self.at : self.at + 3]):
            raise UserError(f"line {self.line(start)}: a case without its in.")
        self.at += 2

    def _branch(self) -> tuple[list[Word], list[Command], str]:
        if self.peek() == "(":
            self.at += 1
        patterns: list[Word] = []
        sign = "|"
        while sign == "|":
            self._blanks()
            patterns.append(self.word(frozenset(" \t\n|()")))
            sign = self._sign(1)
            if not patterns[-1] or sign not in ("|", ")"):
                raise self._unexpected()
            self.at += 1
        body = self._list((";;", ";&", "esac"))
        end = next((sign for sign in (";;&", ";;", ";&") if self.text.startswith(sign, self.at)), "")
        self.at += len(end)
        return patterns, body, end or ";;"

    def _function(self) -> Command:
        self.at += 8
        self._blanks()
        match = re.compile(r"([^\s;&|<>()$'\"`\\]+)[ \t]*(?:\([ \t]*\))?").match(self.text, self.at)
        if match is None:
            raise UserError(f"line {self.line()}: a function without a name.")
        self.at = match.end()
        return self._function_body(match[1])

    def _function_body(self, name: str) -> Command:
        start = self.at
        self._newlines()
        body = self._command() if self.at < len(self.text) else None
        if body is None or isinstance(body, SimpleCommand):
            raise UserError(f"line {self.line(start)}: the function {name} has no {{ }}.")
        return FunctionDefinition(name=name, body=body)
