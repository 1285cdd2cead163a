"""What a command's words start: a function, another script, Megatron-LM, or a program whose output may be known."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from parallel.errors import UserError
from tools.from_megatron.shell import status as statuses
from tools.from_megatron.shell import text_programs
from tools.from_megatron.shell.assignments import ShellAssignments
from tools.from_megatron.shell.builtins import BUILTINS
from tools.from_megatron.shell.programs import (
    NestedScript,
    directives,
    launch_at,
    nested_script,
    program_name,
    trains_nothing,
)
from tools.from_megatron.shell.status import FAILURE, SUCCESS, UNKNOWN, ExitStatus, FunctionReturn, LoopEnd, ShellExit
from tools.from_megatron.shell.streams import InputText
from tools.from_megatron.shell.syntax import Command
from tools.from_megatron.shell.variables import Frame, ShellState
from tools.from_megatron.unknown import ScriptWord, has_unknown

MOST_COMMANDS = 30_000
MOST_NESTED = 40
"""Scripts within scripts, and calls within calls."""
CONTROL = frozenset(
    "command builtin exec env eval source . exit return break continue true : false wait test [".split()
)
"""What changes which commands follow, or runs others."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts a program with flags of Megatron's."""

    launcher: list[ScriptWord]
    """What stands before the program: srun, torchrun and their options."""
    program: ScriptWord
    flags: list[ScriptWord]
    """What stands behind it."""
    line: int
    slurm: dict[str, str]
    """Variables that SLURM would set, from #SBATCH lines and sbatch's flags."""


type ReadScript = Callable[[str, str | None], str | None]
"""A file's text by its path and the working folder; None where it is not to be read."""


