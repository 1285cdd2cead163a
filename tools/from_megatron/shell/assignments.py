"""Assignments, and export, declare, local and their like."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from parallel.errors import UserError
from tools.from_megatron.shell.arithmetic import UnknownNumber, calculate
from tools.from_megatron.shell.parameters import element_key
from tools.from_megatron.shell.status import SUCCESS, ExitStatus
from tools.from_megatron.shell.streams import ShellStreams
from tools.from_megatron.shell.syntax import ArrayElement, Assignment, Literal, Word
from tools.from_megatron.shell.variables import ShellState
from tools.from_megatron.unknown import has_unknown


class ShellAssignments(ShellStreams):
    """What gives variables their values."""

    def __init__(self, state: ShellState, given: Mapping[str, str]) -> None:
        super().__init__(state, given)
        self.not_followed: list[str] = []
        """Sentences on what was not followed and may set or start something."""

    @contextmanager
    def temporary(self, assignments: Sequence[Assignment]) -> Iterator[None]:
        """``NAME=value`` before a program."""
        state = self.variables.state
        before = {each.name: state.values.get(each.name) for each in assignments}
        exported = {name for name in before if name in state.exported}
        for each in assignments:
            self.assign(each)
            state.exported.add(each.name)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    state.values.pop(name, None)
                else:
                    state.values[name] = value
                if name not in exported:
                    state.exported.discard(name)

    def assign(self, assignment: Assignment) -> None:
        """``NAME=value`` and its like."""
        name, variables = assignment.name, self.variables
        if assignment.elements is not None:
            self.assign_array(name, assignment.elements, assignment.append)
            return
        text = self.expander.text(assignment.value, assigns=True)
        if name in variables.state.integers and not has_unknown(text):
            text = self.integer(text)
        if assignment.index is not None:
            key = element_key(name, assignment.index, self.expander)
            variables.set_element(name, key, text, assignment.append)
        elif assignment.append and name in variables.state.integers:
            before = variables.text(name) or "0"
            variables.set_text(name, self.integer(f"({before})+({text})"))
        else:
            variables.set_text(name, text, assignment.append)

    def integer(self, text: str) -> str:
        """The number that an expression makes; an unknown one as it is."""
        try:
            return str(calculate(text, self.variables))
        except UnknownNumber as error:
            return self.unknowns.mark(error.unknown) if error.unknown else text

    def assign_array(self, name: str, elements: Sequence[ArrayElement], append: bool) -> None:
        """``NAME=(values)``."""
        variables = self.variables
        table = name in variables.state.tables
        before = variables.state.values.get(name, {}) if append else {}
        found: dict[int | str, str] = {0: before} if isinstance(before, str) else dict(before.items())
        at = max((key for key in found if isinstance(key, int)), default=-1) + 1
        if table and elements and elements[0].index is None:
            words = self.expander.fields([each.value for each in elements])
            found |= dict(zip(words[::2], [*words[1::2], ""][: len(words[::2])], strict=True))
            elements = []
        for each in elements:
            if each.index is None:
                for text in self.expander.fields([each.value]):
                    found[at] = text
                    at += 1
                continue
            key = element_key(name, each.index, self.expander)
            found[key] = self.expander.text(each.value, assigns=True)
            at = key + 1 if isinstance(key, int) else at
        if not table:
            found = dict(sorted(found.items(), key=lambda item: int(item[0])))
        variables.set(name, found)

    def declare(self, name: str, words: Sequence[Word | Assignment]) -> ExitStatus:
        """``export``, ``declare``, ``local``, ``readonly`` and ``typeset``."""
        state, options, items = self.variables.state, "", list[str | Assignment]()
        for word in words:  # all are expanded before the first one is set
            items += self.declared(word) if isinstance(word, Assignment) else self.expander.fields([word])
        while items and isinstance(items[0], str) and items[0][:1] in ("-", "+") and len(items[0]) > 1:
            options += str(items.pop(0))
        if name != "export" and (refused := set(options) & set("nlu")):
            shown = f"{name} -{''.join(sorted(refused))}"
            raise UserError(f"line {self.variables.line}: {shown} is not followed. Write out what it means.")
        if set(options) & set("fF"):
            state.exported |= {str(item) for item in items} if name == "export" or "x" in options else set()
            return SUCCESS
        is_local = bool(state.frames) and (name == "local" or (name in ("declare", "typeset") and "g" not in options))
        for item in items:
            self.declare_one(item, name, options, is_local)
        return SUCCESS

    def declared(self, assignment: Assignment) -> list[str | Assignment]:
        """``NAME=value`` behind export and its like, expanded; an array is not, as it is set later. With braces it is
        no assignment to bash, but words."""
        if assignment.elements is not None or assignment.index is not None:
            return [assignment]
        sign = "+=" if assignment.append else "="
        written = (Literal(f"{assignment.name}{sign}"), *assignment.value)
        if self.expander.braced(written) != [written]:
            return list(self.expander.fields([written]))
        return [f"{assignment.name}{sign}{self.expander.text(assignment.value, assigns=True)}"]

    def declare_one(self, item: str | Assignment, command: str, options: str, is_local: bool) -> None:
        """One name of a declaration, with or without a value."""
        variables, state = self.variables, self.variables.state
        left, equals, text = (item.name, "", "") if isinstance(item, Assignment) else item.partition("=")
        name = left.removesuffix("+")
        if has_unknown(name):
            said = f"line {variables.line}: {command} {self.unknowns.readable(str(item))[:80]} sets what is not known."
            self.not_followed += [said] if said not in self.not_followed else []
        if not name.isidentifier():
            return
        if is_local:
            variables.make_local(name)
        if "A" in options:
            state.tables.add(name)
        if "i" in options:
            state.integers.add(name)
        if ("A" in options or "a" in options) and name not in state.values:
            variables.set(name, {})
        if isinstance(item, Assignment):
            self.assign(item)
        elif equals:
            text = self.integer(text) if name in state.integers and not has_unknown(text) else text
            variables.set_text(name, text, append=left.endswith("+"))
        if command == "export" or "x" in options:
            if "n" in options:
                state.exported.discard(name)
            else:
                state.exported.add(name)
