"""What a script has set: values, positional parameters, functions, options, files that it wrote."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallel.errors import UserError
from tools.from_megatron.shell.syntax import Command
from tools.from_megatron.unknown import Unknown, UnknownValues, has_unknown

type ShellValue = str | dict[int | str, str]
"""A text, an array, or a table (declare -A)."""

BRACES = "B"
"""The letter of set for braces that are expanded: on until set +B."""
MOST_TEXT = 1 << 20
"""Characters of one value."""
ALWAYS_SET = frozenset(
    "BASH BASHPID BASH_VERSION BASH_SOURCE BASH_LINENO EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HOME HOSTNAME"
    " HOSTTYPE LOGNAME MACHTYPE OLDPWD OSTYPE PATH PIPESTATUS PPID PWD RANDOM SECONDS SHELL SHLVL SRANDOM TERM UID USER"
    " _ 0 $ ! - ?".split()
)
"""What every shell has, with values that cannot be known here; other variables are unset where nothing sets them."""


@dataclass(slots=True)
class Frame:
    """What a function call hides."""

    positional: list[str]
    arguments_open: bool = False
    hidden: dict[str, "tuple[ShellValue | None, tuple[str, ...] | None]"] = field(default_factory=dict)
    """Values of names that are local in it, None where there is none; and what ``unset`` said of them."""


@dataclass(slots=True)
class ShellState:
    """What one shell knows; a subshell works on a copy."""

    values: dict[str, ShellValue] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    integers: set[str] = field(default_factory=set)
    """Names declared by -i."""
    tables: set[str] = field(default_factory=set)
    """Names declared by -A."""
    unset: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that the script would set in a branch that is not taken, or has unset: empty, not from outside. With what
    --set can give so that the branch may be taken."""
    functions: dict[str, Command] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    arguments_open: bool = False
    """Whether the script may get more of them: one that is not given is asked for."""
    shifted: int = 0
    """How many of them are gone."""
    name: str = ""
    """$0; empty where it is not known."""
    options: set[str] = field(default_factory=lambda: {BRACES})
    """Letters of set: e, u, a, B; names of shopt."""
    frames: list[Frame] = field(default_factory=list)
    option_at: int = 0
    """Where getopts is within a word of several letters."""
    source: str = ""
    """The file that is being read by source."""
    folder: str | None = None
    """The working folder, once the script has changed to a known one."""
    slurm: dict[str, str] = field(default_factory=dict)

    def copied(self) -> "ShellState":
        """For a subshell."""
        new = copy.copy(self)
        new.values = {name: value if isinstance(value, str) else value.copy() for name, value in self.values.items()}
        new.exported, new.integers, new.unset = set(self.exported), set(self.integers), dict(self.unset)
        new.functions, new.options, new.tables = dict(self.functions), set(self.options), set(self.tables)
        new.positional = list(self.positional)
        new.frames = [Frame(list(each.positional), each.arguments_open, dict(each.hidden)) for each in self.frames]
        return new

    def for_child(self) -> "ShellState":
        """For a program: exported values only."""
        kept: dict[str, ShellValue] = {
            name: value for name, value in self.values.items() if name in self.exported and isinstance(value, str)
        }
        unset = dict.fromkeys((name for name in self.values if name not in kept), ()) | self.unset
        functions = {name: body for name, body in self.functions.items() if name in self.exported}
        exported = {*kept, *functions}
        return ShellState(kept, exported, unset=unset, functions=functions, folder=self.folder, slurm=self.slurm)