class ShellPrograms(ShellAssignments):
    """Programs, functions and scripts.

    starts_megatron: whether words are flags of Megatron-LM's. read_file: see ReadScript. given: what --set says.
    """

    def __init__(
        self,
        starts_megatron: Callable[[Sequence[str]], bool],
        given: Mapping[str, str],
        read_file: ReadScript,
        state: ShellState,
    ) -> None:
        super().__init__(state, given)
        self.starts_megatron, self.read_file = starts_megatron, read_file
        self.launches: list[Launch] = []
        self.other_tasks: list[str] = []
        """Programs of Megatron-LM's that train nothing."""
        self.within_words: list[str] = []
        """Sentences on commands of which a word may start Megatron-LM."""
        self.reading: list[str] = []
        """Scripts that are read, the innermost last."""
        self.launcher: list[str] = []
        """What stands before the script that is read."""
        self.commands, self.depth, self.loops = 0, 0, 0

    @abstractmethod
    def run_text(self, text: str, line: int = 1) -> ExitStatus:
        """A script's text, line by line."""

    @abstractmethod
    def run(self, command: Command) -> ExitStatus:
        """One command."""

    @contextmanager
    def deeper(self, what: str) -> Iterator[None]:
        """One level further down. Raises UserError where there are too many."""
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise UserError(f"line {self.variables.line}: {what}, more than {MOST_NESTED} deep.")
        try:
            yield
        finally:
            self.depth -= 1

    @contextmanager
    def subshell(self) -> Iterator["SubshellEnd"]:
        """Changes of variables are lost behind it."""
        before, end, input_before = self.variables.state, SubshellEnd(), self.input
        self.variables.state = before.copied()
        try:
            yield end
        except ShellExit as stop:
            if self.commands > MOST_COMMANDS:
                raise
            end.status = stop.status
        except LoopEnd:
            end.status = SUCCESS
        finally:
            self.variables.state = before
            self.input = input_before

    def program(self, fields: list[str], command: Command) -> ExitStatus:
        """A function, a command of bash's own, a script, Megatron's launch, or another program."""
        name, rest = fields[0], fields[1:]
        state = self.variables.state
        if name in state.functions:
            return self.call(state.functions[name], rest)
        if name in CONTROL:
            return self.control(name, rest, command)
        if name in BUILTINS:
            return BUILTINS[name](self, rest)
        if name.startswith("--"):
            raise UserError(
                f"line {self.variables.line}: a command begins with {self.unknowns.readable(name)}. The line before it "
                "does not continue: a \\ must be its last character (no blank, no comment behind it)."
            )
        if program_name(name) in text_programs.PROGRAMS:
            return self.other_program(fields)
        at = launch_at(fields, self.starts_megatron)
        if at is not None and trains_nothing(fields[at]):
            said = f"line {self.variables.line}: {self.unknowns.readable(fields[at])} trains nothing."
            self.other_tasks += [said] if said not in self.other_tasks else []
            self.print_unknown()
            return UNKNOWN
        if at is not None:
            self.launch(fields, at)
            self.print_unknown()
            return UNKNOWN
        nested = nested_script(fields)
        if nested is not None:
            return self.nested(nested)
        return self.other_program(fields)

    def control(self, name: str, rest: list[str], command: Command) -> ExitStatus:
        """What changes which commands follow, and what starts others in this shell."""
        if name in ("true", ":", "wait"):
            return SUCCESS
        if name == "false":
            return FAILURE
        if name in ("test", "["):  # by a name that only an expansion makes
            return statuses.of(None)
        if name in ("exit", "return", "break", "continue"):
            return self.leave(name, rest)
        if name == "eval":
            return self.run_text(" ".join(rest), self.variables.line)
        if name in ("source", "."):
            return self.source(rest)
        if name == "env":
            return self.env(rest, command)
        if name == "command" and rest[:1] in (["-v"], ["-V"]):
            self.print_unknown()
            return UNKNOWN
        if name == "exec" and rest[:1] == ["-a"]:
            rest = rest[2:]
        if not rest:
            return SUCCESS
        if name == "exec":
            raise ShellExit(self.program(rest, command))
        return self.program(rest, command)

    def env(self, rest: list[str], command: Command) -> ExitStatus:
        """``env NAME=value program``."""
        assignments = []
        while rest and ("=" in rest[0].partition("/")[0] or rest[0].startswith("-")):
            word = rest.pop(0)
            if word in ("-u", "--unset", "-C", "-S") and rest:
                rest.pop(0)
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                assignments.append((name, value))
        if not rest:
            self.print_unknown()
            return UNKNOWN
        with self.subshell() as end:
            for name, value in assignments:
                self.variables.set_text(name, value)
                self.variables.state.exported.add(name)
            end.status = self.program(rest, command)
        return end.status

    def leave(self, name: str, rest: list[str]) -> ExitStatus:
        """``exit``, ``return``, ``break`` and ``continue``."""
        number = rest[0] if rest else ""
        if name in ("break", "continue"):
            if not self.loops:  # as bash, which only says so
                return SUCCESS
            raise LoopEnd(int(number) if number.isdigit() else 1, name == "continue")
        code = int(number) & 255 if number.isdigit() else None if number else self.variables.last
        status = ExitStatus(code)
        if name == "return" and not self.variables.state.frames and not self.variables.state.source:
            return ExitStatus(2)
        raise (ShellExit if name == "exit" else FunctionReturn)(status)

    def call(self, body: Command, arguments: list[str]) -> ExitStatus:
        """A function."""
        state = self.variables.state
        state.frames.append(Frame(state.positional, state.arguments_open))
        state.positional, state.arguments_open = arguments, False
        try:
            with self.deeper("functions within functions"):
                return self.run(body)
        except FunctionReturn as end:
            return end.status
        finally:
            self.variables.state = state
            self.variables.leave()

    def source(self, rest: list[str]) -> ExitStatus:
        """``source FILE``."""
        path = rest[0] if rest else ""
        text = self.text_of(path)
        if text is None:
            shown = self.unknowns.readable(path)
            self.not_followed.append(
                f"line {self.variables.line}: another file, {shown}, is not read: put it beside the script, or its "
                "lines in the place of this one."
            )
            return UNKNOWN
        state = self.variables.state
        before = state.positional, state.arguments_open, state.source
        if rest[1:]:
            state.positional, state.arguments_open = rest[1:], False
        state.source = path
        line = self.variables.line
        try:
            return self.run_text(text)
        except FunctionReturn as end:
            return end.status
        except UserError as error:
            raise UserError(f"{program_name(path)}, {error}") from None
        finally:
            self.variables.line = line
            if rest[1:]:
                self.variables.state.positional, self.variables.state.arguments_open = before[:2]
            self.variables.state.source = before[2]

    def text_of(self, path: str) -> str | None:
        """A file that the script has written, or that lies beside it."""
        path = self.unknowns.plain(path)
        if path in self.files:
            return self.files[path]
        here = self.unknowns.found(path)
        if len(here) == 1 and path[1:2] == "/" and here[0].written in ("$PWD", "$(pwd)", "`pwd`"):
            path = path[2:]  # whoever starts it is where the script expects it to be
        if has_unknown(path):
            return None
        return self.files.get(path.removeprefix("./")) or self.read_file(path, self.variables.state.folder)

    def nested(self, script: NestedScript) -> ExitStatus:
        """A script that a command starts, in a shell of its own."""
        if script.kind == "input":
            text = None if self.input is None else self.input.rest
        else:
            text = script.source if script.kind == "text" else self.text_of(script.source)
        if text is None:
            shown = self.unknowns.readable(script.source) or "its input"
            self.not_followed.append(
                f"line {self.variables.line}: it starts another script, {shown}, which is not read: put it "
                "beside this one."
            )
            self.print_unknown()
            return UNKNOWN
        if text in self.reading:  # a job that submits itself again
            return UNKNOWN
        outer, line = self.variables.state, self.variables.line
        child = ShellState() if script.remote else outer.for_child()
        child.positional, child.name = list(script.arguments), script.name
        child.slurm = dict(outer.slurm)
        if script.slurm is not None:
            child.slurm = directives(text) | script.slurm
            child.values |= child.slurm
            child.exported |= set(child.slurm)
            child.unset = {name: names for name, names in child.unset.items() if name not in child.slurm}
        loops, self.loops = self.loops, 0
        launcher, self.launcher = self.launcher, [] if script.slurm is not None else [*self.launcher, *script.launcher]
        self.variables.state = child
        try:
            status = self.run_text(text, line if script.kind == "text" else 1)
        except ShellExit as stop:
            if self.commands > MOST_COMMANDS:
                raise
            status = stop.status
        except LoopEnd:
            status = UNKNOWN
        finally:
            self.variables.state, self.variables.line, self.launcher, self.loops = outer, line, launcher, loops
        return status

    def launch(self, fields: list[str], at: int) -> None:
        """Note a command that starts Megatron-LM."""

        def word(text: str) -> ScriptWord:
            return self.unknowns.word(self.unknowns.without_branches(text))

        launch = Launch(
            [word(each) for each in (*self.launcher, *fields[:at])], word(fields[at]),
            [word(each) for each in fields[at + 1 :]], self.variables.line, dict(self.variables.state.slurm),
        )  # fmt: skip
        if launch not in self.launches:
            self.launches.append(launch)

    def other_program(self, fields: list[str]) -> ExitStatus:
        """Known where its output is a function of its words."""
        name, fields = program_name(fields[0]), [self.unknowns.plain(field) for field in fields]
        if name in ("cat", "head", "tail", "wc", "cut", "tr") and len(fields) > 1 and fields[-1] in self.files:
            outer, self.input = self.input, InputText(self.files[fields[-1]])
            status = self.other_program(fields[:-1])
            self.input = outer
            return status
        if name == "tee":
            if self.input is not None:
                for path in fields[1:]:
                    self.files[path] = self.input.rest
                self.emit(self.input.rest)
            else:
                self.print_unknown()
            return UNKNOWN
        if name in ("realpath", "readlink"):
            return self.real_path(fields[1:])
        given = None if self.input is None else self.input.rest
        text = text_programs.output_of(fields, given)
        if name not in text_programs.PROGRAMS and any(self.starts_within(field) for field in fields[1:]):
            shown = self.unknowns.readable(fields[0])
            self.within_words.append(f"line {self.variables.line}: what {shown} does with its words is not followed.")
        if text is None:
            self.print_unknown()
            return UNKNOWN
        self.emit(text)
        return UNKNOWN if text_programs.PROGRAMS[name] is text_programs.nothing else SUCCESS

    def starts_within(self, word: str) -> bool:
        """Whether a word is itself a command that starts Megatron-LM."""
        words = word.split()
        return len(words) > 2 and launch_at(words, self.starts_megatron) is not None

    def real_path(self, words: list[str]) -> ExitStatus:
        """``realpath`` of the script itself and of its folders; others may be links."""
        path = words[-1] if words else ""
        here = self.variables.state.name
        known = here and (here == path or here.startswith(path.rstrip("/") + "/")) and ".." not in path
        if known:
            self.emit(f"{path.rstrip('/')}\n")
        else:
            self.print_unknown()
        return UNKNOWN


@dataclass(slots=True)
class SubshellEnd:
    """How a subshell ended."""

    status: ExitStatus = SUCCESS
