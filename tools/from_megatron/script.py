"""A launch script, read and not run: which command starts Megatron-LM, with which flags.

Running a stranger's script could start jobs or delete files, and it expects another machine. Followed here:
assignments, arrays, if and && that can be decided, eval and ``bash -c``. Not followed, and said so: loops, functions,
case, other files, here-documents, and branches that depend on what a command would answer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parallel.errors import UserError
from tools.from_megatron.gaps import gaps
from tools.from_megatron.statements import Statement, holds, split
from tools.from_megatron.words import Variables, one, words

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_LEADING = re.compile(r"([A-Za-z_]\w*\+?=(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|[^\s\"'$]|\$(?!\())*)\s+(?=\S)")
_DECLARES = re.compile(r"(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*")
_KEYWORD = re.compile(r"(if|elif|then|else|fi|for|while|until|select|do|done|case|esac|function|\{|\}|!)(?=\s|$)")
_SKIPPED = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "function": "}"}
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
_PRINTS = ("echo", "printf", "cat", "cp", "mkdir", "rm", "ls", "tee", "sed", "grep", "chmod", "touch", "exit", "set")
_MAX_DEPTH = 10
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--?[A-Za-z][\w-]*)(?:[=\s]+([^\s#]+))?", re.MULTILINE)
_SLURM = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS",),
    "-n": ("SLURM_NTASKS",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "--job-name": ("SLURM_JOB_NAME",),
    "-J": ("SLURM_JOB_NAME",),
}


@dataclass(slots=True)
class Launch:
    """A command that starts a .py script with flags of Megatron's."""

    launcher: list[str]
    """What stands before the .py script: srun, torchrun and their options."""
    flags: list[str]
    """What stands behind it; may hold gaps (see ``gaps``)."""
    line: int
    slurm: dict[str, str]
    """Variables that SLURM would set, from #SBATCH lines."""


@dataclass(slots=True)
class ScriptReading:
    """What a script says."""

    launches: list[Launch] = field(default_factory=list)
    not_followed: list[str] = field(default_factory=list)
    """Lines that were not followed and that set or start something, each with why."""


@dataclass(slots=True)
class _If:
    """An if that is being read."""

    runs: bool
    """Whether the branch that is being read is the one taken."""
    done: bool
    """Whether a branch was taken, or none ever will be."""
    undecided: int = 0
    """Its line, where it depends on what a command would answer; 0 once that is noted."""


def read_script(text: str, starts_megatron: Callable[[list[str]], bool], given: Mapping[str, str]) -> ScriptReading:
    """Follow a script as far as that is possible without running anything.

    starts_megatron: whether these flags are a Megatron-LM command's. given: variables from outside, which win over
    what the script assigns from something unknown. Raises UserError for what is no shell script.
    """
    slurm = {name: value for option, value in _DIRECTIVE.findall(text) for name in _SLURM.get(option, ()) if value}
    reader = _ScriptReader(starts_megatron, given, slurm)
    reader.read(text, 1)
    return reader.reading