class Variables:
    """Reading and writing them as bash does, where unknown values are marks in texts."""

    def __init__(self, state: ShellState, unknowns: UnknownValues, given: Mapping[str, str]) -> None:
        self.state, self.unknowns, self.given = state, unknowns, given
        self.line = 1
        self.last: int | None = 0
        """$?; None: not known."""
        self.assuming: set[str] | None = None
        """While a condition is read: names that were taken to be unset."""
        self.read: set[str] = set()
        """Names whose values were asked for; # where it was the number of arguments, or all of them."""
        self.overwritten: dict[str, int] = {}
        """Names that --set gives and the script sets, with the line."""

    # ---- reading

    def get(self, name: str) -> ShellValue | None:
        """A value, unknown ones included; None where bash has none: it is unset, and known to be."""
        self.read.add(name)
        value = self._special(name)
        if value is None:
            value = self.state.values.get(name)
        if value is None and self.state.unset.get(name):
            value = self._by_branch(name)
        elif value is None and name not in self.state.unset and not self._inside(name):
            value = self._from_outside(name)
        kept = name in self.state.values
        if self.assuming is not None and isinstance(value, str) and not kept and self.is_outside(value):
            self._assumed_text(value)
            return None
        return self._assumed(value)

    def is_unset(self, name: str) -> bool:
        """As ``${NAME-...}`` asks: a variable that nothing sets is unset."""
        self.read.add(name)
        value = self._special(name)
        if value is None:
            return name not in self.state.values and name not in ALWAYS_SET
        return isinstance(value, str) and name.isdigit() and self.is_outside(value)

    def is_outside(self, value: str) -> bool:
        """Whether a text is nothing but a variable that nothing sets."""
        found = self.unknowns.found(value)
        return len(value) == 1 and len(found) == 1 and found[0].assumed == ""

    def text(self, name: str) -> str | None:
        """As ``$NAME``: of an array its first element."""
        value = self.get(name)
        if isinstance(value, dict):
            value = value.get(0, value.get("0")) if value else None
        return value

    def output(self, written: str) -> str:
        """Of a ``$( )`` whose output cannot be known here: --set may give it, by the command as it is written."""
        self.read.add(written)
        if written in self.given:
            return self.given[written]
        return self.unknowns.mark(Unknown(written, self.line, (written,)))

    def elements(self, name: str) -> list[str]:
        """As ``${NAME[@]}``."""
        value = self.get(name)
        if value is None:
            return []
        return [value] if isinstance(value, str) else list(value.values())

    def arguments(self) -> list[str]:
        """As ``$@``."""
        self.read.add("#")
        return [self._assumed_text(each) for each in self.state.positional]

    def _inside(self, name: str) -> bool:
        """Whether a positional parameter is known to be missing."""
        return name.isdigit() and name != "0" and not self.state.arguments_open

    def _special(self, name: str) -> ShellValue | None:
        state = self.state
        if name == "#":
            return self._number_of(state.positional)
        if name == "0" and state.name:
            return state.name
        if name == "LINENO":
            return str(self.line)
        if name == "BASH_SOURCE" and (state.source or state.name):
            return state.source or state.name
        if name == "?" and self.last is not None:
            return str(self.last)
        if name == "PWD" and state.folder is not None:
            return state.folder
        if name in ("IFS", "OPTIND") and name not in state.values and name not in state.unset:
            return " \t\n" if name == "IFS" else "1"
        if name.isdigit() and name != "0":
            return self._argument(int(name), state.positional)
        return None

    def _number_of(self, words: list[str]) -> str:
        uncertain = [each for word in words for each in self.unknowns.found(word) if each.splits]
        if uncertain:
            return self.unknowns.mark(Unknown("$#", self.line, uncertain[0].sets))
        if self.state.arguments_open:
            following = str(len(words) + self.state.shifted + 1)
            return self.unknowns.mark(Unknown("$#", self.line, (following,), assumed=str(len(words))))
        return str(len(words))

    def _argument(self, number: int, words: list[str]) -> str | None:
        """One of these; behind one that may be several, it is not known which."""
        self.read.add(str(number + self.state.shifted))
        uncertain = [each for word in words[: number - 1] for each in self.unknowns.found(word) if each.splits]
        if uncertain:
            return self.unknowns.mark(Unknown(f"${number}", self.line, uncertain[0].sets))
        word = words[number - 1] if number <= len(words) else None
        if word is not None and self.is_outside(word):
            word = self.unknowns.mark(replace(self.unknowns.found(word)[0], line=self.line))
        return word

    def _from_outside(self, name: str) -> str:
        number = int(name) + self.state.shifted if name.isdigit() and name != "0" else 0
        asked = str(number) if number else name
        always = name in ALWAYS_SET
        settable = (asked,) if number or name.isidentifier() else ()
        return self.unknowns.mark(Unknown(f"${asked}", self.line, settable, assumed=None if always else ""))

    def _by_branch(self, name: str) -> str:
        """A variable that is set only in a branch that is not taken, where that depends on what is not given."""
        return self.unknowns.mark(Unknown(f"${name}", self.line, self.state.unset[name], "", by_branch=True))

    def _assumed(self, value: ShellValue | None) -> ShellValue | None:
        if self.assuming is None or value is None:
            return value
        if isinstance(value, str):
            return self._assumed_text(value)
        return {key: self._assumed_text(each) for key, each in value.items()}

    def _assumed_text(self, text: str) -> str:
        if self.assuming is None or not has_unknown(text):
            return text
        self.assuming |= {name for each in self.unknowns.found(text) if each.assumed is not None for name in each.sets}
        return self.unknowns.assumed(text)

    def separators(self) -> str:
        """$IFS."""
        value = self.state.values.get("IFS")
        return value if isinstance(value, str) else " \t\n"

    # ---- writing

    def set(self, name: str, value: ShellValue) -> None:
        """Give a variable a value. Raises UserError for one that is too long."""
        size = len(value) if isinstance(value, str) else sum(map(len, value.values())) + len(value)
        if size > MOST_TEXT:
            raise UserError(f"line {self.line}: {name} becomes longer than {MOST_TEXT:,} characters.")
        if isinstance(value, str):
            value = self._named(name, value)
        self.state.values[name] = value
        self.state.unset.pop(name, None)
        if "a" in self.state.options:
            self.state.exported.add(name)

    def set_text(self, name: str, text: str, append: bool = False) -> None:
        """As ``NAME=text``: of an array, its first element."""
        before = self.state.values.get(name)
        if isinstance(before, dict):
            first: int | str = 0 if all(isinstance(key, int) for key in before) else "0"
            old = before.get(first, "") if append else ""
            self.set(name, {**before, first: old + text})
            return
        if append and before is None:
            before = "" if name in self.state.unset else self.given.get(name, "")
        self.set(name, f"{before}{text}" if append else text)

    def set_element(self, name: str, key: int | str, text: str, append: bool = False) -> None:
        """As ``NAME[key]=text``."""
        before = self.state.values.get(name, {})
        table: dict[int | str, str] = {0: before} if isinstance(before, str) else dict(before.items())
        if isinstance(key, int) and key < 0:
            key += max((number for number in table if isinstance(number, int)), default=-1) + 1
            if key < 0:
                raise UserError(f"line {self.line}: {name} has no element at that negative index.")
        table[key] = (table.get(key, "") if append else "") + text
        if all(isinstance(one, int) for one in table):
            table = dict(sorted(table.items(), key=lambda item: int(item[0])))
        self.set(name, table)

    def remove(self, name: str) -> None:
        """As ``unset NAME``."""
        self.state.values.pop(name, None)
        self.state.exported.discard(name)
        self.state.unset[name] = ()

    def make_local(self, name: str) -> None:
        """As ``local NAME``."""
        if self.state.frames:
            hidden = self.state.frames[-1].hidden
            if name not in hidden:
                hidden[name] = (self.state.values.get(name), self.state.unset.get(name))
                self.remove(name)

    def leave(self) -> None:
        """The end of a function: what it hid is there again."""
        for name, (value, unset) in self.state.frames[-1].hidden.items():
            self.remove(name)
            if unset is None:
                del self.state.unset[name]
            else:
                self.state.unset[name] = unset
            if value is not None:
                self.state.values[name] = value
        frame = self.state.frames.pop()
        self.state.positional, self.state.arguments_open = frame.positional, frame.arguments_open

    def _named(self, name: str, value: str) -> str:
        """An unknown value by the name that it is given to, which --set takes; or what --set says."""
        unknowns = self.unknowns.found(value)
        if not unknowns:
            if self.given.get(name, value) != value and name in self.given:
                self.overwritten.setdefault(name, self.line)
            return value
        if name in self.given:
            self.read.add(name)
            return self.given[name]
        whole = len(value) == 1  # a part of it is not what --set NAME=VALUE would give
        for each in unknowns:
            if not each.sets or (whole and each.sets == (each.written,)):
                named = Unknown(each.written, each.line or self.line, (name,), each.assumed)
                value = value.replace(self.unknowns.mark(each), self.unknowns.mark(named))
        return value