class _ScriptReader:
    def __init__(self, starts_megatron: Callable[[list[str]], bool], given: Mapping[str, str], slurm: dict[str, str]):
        self.starts_megatron, self.given, self.slurm = starts_megatron, given, slurm
        self.variables = Variables({**slurm, **given})
        self.reading = ScriptReading()
        self.launcher: list[str] = []  # what stands before the bash -c that is being read
        self.depth = 0

    def read(self, text: str, line: int) -> None:
        """A script, or one within it."""
        if self.depth == _MAX_DEPTH:
            raise UserError(f"line {line}: scripts within scripts, {_MAX_DEPTH} deep.")
        self.depth += 1
        statements, at = split(text, line), 0
        ifs: list[_If] = []
        status: bool | None = True
        before = ";"
        while at < len(statements):
            statement = statements[at]
            at += 1
            until = _until(statements, at - 1)
            if until is not None:
                self.skip(statements[at - 1 : until], f"a {statement.text.split()[0]} is not followed", ifs)
                at, status, before = until, True, ";"
                continue
            status = self.guarded(statement, before, status, ifs)
            before = statement.behind
        if ifs:
            raise UserError(f"line {statements[-1].line}: an if has no fi.")
        self.depth -= 1

    def guarded(self, statement: Statement, before: str, status: bool | None, ifs: list[_If]) -> bool | None:
        """Run a command where the ifs around it and the && or || before it let it; the status from there on."""
        rest = self.keywords(statement, status, ifs)
        if not all(branch.runs for branch in ifs):
            self.note_undecided(rest, ifs)
        if not rest or not all(branch.runs for branch in ifs):
            return status
        if before in ("&&", "||") and not rest.startswith("fi"):
            if status is None:
                self.skip([statement], "depends on what a command answers", [])
                return None
            if status is (before == "||"):
                return status
        negated = rest.startswith("! ")
        self.variables.line = statement.line
        result = self.command(rest.removeprefix("! ").lstrip())
        return not result if negated and result is not None else result

    def keywords(self, statement: Statement, status: bool | None, ifs: list[_If]) -> str:
        """What of a command is behind if, then, else and their like, which are noted."""
        rest = statement.text
        while (match := _KEYWORD.match(rest)) and match[1] != "!":
            word, rest = match[1], rest[match.end() :].lstrip()
            if word == "if":
                ifs.append(_If(runs=True, done=not all(branch.runs for branch in ifs)))
            elif word in ("elif", "else", "then", "fi") and not ifs:
                raise UserError(f"line {statement.line}: {word} without an if.")
            elif word == "then":
                self.then(statement, status, ifs[-1])
            elif word in ("elif", "else"):
                ifs[-1].runs = not ifs[-1].done
            elif word == "fi":
                ifs.pop()
        return rest

    def then(self, statement: Statement, status: bool | None, branch: _If) -> None:
        if branch.done:
            branch.runs = False
        elif status is None:
            branch.runs, branch.done, branch.undecided = False, True, statement.line
        else:
            branch.runs = branch.done = status

    def note_undecided(self, text: str, ifs: list[_If]) -> None:
        """A command that is left out matters where nothing but an undecided if around it is to blame."""
        undecided = next((branch for branch in ifs if branch.undecided), None)
        if undecided and _matters(text) and all(branch.runs or branch is undecided for branch in ifs):
            self.reading.not_followed.append(f"line {undecided.undecided}: an if that cannot be decided.")
            undecided.undecided = 0

    def skip(self, statements: list[Statement], why: str, ifs: list[_If]) -> None:
        """Note lines that are not followed, where they would set or start anything."""
        if any(_matters(statement.text) for statement in statements) and all(branch.runs for branch in ifs):
            self.reading.not_followed.append(f"line {statements[0].line}: {why}.")

    def command(self, text: str) -> bool | None:
        """Whether a simple command succeeds; None: that cannot be known."""
        if text == "<<":
            self.reading.not_followed.append(f"line {self.variables.line}: a here-document is not read.")
            return True
        declared = _DECLARES.match(text)
        text = text[declared.end() :] if declared else text
        array = re.match(r"[A-Za-z_]\w*\+?=\(", text)
        while not declared and not array and (leading := _LEADING.match(text)):
            self.assign(leading[1])  # NAME=value before a program
            text = text[leading.end() :]
        if assignment := _ASSIGNMENT.fullmatch(text):
            self.assign(text) if not declared or "(" in assignment[3] else self.assign_all(text)
            return True
        if declared:
            return True
        found = words(text, self.variables)
        return self.program(found, text) if found else True

    def assign_all(self, text: str) -> None:
        """``export A=1 B=2``."""
        starts = [match.start() for match in re.finditer(r"(?:^|(?<=\s))[A-Za-z_]\w*=", text)]
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            self.assign(text[start:end].strip())

    def assign(self, text: str) -> None:
        """``NAME=value``, ``NAME+=value`` or ``NAME=(words)``."""
        match = _ASSIGNMENT.fullmatch(text)
        assert match is not None  # the caller saw one
        name, append, right = match.groups()
        before = self.variables.values.get(name, [] if right.startswith("(") else "")
        if right.startswith("("):
            elements = words(right[1:-1], self.variables)
            self.variables.values[name] = ([before] if isinstance(before, str) else before) * bool(append) + elements
            return
        value = one(right, self.variables)
        value = self.given[name] if gaps(value) and name in self.given else value
        if append and isinstance(before, list):
            self.variables.values[name] = ["".join(before[:1]) + value, *before[1:]]
        else:
            self.variables.values[name] = f"{before}{value}" if append else value

    def program(self, found: list[str], text: str) -> bool | None:
        """A test, a shell with a text of its own, Megatron's launch, or nothing to us."""
        name, rest = found[0], found[1:]
        if name in ("[", "test", "[["):
            return holds(rest[: -1 if name != "test" else None])
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("source", ".", "shift"):
            why = "arguments are shifted" if name == "shift" else f"another file, {' '.join(rest)}, is not read"
            self.reading.not_followed.append(f"line {self.variables.line}: {why}.")
            return True
        if name.startswith("--"):
            raise UserError(
                f"line {self.variables.line}: a command begins with {name}. The line before it does not continue: "
                "a \\ must be its last character (no blank, no comment behind it)."
            )
        if name in _PRINTS:
            return True
        return self.nested(found) or self.launch(found)

    def nested(self, found: list[str]) -> bool | None:
        """eval and bash -c; None where it is neither."""
        if found[0] == "eval":
            self.read(" ".join(found[1:]), self.variables.line)
            return True
        for number, word in enumerate(found[:-2]):
            if word in _SHELLS and re.fullmatch(r"-\w*c", found[number + 1]):
                before, self.launcher = self.launcher, [*self.launcher, *found[:number]]
                self.read(found[number + 2], self.variables.line)
                self.launcher = before
                return True
        return None

    def launch(self, found: list[str]) -> bool | None:
        for number, word in enumerate(found):
            if word.endswith(".py") and self.starts_megatron(found[number + 1 :]):
                launcher = self.launcher + found[:number]
                self.reading.launches.append(Launch(launcher, found[number + 1 :], self.variables.line, self.slurm))
                return True
        return True if found[0] in ("cd", "module", "ulimit", "set", "unset", "wait") else None


def _matters(text: str) -> bool:
    """Whether leaving a command out may change a flag, or what is started."""
    while (match := _KEYWORD.match(text)) is not None:
        text = text[match.end() :].lstrip()
    text = text[_DECLARES.match(text).end() :] if _DECLARES.match(text) else text  # type: ignore[union-attr]
    first = text.split(maxsplit=1)[:1]
    return bool(_ASSIGNMENT.fullmatch(text)) or (".py" in text and first != [] and first[0] not in _PRINTS)


def _until(statements: list[Statement], at: int) -> int | None:
    """Behind the loop, case or function that begins at this command; None where none does."""
    words_here = statements[at].text.split()
    word = words_here[0] if words_here else ""
    is_function = statements[at].behind == "(" and statements[at + 1 : at + 2] != [] and (
        len(words_here) == 1 and statements[at + 1].text == "" and statements[at + 1].behind == ")"
    )  # fmt: skip
    if word not in _SKIPPED and not is_function:
        return None
    close = "}" if is_function else _SKIPPED[word]
    openings = [name for name, end in _SKIPPED.items() if end == close] if close != "}" else ["{"]
    depth = int(close != "}") if not is_function and word != "function" else 0
    for end in range(at + (depth > 0), len(statements)):
        named = [found[1] for found in [_KEYWORD.match(statements[end].text)] if found]
        opened = named[:1] != [] and named[0] in openings
        if close == "}" and statements[end].text.rstrip().endswith("{"):
            opened = True
        depth += opened
        if named[:1] == [close]:
            depth -= 1
            if depth == 0:
                return end + 1
    raise UserError(f"line {statements[at].line}: what begins here has no {close}.")
